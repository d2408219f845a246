"""tpa_decode of feature factors in eight bits, and their quantisation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_ops
from tests.ops import cpu_mesh
from tests.shards import assert_sharded, place
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_turn,
    kernel_implementation,
    random_array,
    random_cotangents,
    to_float64,
    value_and_vjp,
)
from tests.tpa_decode import DTYPES8, both, factors, loop, loop_gradients, quantised, widened

KERNEL = kernel_implementation()
Rng = np.random.Generator


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_quantised_factors_are_near(rng: Rng, dtype: Any, dtype8: Any) -> None:
    """Within half a step of the largest feature; A factors keep their digits."""
    a = random_array(rng, (3, 40, 2, 7), dtype)
    b = jnp.asarray(rng.standard_normal((3, 40, 2, 16)) * 2.0 ** rng.integers(-6, 6, (2, 1)), dtype)
    got_a, got_b = pallas_ops.quantize_tpa_factors(a, b, np.dtype(dtype8).type)
    assert (got_a.dtype, got_b.dtype) == (dtype, dtype8)
    x, y, exact_a, exact_b = (to_float64(z) for z in (got_a, got_b, a, b))
    s = 2.0 ** np.round(np.log2(np.abs(x / exact_a).max(axis=-1, keepdims=True)))
    normal = np.abs(exact_a * s) >= float(jnp.finfo(dtype).tiny)
    np.testing.assert_array_equal(x, np.where(normal, exact_a * s, x))
    assert np.all(np.abs(x - exact_a * s) <= 2.0**-25)  # where float16 is subnormal
    error, top = np.abs(y * s - exact_b), np.abs(exact_b).max(axis=-1, keepdims=True)
    if dtype8 == jnp.int8:
        assert np.all(np.abs(y).max(axis=-1) > 63)
        assert np.all(error <= s / 2)
    else:
        assert np.all(np.abs(y).max(axis=-1) > 223)
        assert np.all(error <= np.maximum(np.abs(exact_b) / 16, top * 2.0**-18))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_quantised_extremes(dtype: Any, dtype8: Any) -> None:
    """Neither infinities nor NaN nor subnormal A factors, unless they were there."""
    info = jnp.finfo(dtype)
    values = [0.0, float(info.max), float(info.tiny), 1.0, 1e-20, -1e20, -127.0]
    a, b = (jnp.asarray(x, dtype) for x in np.meshgrid(values, values))
    a, b = a.reshape(-1, 1), b.reshape(-1, 1)
    a = jnp.concatenate([a, jnp.roll(a, 3, axis=0)], axis=-1)
    x, y = (np.asarray(z, np.float32) for z in pallas_ops.quantize_tpa_factors(a, b, dtype8))
    assert np.isfinite(x).all()
    assert np.isfinite(y).all()
    assert np.all((x == 0) | (np.abs(x) >= float(info.tiny)))
    np.testing.assert_array_equal(x == 0, np.asarray(a == 0))
    np.testing.assert_array_equal(y[b[:, 0] == 0], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_a_head_that_is_not_finite_changes_no_other(rng: Rng, dtype8: Any, bad: float) -> None:
    a, b = random_array(rng, (5, 3)), random_array(rng, (5, 16)) * 1e3
    x, y = pallas_ops.quantize_tpa_factors(a, b, dtype8)
    got_x, got_y = pallas_ops.quantize_tpa_factors(a.at[1, 2].set(bad), b, dtype8)
    np.testing.assert_array_equal(got_x, x.at[1, 2].set(bad))
    np.testing.assert_array_equal(got_y, y)


def test_small_heads_of_float16_beside_large_features() -> None:
    """The step is larger than the largest float16 number, but a times the step is not."""
    a, b = jnp.full((1, 2), 0.01, jnp.float16), jnp.array([[1e7, -3e6]])
    x, y = pallas_ops.quantize_tpa_factors(a, b, jnp.int8)
    np.testing.assert_array_equal(x, a.astype(jnp.float32) * 2**17)
    np.testing.assert_array_equal(y, [[76, -23]])


@pytest.mark.parametrize("dtype8", DTYPES8)
def test_the_smallest_features_are_not_lost(dtype8: Any) -> None:
    """Their least power of two would be subnormal."""
    x, y = pallas_ops.quantize_tpa_factors(jnp.full((1, 1), 1e36), jnp.full((1, 8), 1e-36), dtype8)
    np.testing.assert_allclose(x * y.astype(jnp.float32), np.ones((1, 8)), rtol=1 / 16)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_quantised_features_that_are_not_finite_make_nan(bad: float) -> None:
    a, b = jnp.ones((2, 3)), jnp.array([[1.0, bad], [1.0, 2.0]])
    x, y = pallas_ops.quantize_tpa_factors(a, b, jnp.int8)
    np.testing.assert_array_equal(jnp.isnan(x).all(axis=-1), [True, False])
    np.testing.assert_array_equal(y[1], [32, 64])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dtype="int4"), ValueError, "dtype is 'int4'; accepted: int8 or float8_e4m3fn"),
        (dict(dtype=np.ones(2)), ValueError, r"accepted: int8 or float8_e4m3fn"),
        (dict(dtype=None), ValueError, "dtype is None; accepted: int8 or float8_e4m3fn"),
        (dict(b=jnp.zeros((3, 4))), ValueError, r"b.shape is \(3, 4\); accepted: \[..., D\] with"),
        (dict(a=jnp.zeros((2, 3), int)), TypeError, "a.dtype is 'int32'; accepted: bfloat16"),
    ],
)
def test_quantising_refuses(change: dict[str, Any], error: type, message: str) -> None:
    given: dict[str, Any] = dict(a=jnp.zeros((2, 3)), b=jnp.zeros((2, 4)), dtype=jnp.int8)
    with pytest.raises(error, match=message):
        pallas_ops.quantize_tpa_factors(**(given | change))


SHAPES = [
    case(b=2, n=1, m=67, h=5, r=6, d=24, e=16),
    case(b=1, n=2, m=45, h=17, r=4, d=16, e=34, rk=2, rv=3),
    case(b=1, n=1, m=40, h=34, r=6, d=64, e=64, rk=2, rv=2),
    case(b=1, n=1, m=70, h=47, d=32, e=16, rk=2, rv=2, full=True),
]


EIGHT_BITS = [
    pytest.param(d8, d, id=f"{d8.__name__}-{d.__name__}")
    for d8, d in [
        (jnp.int8, jnp.bfloat16),
        (jnp.int8, jnp.float32),
        (jnp.float8_e4m3fn, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float16),
    ]
]


@pytest.mark.parametrize(("shape", "dtype8", "dtype"), in_turn(SHAPES, EIGHT_BITS))
def test_decoding_of_eight_bits(rng: Rng, shape: Any, dtype8: Any, dtype: Any) -> None:
    """What the same numbers in 16 bits and more give, and their gradients."""
    xs = quantised(factors(rng, dtype, **shape), dtype8)
    lengths = jnp.asarray(rng.integers(shape["n"], shape["m"] + 1, shape["b"]), jnp.int32)
    smooth = [i for i in range(4) if xs[i] is not None]
    weights = random_cotangents(rng, jax.eval_shape(both("xla"), *xs))

    def of(implementation: Any) -> Any:
        def run(*ys: jax.Array) -> Any:
            filled = dict(zip(smooth, ys, strict=True))
            given: Any = [filled.get(i, x) for i, x in enumerate(xs)]
            return both(implementation, lengths=lengths)(*given)

        return value_and_vjp(run, tuple(xs[i] for i in smooth), weights)

    (got, grads), own = of(KERNEL), both("xla", lengths=lengths)(*xs)
    out, lse = zip(got, own, loop(widened(xs), lengths), strict=True)
    assert_as_good_as_reference(*out)
    if dtype == jnp.bfloat16:  # scores are within 2**-16 of their largest
        assert_as_good_as_reference(*lse, floor=2.0**-16)
    else:
        assert_as_good_as_reference(*lse)
    truth = loop_gradients(widened(xs), lengths, weights)
    assert_close(grads, tuple(truth[i] for i in smooth), terms=shape["m"])


def test_gradients_of_eight_bits_are_refused(rng: Rng) -> None:
    aq, ak, av, bq, bk, bv = quantised(factors(rng), jnp.float8_e4m3fn)

    def run(bk: jax.Array) -> jax.Array:
        return pallas_ops.tpa_decode(aq, ak, av, bq, bk, bv).sum()

    with pytest.raises(TypeError, match="factor of dtype float8_e4m3fn; accepted: factors that"):
        jax.grad(run)(bk)


@pytest.mark.parametrize("of_b", [{"b": "x"}, {"m": "x"}])
def test_quantised_factors_keep_explicit_types(rng: Rng, of_b: dict[str, str]) -> None:
    """Both results are split as the head factors are; under vmap too."""
    mesh, layout, axes = cpu_mesh(AxisType.Explicit), {"b": "x"}, ("b m h", "b m d")
    xs = random_array(rng, (4, 8, 2)), random_array(rng, (4, 8, 6))
    want = pallas_ops.quantize_tpa_factors(*xs, jnp.int8)
    with jax.set_mesh(mesh):
        (a,), (b,) = place(mesh, xs[:1], axes[:1], layout), place(mesh, xs[1:], axes[1:], of_b)
        got = pallas_ops.quantize_tpa_factors(a, b, jnp.int8)
        mapped = got
        if of_b == layout:
            mapped = jax.vmap(partial(pallas_ops.quantize_tpa_factors, dtype=jnp.int8))(a, b)
    for results in got, mapped:
        for x, y in zip(results, want, strict=True):
            np.testing.assert_array_equal(x, y)
        assert_sharded(results, axes, mesh, layout)
