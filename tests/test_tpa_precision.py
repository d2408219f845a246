"""tpa_decode with precision="default": what is rounded, and prompts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.ops.tpa_decode import formed, prompt, prompt_backward
from tests import cudnn
from tests.support import (
    assert_as_good_as_reference,
    case,
    in_turn,
    kernel_implementation,
    random_cotangents,
    to_float64,
)
from tests.tpa_decode import (
    DTYPES8,
    both,
    factors,
    loop,
    loop_gradients,
    poisoned_with,
    quantised,
    widened,
)

KERNEL = kernel_implementation()
# The emulator has no cuDNN.
WITH_CUDNN: Any = "triton" if jax.default_backend() == "gpu" else "interpret"
Rng = np.random.Generator
DTYPES = [jnp.bfloat16, jnp.float16]
SHAPES = [
    case(b=2, n=1, m=96, h=34, r=6, d=64, e=64, rk=2, rv=2),
    case(b=2, n=1, m=133, h=47, r=6, d=64, e=64, rk=2, rv=2),
    case(b=1, n=1, m=70, h=75, r=6, d=32, e=32, rk=2, rv=2),
    case(b=2, n=3, m=70, h=5, r=6, d=24, e=16),
    case(b=2, n=1, m=96, h=22, d=64, e=64, rk=2, rv=2, full=True),
]


def rounded(xs: Any, lengths: Any = None) -> Any:
    """q, k and v formed and rounded: what an error is held to."""
    return pallas_ops.reference.tpa_decode_naive(*xs, lengths=lengths)


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES))
def test_it_is_as_good_as_rounded_queries_keys_and_values(
    rng: Rng, shape: dict[str, Any], dtype: Any
) -> None:
    xs = factors(rng, dtype, **shape)
    lengths = jnp.asarray(rng.integers(shape["n"], shape["m"] + 1, shape["b"]), jnp.int32)
    decode = partial(pallas_ops.tpa_decode, implementation=KERNEL, precision="default")

    @jax.jit
    def compare(xs: Any, lengths: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda *xs: decode(*xs, lengths=lengths), *xs)
        own, pull_own = jax.vjp(lambda *xs: rounded(xs, lengths), *xs)
        return (out, pull(cotangent)), (own, pull_own(cotangent))

    cotangent = random_cotangents(rng, jax.eval_shape(rounded, xs))
    got, own = compare(xs, lengths, cotangent)
    truth, lse = loop(xs, lengths)
    assert_as_good_as_reference(got[0], own[0], truth)
    wants = loop_gradients(xs, lengths, (cotangent, np.zeros(lse.shape)))
    assert_as_good_as_reference(got[1], own[1], wants)


def test_log_sum_exps_are_those_of_rounded_queries(rng: Rng) -> None:
    xs = factors(rng, jnp.bfloat16, b=4, m=128, h=8, r=16, d=64, e=32)
    xs = (xs[0] * 20, *xs[1:])
    want = loop(xs, [128] * 4)[1]
    got = both(KERNEL, precision="default")(*xs)[1]
    assert abs(want).max() > 20
    error = abs(to_float64(got) - want).max()
    assert 1e-6 < error < 2.0**-9 * abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_eight_bits(rng: Rng, dtype8: Any) -> None:
    xs = quantised(factors(rng, jnp.bfloat16, m=70, h=17, rk=2, rv=2), dtype8)
    got = both(KERNEL, precision="default")(*xs)[0]
    own = jax.jit(rounded)(widened(xs))
    assert_as_good_as_reference(got, own, loop(widened(xs), [70, 70])[0])


@pytest.mark.parametrize("h", [8, 34])
def test_scores_of_high_precision_keep_16_bits(rng: Rng, h: int) -> None:
    xs = factors(rng, jnp.bfloat16, b=4, m=128, h=h, r=6, d=64, e=32, rk=2, rv=2)
    xs = (xs[0] * 20, *xs[1:])
    want = loop(xs, [128] * 4)[1]
    largest = loop((*map(abs, xs[:4]), abs(xs[4]), xs[5]), [128] * 4)[1].max()
    error = abs(to_float64(both(KERNEL, precision="high")(*xs)[1]) - want).max()
    assert 2.0**-24 * largest < error < 2.0**-16 * largest
    # A call that is differentiated ignores it.
    got, exact = (jax.vjp(both(KERNEL, **x), *xs)[0] for x in (dict(precision="high"), {}))
    assert jnp.array_equal(got[1], exact[1])


def test_names_of_precisions(rng: Rng) -> None:
    xs = factors(rng)

    def program(precision: Any) -> str:
        decode = partial(pallas_ops.tpa_decode, precision=precision, implementation=KERNEL)
        return str(jax.make_jaxpr(decode)(*xs))

    assert program(None) == program("highest") == program(jax.lax.Precision.HIGHEST)
    assert program("high") == program(jax.lax.Precision.HIGH) != program(None)
    assert program("default") == program(jax.lax.Precision.DEFAULT) != program(None)


OPTIONS = [case(window=33), case(batch_invariant=True)]


@pytest.mark.parametrize(("options", "query"), in_turn(OPTIONS, [jnp.bfloat16, jnp.float32]))
def test_windows_batches_and_float32_queries(rng: Rng, options: dict[str, Any], query: Any) -> None:
    """Float32 queries with a cache of bfloat16 are rounded as well."""
    aq, ak, av, bq, bk, bv = factors(rng, jnp.bfloat16, m=600, h=17, r=6, d=32, e=32, rk=2, rv=2)
    xs = aq.astype(query), ak, av, bq.astype(query), bk, bv
    got = both(KERNEL, precision="default", **options)(*xs)[0]
    assert got.dtype == query
    window = options.get("window")
    naive = partial(pallas_ops.reference.tpa_decode_naive, window=window)
    # For a GPU XLA would leave k and v in float32.
    own = jax.jit(naive, compiler_options={"xla_allow_excess_precision": False})(
        aq, ak, av, bq, bk, bv
    )
    truth = loop(xs, [600, 600], window)[0]
    assert_as_good_as_reference(got.astype(jnp.bfloat16), own, truth)


PROMPTS = [
    case(b=3, n=12, m=40, h=5, r=6, d=24, e=24, rk=2, rv=2),
    case(b=3, n=17, m=17, h=4, r=3, d=16, e=16),
    case(b=3, n=20, m=33, h=7, d=32, e=32, rk=2, rv=1, full=True),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "lengths"),
    in_turn(in_turn(PROMPTS, DTYPES), [[17, 3, 0], None, [1000, 12, -3]]),
)
def test_prompts(
    rng: Rng, shape: dict[str, Any], dtype: Any, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys beyond the lengths may hold NaN; a query that no key comes before gets 0."""
    monkeypatch.setattr(prompt, "LEAST_ROWS", 1)
    if WITH_CUDNN == "interpret":
        cudnn.instead(monkeypatch)
    jax.clear_caches()  # the same calls may have been made without
    xs = factors(rng, dtype, **shape)
    given = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    ends = [shape["m"]] * shape["b"] if lengths is None else lengths
    if given is not None:
        gone = np.arange(shape["m"]) >= np.asarray(lengths)[:, None]
        aq, *cache, bq, bk, bv = xs
        ak, av, bk, bv = (poisoned_with(np.nan, x, gone) for x in (*cache, bk, bv))
        xs = aq, ak, av, bq, bk, bv
    got = both(WITH_CUDNN, precision="default", lengths=given)(*xs)
    out, lse = loop(xs, ends)
    # cuDNN rounds probabilities, and the results of the keys' two parts, as well.
    assert_as_good_as_reference(got[0], jax.jit(rounded)(xs, given), out, factor=4)
    np.testing.assert_array_equal(np.isfinite(got[1]), np.isfinite(lse))
    seen = np.isfinite(lse)
    assert abs(to_float64(got[1])[seen] - lse[seen]).max() < 2.0**-7 * abs(lse[seen]).max()


