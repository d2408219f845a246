"""Results are held to a truth, on inputs that look like data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases
from benchmarks.cases import Case
from tests.benchmarks.toy import TOY, off_by_one, provider, square


def test_truth_is_float64_and_one_wrong_element_is_far_from_it() -> None:
    case = TOY.case(jnp.bfloat16, k=1, n=1000)
    inputs = cases.inputs(case)
    want = cases.truth(case, inputs, mode="fwd")
    assert want.dtype == np.float64
    assert 0 < cases.deviation(square(*inputs), want) < cases.TOLERANCE["bf16"]
    assert cases.deviation(off_by_one(*inputs), want) > 0.1
    assert np.isnan(cases.deviation(square(*inputs).at[5].set(jnp.nan), want))


def test_large_cases_are_held_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "FLOAT64_BYTES", 15)
    case = TOY.case(jnp.bfloat16, k=1, n=4)
    assert cases.truth(case, cases.inputs(case), mode="fwd").dtype == np.float32


@pytest.mark.parametrize("jit", [True, False])
def test_backward_is_the_gradient_with_random_cotangents(jit: bool) -> None:
    case = TOY.case(jnp.float32, k=1, n=64)
    (x,) = inputs = cases.inputs(case)
    function, arguments = cases.prepare(provider("", jit=jit), {}, inputs, mode="bwd")
    (dx,) = function(*arguments)
    dy = arguments[1]
    assert 0.5 < jnp.std(dy) < 2
    np.testing.assert_allclose(dx, 2 * x * dy, rtol=1e-6)
    assert cases.deviation((dx,), cases.truth(case, inputs, mode="bwd")) < 1e-6


def test_moved_bytes() -> None:
    case = Case(
        title="",
        inputs=(
            jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
            jax.ShapeDtypeStruct((3,), jnp.float32),
        ),
        reference=lambda x, s: jnp.sum(x, axis=1).astype(jnp.float32) * s,
        extra_bytes=7,
    )
    assert cases.moved_bytes(case, mode="fwd") == 30 + 12 + 12
    assert cases.moved_bytes(case, mode="bwd") == 2 * (30 + 12) + 12 + 7


def test_inputs_are_normal_and_differ_from_each_other() -> None:
    x, y = cases.normal((jax.ShapeDtypeStruct((512, 64), jnp.bfloat16),) * 2, seed=0)
    assert x.dtype == jnp.bfloat16
    assert abs(np.corrcoef(np.ravel(x).astype(float), np.ravel(y).astype(float))[0, 1]) < 0.05
    assert abs(np.std(np.asarray(x, np.float32)) - 1) < 0.05
