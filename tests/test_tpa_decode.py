"""tpa_decode: reference against a loop, kernels against the reference, laws."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import TpaDecodeConfig
from tests.support import (
    EPS32,
    assert_as_good_as_reference,
    assert_close,
    case,
    in_float64,
    in_turn,
    kernel_implementation,
    random_cotangents,
    to_float64,
    value_and_vjp,
)
from tests.tpa_decode import both, factors, loop, loop_gradients, pulled

KERNEL = kernel_implementation()
Rng = np.random.Generator
SHAPES = [
    case(b=2, n=1, m=96, h=4, r=3, d=16, e=8),
    case(b=2, n=1, m=67, h=17, r=31, d=127, e=65),
    case(b=1, n=1, m=2, h=1, r=1, d=1, e=1),
    case(b=2, n=3, m=70, h=5, r=6, d=24, e=16),
    case(b=1, n=2, m=45, h=3, r=4, d=16, e=16, rk=2, rv=3),
    case(b=2, n=1, m=67, h=17, d=24, e=16, rk=2, rv=2, full=True),
    # Of many heads: two tiles, groups of an even number. (Pairs of an odd one are below.)
    case(b=1, n=1, m=40, h=75, r=6, d=16, e=16, rk=2, rv=4),
    case(b=1, n=3, m=45, h=5, d=16, e=33, full=True),
    case(b=1, n=2, m=70, h=34, r=6, d=24, e=8, rk=3, rv=1),
]
MIXED = [SHAPES[i] for i in (0, 3, 5, 8)]  # one of each form
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def some_lengths(rng: Rng, shape: dict[str, Any], dtype: Any) -> tuple[Any, jax.Array]:
    """What to give the kernel, and what it means: every query sees a key; none for one dtype."""
    b, n, m = shape["b"], shape["n"], shape["m"]
    some = jnp.asarray(rng.integers(n, m + 1, b), jnp.int32)
    return (None, jnp.full(b, m, jnp.int32)) if dtype == jnp.float32 else (some, some)


# Reference


@pytest.mark.parametrize("shape", SHAPES)
def test_references_are_the_loop(rng: Rng, shape: dict[str, Any]) -> None:
    xs = factors(rng, **shape)
    lengths = jnp.asarray(rng.integers(0, shape["m"] + 1, shape["b"]), jnp.int32)
    out, lse = loop(xs, lengths)
    whole, _ = loop(xs, [shape["m"]] * shape["b"])
    reference = pallas_ops.reference

    @jax.jit
    def all_three(*xs: Any) -> Any:
        got = reference.tpa_decode_with_lse(*xs, lengths=lengths)
        return got, reference.tpa_decode_naive(*xs, lengths=lengths), reference.tpa_decode(*xs)

    assert_close(all_three(*xs), ((out, lse), out, whole), terms=shape["m"])


def test_scales_multiply_what_they_name(rng: Rng) -> None:
    aq, ak, av, bq, bk, bv = factors(rng)
    given = dict(scale=0.3, scale_q=0.5, scale_k=2.0, scale_v=0.7)
    want = loop((aq * 0.5 * 4, ak * 2 * 0.3 * 4, av * 0.7, bq, bk, bv), [40, 40])[0]
    for implementation in ("xla", KERNEL):
        got = both(implementation, **given)(aq, ak, av, bq, bk, bv)[0]
        assert_close(got, want, terms=40)


def test_scales_may_be_arrays(rng: Rng) -> None:
    """Scalars, which may be traced; as exact as numbers."""
    xs = factors(rng, jnp.bfloat16)
    names, values = ("scale", "scale_q", "scale_k", "scale_v"), (0.3, 0.5, 2.0, 0.7)
    numbers = both("xla", **dict(zip(names, values, strict=True)))
    truth = in_float64(numbers, *xs)
    for implementation in ("xla", KERNEL):

        def scaled(scales: tuple[jax.Array, ...], *xs: jax.Array) -> Any:
            given: Any = dict(zip(names, scales, strict=True))
            return pallas_ops.tpa_decode_with_lse(*xs, implementation=implementation, **given)  # noqa: B023

        got = jax.jit(scaled)(tuple(map(jnp.float32, values)), *xs)
        assert_as_good_as_reference(got, numbers(*xs), truth)
        assert got[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_scales_of_other_dtypes_lose_nothing(rng: Rng, implementation: Any) -> None:
    """Their product is not rounded to 16 bits."""
    xs = factors(rng)
    scales = dict(scale=jnp.bfloat16(0.3), scale_q=jnp.float16(0.7), scale_k=jnp.float32(1.1))
    numbers = {name: float(x) for name, x in scales.items()}
    assert_close(both(implementation, **scales)(*xs), both("xla", **numbers)(*xs), terms=40)


# Forward and gradient


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES))
def test_kernels_are_as_good_as_the_reference(rng: Rng, shape: dict[str, Any], dtype: Any) -> None:
    xs = factors(rng, dtype, **shape)
    cotangents = random_cotangents(rng, jax.eval_shape(both(), *xs))
    given, lengths = some_lengths(rng, shape, dtype)
    got, own = pulled(KERNEL)(xs, given, cotangents), pulled("xla")(xs, lengths, cotangents)
    assert_as_good_as_reference(got[0], own[0], loop(xs, lengths))
    # The hardware's exp2 is off by 2 ulps, and the terms of a softmax's gradient cancel.
    floor = (16 if dtype == jnp.float32 else 4) * EPS32
    truth = loop_gradients(xs, lengths, cotangents)
    assert_as_good_as_reference(got[1], own[1], truth, floor=floor)


GATHERED = [case(h=47, r=6, e=16, rk=2, rv=2), case(n=2, h=5, rk=2, rv=2, full=True)]
OTHERS = [case(h=38, rk=3, rv=1), case(h=64, rk=3, rv=2), case(h=66, r=6, e=32, rk=3, rv=2)]


@pytest.mark.parametrize("shape", [*GATHERED, *OTHERS, case(n=3, h=94, rk=1, rv=4, full=True)])
def test_heads_that_are_gathered(rng: Rng, shape: dict[str, Any]) -> None:
    shape = dict(b=1, n=1, m=45) | shape
    test_kernels_are_as_good_as_the_reference(rng, shape, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_in_the_tens_keep_their_precision(rng: Rng, dtype: Any) -> None:
    xs = factors(rng, dtype, b=16, m=128, h=8, r=16, d=64, e=32)
    xs = (xs[0] * 40, *xs[1:])
    assert_as_good_as_reference(both(KERNEL)(*xs), both("xla")(*xs), loop(xs, [128] * 16))


@pytest.mark.parametrize(("h", "unseen", "common"), [(3, 0, 3000), (34, 4000, 0)])
def test_terms_of_a_score_may_cancel(rng: Rng, h: int, unseen: int, common: int) -> None:
    """Keys differ much more where no query looks (q is formed), or have 3,000 in common."""
    aq, ak, av, bq, bk, bv = factors(rng, jnp.bfloat16, b=1, m=200, h=h, r=6, d=64, e=16)
    seen = np.linalg.qr(to_float64(bq[0, 0]).T).Q
    some = rng.standard_normal((1, 200, 64))
    offset = unseen * (some - some @ seen @ seen.T) + common * rng.standard_normal(64)
    bk = (to_float64(bk) + offset).astype(jnp.bfloat16)
    xs = (aq, jnp.ones_like(ak), av, bq, jnp.asarray(bk), bv)
    got, own = (pallas_ops.tpa_decode(*xs, implementation=x) for x in (KERNEL, "xla"))
    assert_as_good_as_reference(got, own, loop(xs, [200])[0])


@pytest.mark.parametrize(("h", "r"), [(3, 6), (34, 16)])
def test_float16_factors_of_many_sizes(rng: Rng, h: int, r: int) -> None:
    """Sums beyond the largest float16 number, weights from its least on, terms that cancel."""
    aq, ak, av, bq, bk, bv = factors(rng, jnp.float16, m=200, h=h, r=r, d=32, e=32, rk=2, rv=2)
    bv = bv.at[:, 1::2].set(-bv[:, ::2] * jnp.float16(0.99))
    av = av.at[:, 1::2].set(av[:, ::2])
    av *= 2.0 ** jnp.linspace(-14, 0, 200, dtype=jnp.float16)[None, :, None, None]
    xs = (aq / 2**8, ak / 2**14, av, bq * 2**10, bk * 2**8, bv * 2**10)
    weights = random_cotangents(rng, jax.eval_shape(both("xla"), *xs))
    one_split = TpaDecodeConfig(block_h=h, block_m=32, num_splits=1)
    got = value_and_vjp(both(KERNEL, config=one_split), xs, weights)
    own = value_and_vjp(both("xla"), xs, weights)
    assert_as_good_as_reference(got[0], own[0], loop(xs, [200] * 2))
    assert_as_good_as_reference(got[1], own[1], loop_gradients(xs, [200] * 2, weights))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), in_turn(MIXED, DTYPES[1:]))
def test_float32_queries_beside_a_cache_of_16_bits(
    rng: Rng, shape: dict[str, Any], dtype: Any
) -> None:
    """The result has the queries' dtype, and all of its digits; gradients have their factors'."""
    aq, *cache, bq, bk, bv = factors(rng, **shape)
    ak, av, bk, bv = (x.astype(dtype) for x in (*cache, bk, bv))
    xs: Any = (aq, ak, av, bq, bk, bv)
    lengths = jnp.asarray(rng.integers(shape["n"], shape["m"] + 1, shape["b"]), jnp.int32)
    weights = random_cotangents(rng, jax.eval_shape(both("xla"), *xs))
    got, own = (value_and_vjp(both(i, lengths=lengths), xs, weights) for i in (KERNEL, "xla"))
    assert [x.dtype for x in jax.tree.leaves(got[1])] == [x.dtype for x in jax.tree.leaves(xs)]
    # Up to six products of the tensor cores, which truncate, are added for one of the reference.
    assert_as_good_as_reference(got[0], own[0], loop(xs, lengths), floor=8 * EPS32)
    # As of float32 factors, above.
    truth = loop_gradients(xs, lengths, weights)
    assert_as_good_as_reference(got[1], own[1], truth, floor=16 * EPS32)


CONFIGS = [
    case(block_h=5, num_splits=1),
    case(block_h=1, num_splits=1),
    case(block_h=2, num_splits=3, block_m=16),
    case(block_h=5, num_splits=7, block_m=32, num_stages=1),
    case(block_h=5, block_n=2, num_splits=1, num_warps=2),
    case(block_h=4, block_n=4, num_splits=2, block_m=16),
    case(block_h=8, num_splits=64, block_m=16),
]


@pytest.mark.parametrize(("config", "dtype"), in_turn(CONFIGS, DTYPES))
def test_every_config_gives_the_same(rng: Rng, config: dict[str, int], dtype: Any) -> None:
    xs = factors(rng, dtype, n=3, m=70, h=5)
    lengths = jnp.asarray([70, 33], jnp.int32)
    got = both(KERNEL, lengths=lengths, config=TpaDecodeConfig(**config))(*xs)
    assert_close(got, loop(xs, lengths), terms=70)


@pytest.mark.slow
@pytest.mark.parametrize("config", [case(block_h=16), case(block_h=4, block_m=8), case(block_h=5)])
def test_every_config_of_several_ranks_gives_the_same(rng: Rng, config: dict[str, int]) -> None:
    xs = factors(rng, jnp.bfloat16, n=2, m=67, h=21, rk=4, rv=2)
    got = both(KERNEL, config=TpaDecodeConfig(**config))(*xs)
    assert_close(got, loop(xs, [67, 67]), terms=67)


@pytest.mark.parametrize("h", [34, 5, 47])
def test_heads_do_not_meet(rng: Rng, h: int) -> None:
    """Numbers of one head that are not finite are seen in that head alone; of three blocks."""
    aq, ak, av, bq, bk, bv = factors(rng, jnp.bfloat16, h=h, rk=2, rv=2)
    bad, worse = 3, h - 1
    ak, av = ak.at[:, 7, 1, bad].set(jnp.nan), av.at[0, 39, 0, worse].set(jnp.inf)
    config = TpaDecodeConfig(block_h=h, block_m=16)
    out, _ = both(KERNEL, config=config)(aq, ak, av, bq, bk, bv)
    finite = np.isfinite(np.float32(out)).all(axis=(1, 3))
    want = np.ones((2, h), bool)
    want[:, bad] = want[0, worse] = False
    np.testing.assert_array_equal(finite, want)


@pytest.mark.parametrize("h", [78, 75])
def test_heads_of_two_tiles_do_not_meet(rng: Rng, h: int) -> None:
    test_heads_do_not_meet(rng, h)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_one_key_takes_all_attention(rng: Rng, implementation: Any) -> None:
    xs = factors(rng, m=1)
    f = jax.jit(partial(pallas_ops.tpa_decode, implementation=implementation))
    cotangents = random_cotangents(rng, jax.eval_shape(f, *xs))
    out, (daq, dak, _, dbq, dbk, _) = value_and_vjp(f, xs, cotangents)
    assert_close(out, (xs[2] * 1.0)[..., None] * xs[5][:, :, None])
    for grad in (daq, dak, dbq, dbk):
        assert_close(grad, np.zeros(grad.shape), scale=1.0)


def test_interpreted_gradients_of_three_ranks(rng: Rng) -> None:
    """A tile has four ranks; where the fourth would lie is the next key's first."""
    xs = factors(rng, b=1, n=1, m=9, h=4, r=2, d=16, e=16, rk=3, rv=3)
    cotangents = random_cotangents(rng, jax.eval_shape(both(), *xs))
    want, got = (value_and_vjp(both(i), xs, cotangents)[1] for i in ("xla", "interpret"))
    assert_close(got, want)
