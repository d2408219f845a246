"""Without the parts of JAX that may go, and beyond what CUDA counts, the references run."""

import importlib.util
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.core import backend, triton_ext
from pallas_ops.core.backend import NoKernelError
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


FEATURES = jnp.ones((1, 2))
TOO_MANY = [
    (pallas_ops.logcumsumexp, (2**17, 2**14, 3), "2147483648 rows, of which kernels count"),
    (pallas_ops.chunk_cumsum_decay, (2**17, 2**14, 3), "2147483648 rows, of which kernels count"),
    (
        partial(pallas_ops.lrpe_cosine, theta=FEATURES),
        (2**16, 2**15, 1, 1, 2),
        "2147483648 programs",
    ),
]


@pytest.mark.parametrize(("fn", "shape", "message"), TOO_MANY)
def test_more_than_kernels_can_count(fn: Any, shape: tuple[int, ...], message: str) -> None:
    """With the rows that `jax.vmap` adds."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with pytest.warns(UserWarning, match=message):
        lowered = h200.lower_for_cuda(jax.vmap(fn), x)
    assert "pallas_ops" not in lowered.as_text()
    with pytest.raises(NoKernelError, match=message):
        h200.lower_for_cuda(jax.vmap(partial(fn, implementation="triton")), x)


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
