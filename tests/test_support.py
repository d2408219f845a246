"""The tests' own tools fail when they should."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import (
    EPS32,
    TOLERANCES,
    assert_as_good_as_reference,
    assert_close,
    case,
    in_float64,
    random_array,
    random_cotangents,
    value_and_vjp,
)

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


# Closeness


@pytest.mark.parametrize("dtype", [jnp.float64, *DTYPES])
def test_close_allows_one_rounding_and_no_more(dtype: Any) -> None:
    eps = float(jnp.finfo(dtype).eps)
    want = np.asarray([1.0, -1.0, 0.5]).astype(dtype)
    assert_close(want * np.asarray(1 + eps).astype(dtype), want)
    with pytest.raises(AssertionError, match=r"array\[0\]: got 1\.\d+, want 1"):
        assert_close(want * np.asarray(1 + max(2 * eps, 40 * EPS32)).astype(dtype), want)


def test_close_grows_with_the_terms_of_a_sum_only() -> None:
    want = np.ones(10_000, np.float32)
    got = want + np.float32(40 * EPS32)
    assert_close(got, want, terms=100)
    with pytest.raises(AssertionError, match="they differ by"):
        assert_close(got, want)


def test_close_by_scale() -> None:
    want = np.asarray([1.0, 1e-6], np.float32)
    got = np.asarray([1.0, 1.1e-6], np.float32)
    assert_close(got, want)
    with pytest.raises(AssertionError, match="they differ by"):
        assert_close(got, want, scale=0.0)


@pytest.mark.parametrize(
    ("got", "want"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (3e38, np.inf)],
)
def test_close_wants_the_same_nan_and_infinities(got: float, want: float) -> None:
    one, other = np.asarray([got], np.float32), np.asarray([want], np.float32)
    assert_close(one, one)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_close(one, other)


def test_close_wants_the_same_form() -> None:
    x = jnp.ones((2, 3))
    for other in (x[0], x[..., None], x.astype(jnp.bfloat16)):
        with pytest.raises(AssertionError, match=r"got\.(shape|dtype)="):
            assert_close(x, other)
    with pytest.raises(ValueError, match=r"structure|arity|leaf"):
        assert_close((x, x), (x,))
    with pytest.raises(AssertionError, match=r"array\['dx'\]\[1\]"):
        assert_close({"dx": (x, x)}, {"dx": (x, 2 * x)})


# As good as the reference


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_good_as_reference_doubles_the_reference_error(
    rng: np.random.Generator, dtype: Any
) -> None:
    truth = rng.standard_normal(1000)
    noise = 100 * EPS32 * rng.standard_normal(1000)
    reference = (truth + noise).astype(dtype)
    assert_as_good_as_reference(reference, reference, truth)
    worse = (truth + 4 * (reference.astype(np.float64) - truth)).astype(dtype)
    with pytest.raises(AssertionError, match="mean error"):
        assert_as_good_as_reference(worse, reference, truth)


def test_as_good_as_reference_sees_one_bad_element_among_many(rng: np.random.Generator) -> None:
    truth = rng.standard_normal(100_000)
    reference = truth.astype(jnp.bfloat16)
    got = reference.copy()
    got[77] += np.asarray(0.1).astype(jnp.bfloat16)
    with pytest.raises(AssertionError, match="largest error"):
        assert_as_good_as_reference(got, reference, truth)


def test_as_good_as_reference_has_a_floor_of_ulps() -> None:
    truth = np.ones(4)
    exact = truth.astype(np.float32)
    assert_as_good_as_reference(exact + np.float32(2 * EPS32), exact, truth)
    with pytest.raises(AssertionError, match="error"):
        assert_as_good_as_reference(exact + np.float32(8 * EPS32), exact, truth)
    with pytest.raises(AssertionError, match="error"):
        assert_as_good_as_reference(exact[:1] * np.float32(1e-9), 0 * exact[:1], np.zeros(1))


def test_as_good_as_reference_wants_the_same_nan_and_infinities() -> None:
    truth = np.asarray([1.0, np.nan, -np.inf, 1e6])
    with np.errstate(over="ignore"):
        reference = truth.astype(jnp.float16)  # 1e6 is infinite there
    assert_as_good_as_reference(reference, reference, truth)
    for index in range(4):
        got = reference.copy()
        got[index] = np.inf if index == 2 else -np.inf
        with pytest.raises(AssertionError, match="NaN or infinite"):
            assert_as_good_as_reference(got, reference, truth)
        with pytest.raises(AssertionError, match="reference array"):
            assert_as_good_as_reference(reference, got, truth)


def test_as_good_as_reference_wants_float64() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(AssertionError, match="not float64"):
        assert_as_good_as_reference(x, x, x)
    with pytest.raises(AssertionError, match="dtype"):
        assert_as_good_as_reference(x.astype(jnp.bfloat16), x, x.astype(np.float64))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_nothing_compare(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    assert_close(x, x)
    assert_as_good_as_reference(x, x, x.astype(np.float64))


# The rest


def test_rng_depends_on_the_test(rng: np.random.Generator, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_rng_depends_on_the_test"
    assert rng.integers(1 << 30) == 222354380


def test_in_float64_is_float64() -> None:
    x = jnp.asarray([1 / 3], jnp.bfloat16)
    (out, index) = in_float64(lambda x, i: (jnp.exp(x), i), x, jnp.arange(3))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, np.exp(np.asarray(x).astype(np.float64)), rtol=1e-15)
    assert index.dtype == np.int32
    assert jnp.ones(1).dtype == jnp.float32


def test_value_and_vjp_takes_random_cotangents(rng: np.random.Generator) -> None:
    x = random_array(rng, (5,), jnp.bfloat16)
    out, index = jax.eval_shape(lambda x: (jax.nn.softmax(x), jnp.argmax(x)), x)
    cotangents = random_cotangents(rng, (out, index))
    assert cotangents[0].dtype == jnp.bfloat16
    assert cotangents[1].dtype == jax.dtypes.float0
    _, (dx,) = value_and_vjp(lambda x: (jax.nn.softmax(x), jnp.argmax(x)), (x,), cotangents)
    assert np.abs(np.asarray(dx).astype(np.float64)).max() > 0.01


def test_case_ids() -> None:
    assert case(n=33, chunk=16, reverse=True, shift=None).id == "n33-chunk16-reverse"
    assert case(act="silu", dtype=jnp.bfloat16, reverse=False).id == "silu-bfloat16"


def test_every_kernel_dtype_has_a_tolerance() -> None:
    assert set(TOLERANCES) == {jnp.dtype(dtype) for dtype in (jnp.float64, *DTYPES)}


def test_jax_is_strict() -> None:
    assert len(jax.devices("cpu")) == 8
    with pytest.raises(ValueError, match="dtype_promotion"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)
