"""Without the parts of JAX that may go, the package imports and the references run."""

import importlib.util
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import backend, triton_ext
from tests import h200
from tests.ops import TERMS, TestedOp, every_op
from tests.support import assert_close

Rng = np.random.Generator
MISSING = {"module": "no Pallas Triton backend", "load": "no Triton load"}


@pytest.fixture(params=MISSING)
def message(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a JAX that lacks the module, or one name of it."""
    if request.param == "module":
        monkeypatch.setattr(backend, "plgpu", None)
    else:
        monkeypatch.delattr(backend.plgpu, request.param)
    return f"JAX {jax.__version__} has {MISSING[request.param]}, which the kernels need; accepted: "


@every_op
def test_references_run_and_say_so(op: TestedOp, message: str) -> None:
    xs = op.structs(jnp.float32)
    with pytest.warns(UserWarning, match=f"{op.name} runs as jax.numpy: {message}"):
        lowered = h200.lower_for_cuda(partial(op.fn), *xs)
    assert "triton" not in lowered.as_text()


@pytest.mark.filterwarnings("ignore:.* runs as jax.numpy")  # where there is a GPU
@every_op
def test_kernels_that_are_asked_for_are_refused(rng: Rng, op: TestedOp, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}implementation=None or 'xla'"):
        h200.lower_for_cuda(partial(op.fn, implementation="triton"), *op.structs(jnp.float32))
    with pytest.raises(ValueError, match=message):
        op.fn(*op.arguments(rng, b=7), implementation="interpret")  # for which none is compiled
    xs = op.arguments(rng)
    assert_close(op.fn(*xs), op.fn(*xs, implementation="xla"), terms=TERMS)


def test_import_without_the_backend() -> None:
    program = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp, pallas_ops
assert pallas_ops.logcumsumexp(jnp.zeros((1, 4)), axis=1).shape == (1, 4)
assert pallas_ops.DISABLE_JAX_EXPORT_CHECKS
"""
    strict = "-Werror", "-Wignore:logcumsumexp runs as jax.numpy"  # said where there is a GPU
    subprocess.run([sys.executable, *strict, "-c", program], check=True)


@pytest.mark.parametrize(
    "name",
    ["_ensure_ir_value", "_element_type", "lower_jaxpr_to_triton_ir", "register_lowering"],
)
def test_private_names_may_go(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(triton_ext.lowering, name)
    assert not fresh_copy(triton_ext).AVAILABLE
    monkeypatch.undo()
    assert fresh_copy(triton_ext).AVAILABLE


def fresh_copy(module: Any) -> Any:
    """The module, executed once more."""
    spec = importlib.util.spec_from_file_location("copy", module.__file__)
    assert spec
    assert spec.loader
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
