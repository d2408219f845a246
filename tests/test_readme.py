"""The README's example runs as pasted."""

import pathlib
import re


def test_the_example_runs() -> None:
    readme = pathlib.Path(__file__).parents[1] / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert getattr(names["out"], "shape", None) == (8, 1, 32, 128)
