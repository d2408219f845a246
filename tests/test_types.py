"""A user's script runs, and type checkers find nothing in it."""

import importlib.util
import pathlib
import runpy
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("user_script.py")


@pytest.mark.slow
def test_the_script_runs() -> None:
    assert runpy.run_path(str(SCRIPT))["out"].shape == (2, 6, 2, 4)


CHECKERS = [
    ["mypy", "--strict", "--no-incremental"],
    ["pyright", "--pythonpath", sys.executable],
]


@pytest.mark.slow
@pytest.mark.parametrize("command", CHECKERS, ids=["mypy", "pyright"])
def test_type_checkers_accept_it(command: list[str], tmp_path: pathlib.Path) -> None:
    """From another folder, so that the package is installed to them and not their own."""
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: pip install -e '.[dev]'")
    copy = tmp_path / "script.py"
    copy.write_text(SCRIPT.read_text())
    run = [sys.executable, "-m", *command, str(copy)]
    checked = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_type_checkers_refuse_what_the_ops_refuse(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[dev]'")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import jax.numpy as jnp, pallas_ops\n"
        "x = jnp.ones((2, 3))\n"
        'pallas_ops.chunk_cumsum_decay(x, shift="Chunk")\n'
        'pallas_ops.logcumsumexp(x, implementation="cuda")\n'
        "pallas_ops.logcumsumexp(x, axis=1.5)\n"
        "pallas_ops.logcumsumexp(None)\n"
        "pallas_ops.Residuals.TPA_DECOD\n"
    )
    run = [sys.executable, "-m", "mypy", "--no-incremental", str(wrong)]
    checked = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    assert lines == {3, 4, 5, 6, 7}, checked.stdout