MANY = [  # whole sequences, and queries behind a cache; cuDNN has even sizes only
    case(b=2, n=37, m=37, h=5, r=6, d=24, e=24, rk=2, rv=2),
    case(b=2, n=38, m=51, h=5, r=3, d=16, e=16, rk=1, rv=2),
    case(b=2, n=37, m=38, h=5, d=16, e=16, full=True),
    case(b=2, n=33, m=33, h=4, r=3, d=16, e=16),
    case(b=2, n=40, m=40, h=7, d=32, e=32, rk=2, rv=1, full=True),
    case(b=2, n=37, m=50, h=5, r=6, d=24, e=24, rk=2, rv=2),
]


BY_CUDNN = [(shape, True) for shape in in_turn(MANY, DTYPES)]
IN_CHUNKS = [(shape, False) for shape in in_turn(MANY[:2], DTYPES)]


@pytest.mark.parametrize(
    ("shape", "dtype", "has_cudnn"),
    [pytest.param(*x.values, y, id=f"{x.id}-{y}") for x, y in BY_CUDNN + IN_CHUNKS],
)
def test_gradients_of_many_queries(
    rng: Rng,
    shape: dict[str, Any],
    dtype: Any,
    has_cudnn: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By cuDNN or in chunks, with scores so large that q must be that of the forward pass."""
    monkeypatch.setattr(prompt, "LEAST_ROWS", 1)
    monkeypatch.setattr(formed, "LEAST_QUERIES", 1)
    if WITH_CUDNN == "interpret":
        cudnn.instead(monkeypatch)
    if not has_cudnn:
        monkeypatch.setattr(prompt_backward, "CUDNN_BACKWARD", None)
    jax.clear_caches()  # the same calls may have been made before
    aq, *others = factors(rng, dtype, **shape)
    xs = 8 * aq, *others
    decode = partial(pallas_ops.tpa_decode, implementation=WITH_CUDNN, precision="default")
    cotangent = random_cotangents(rng, jax.eval_shape(rounded, xs))
    got, own = (
        jax.jit(lambda do, *xs, fn=fn: jax.vjp(fn, *xs)[1](do))(cotangent, *xs)
        for fn in (decode, lambda *xs: rounded(xs))
    )
    ends = [shape["m"]] * shape["b"]
    wants = loop_gradients(xs, ends, (cotangent, np.zeros(cotangent.shape[:3])))
    # Probabilities and the gradients of keys and values are rounded as well. So are the outputs of
    # both parts of the keys and of all: where one key has nearly all weight, the gradient of its
    # score is a difference of nearly equal numbers, in one of which is all of that error.
    assert_as_good_as_reference(got, own, wants, factor=3, worst=6)


FEW = [
    case(n=1, m=24, h=5, d=16, e=16, full=True),
    case(n=1, m=24, h=5, r=6, d=16, e=16),
    case(n=3, m=24, h=5, d=16, e=16, full=True),
    case(n=64, m=64, h=5, r=6, d=16, e=16, rk=2, rv=2),
]


@pytest.mark.parametrize(("shape", "dtype"), in_turn(FEW, DTYPES))
def test_gradients_of_float32_queries(rng: Rng, shape: dict[str, Any], dtype: Any) -> None:
    """They are those of the rounded query, and small cotangents are not lost in float16."""
    aq, ak, av, bq, bk, bv = factors(rng, b=2, **shape)
    ak, av, bk, bv = (x.astype(dtype) for x in (ak, av, bk, bv))
    xs = 2 * aq, ak, av, bq, bk, bv
    narrow = jax.tree.map(lambda x: x.astype(dtype), xs)
    decode = partial(pallas_ops.tpa_decode, implementation=KERNEL, precision="default")

    def pulled(fn: Any, do: jax.Array, xs: Any) -> Any:
        return jax.jit(lambda do, *xs: jax.vjp(fn, *xs)[1](do))(do, *xs)

    do = random_cotangents(rng, jax.eval_shape(decode, *xs))
    got, small = pulled(decode, do, xs), pulled(decode, 1e-7 * do, xs)
    own = pulled(lambda *xs: rounded(xs), do.astype(dtype), narrow)
    wants = loop_gradients(xs, [shape["m"]] * 2, (do, np.zeros(do.shape[:3])))
    rounded_grads = jax.tree.map(lambda x: x.astype(dtype), got)
    assert_as_good_as_reference(rounded_grads, own, wants, factor=3)
    largest = abs(got[0]).max()
    np.testing.assert_allclose(1e7 * small[0] / largest, got[0] / largest, atol=0.01)
