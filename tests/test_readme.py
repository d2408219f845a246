"""The README's example and the guide's recipes run as pasted."""

import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_example_runs() -> None:
    names: dict[str, object] = {}
    (code,) = python_of("README.md")
    exec(code, names)
    assert getattr(names["out"], "shape", None) == (8, 1, 32, 128)


def test_the_guide_runs() -> None:
    """One block after the other, as a reader would."""
    names: dict[str, object] = {}
    for code in python_of("docs/guide.md"):
        exec(code, names)
    assert getattr(names["out"], "shape", None) == (2, 100, 64)


def test_the_page_on_sharding_runs() -> None:
    names: Any = {}
    for code in python_of("docs/sharding.md"):
        exec(code, names)
    assert (names["same"] == names["out"]).all()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        assert page != "README.md", f"{link}: package indexes show this page without the others"
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert not heading or heading in slugs, link
