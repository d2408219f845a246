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


WRONG = """\
import jax.numpy as jnp, pallas_ops
x = jnp.ones((2, 3))
pallas_ops.chunk_cumsum_decay(x, shift="Chunk")
pallas_ops.logcumsumexp(x, implementation="cuda")
pallas_ops.logcumsumexp(x, axis=1.5)
pallas_ops.logcumsumexp(None)
pallas_ops.Residuals.TPA_DECOD
"""


def run(folder: pathlib.Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """From another folder, so that the package is installed to it and not its own."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install -e '.[dev]'")
    (folder / "script.py").write_text(SCRIPT.read_text())
    (folder / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_pyright_accepts_it(tmp_path: pathlib.Path) -> None:
    checked = run(tmp_path, "pyright", "--pythonpath", sys.executable, "script.py")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_mypy_accepts_it_and_refuses_what_the_ops_refuse(tmp_path: pathlib.Path) -> None:
    """In one run: most of its time goes to JAX."""
    checked = run(tmp_path, "mypy", "--strict", "--no-incremental", "script.py", "wrong.py")
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    found = {(name, int(line)) for name, line, *_ in (error.split(":") for error in errors)}
    assert found == {("wrong.py", line) for line in range(3, 8)}, checked.stdout + checked.stderr
