"""Which keys tpa_decode attends to: lengths, windows, and each batch element its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.support import (
    EPS32,
    assert_as_good_as_reference,
    assert_close,
    case,
    in_turn,
    kernel_implementation,
    on_host,
    random_cotangents,
    value_and_vjp,
)
from tests.tpa_decode import both, factors, loop, loop_gradients, poisoned_with, pulled

KERNEL = kernel_implementation()
Rng = np.random.Generator
QUERIES = [
    pytest.param(False, jnp.float32, id="float32"),
    pytest.param(True, jnp.bfloat16, id="full-bfloat16"),
    pytest.param(False, jnp.bfloat16, id="bfloat16"),
]
WINDOWS = [case(n=3, m=70, h=17, window=33), case(n=1, m=200, window=70), case(n=3, m=70, window=1)]


@pytest.mark.parametrize("implementation", [KERNEL, "xla"])
@pytest.mark.parametrize(("n", "ranks"), [(4, 3), (1, None)])
def test_keys_beyond_the_length_do_not_exist(
    rng: Rng, n: int, ranks: int | None, implementation: Any
) -> None:
    aq, ak, av, bq, bk, bv = factors(rng, b=5, n=n, m=40, rk=ranks, rv=ranks)
    lengths = jnp.asarray([0, 1, 17, 40, 99], jnp.int32)
    gone = np.arange(40)[None, :] >= np.asarray(lengths)[:, None]
    poisoned = [
        poisoned_with(bad, x, gone)
        for x, bad in zip((ak, av, bk, bv), (jnp.nan, jnp.inf) * 2, strict=True)
    ]
    xs = (aq, *poisoned[:2], bq, *poisoned[2:])
    got = both(implementation)(*xs, lengths=lengths)
    assert_close(got, loop((aq, ak, av, bq, bk, bv), lengths), terms=40)
    assert not np.asarray(got[0][0]).any()
    assert (np.asarray(got[1][0]) == -np.inf).all()


@pytest.mark.parametrize("implementation", [KERNEL, "xla"])
@pytest.mark.parametrize(("n", "rk"), [(1, 1), (3, 2), (70, 2)])  # passes, and in chunks
def test_nan_in_the_cotangents_of_queries_that_see_no_key(
    rng: Rng, n: int, rk: int, implementation: Any
) -> None:
    """It goes nowhere: where the loss masks such a query, its derivative may be 0 * inf."""
    xs = factors(rng, n=n, rk=rk, rv=rk)
    lengths = jnp.asarray([40, 0], jnp.int32)
    cotangents = random_cotangents(rng, jax.eval_shape(both(), *xs))
    (_, lse), want = pulled(implementation)(xs, lengths, cotangents)
    blind = np.isinf(lse)
    assert blind.any()
    bad = tuple(poisoned_with(jnp.nan, x, blind) for x in cotangents)
    assert_close(pulled(implementation)(xs, lengths, bad)[1], want)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_nan_in_cotangents_through_pages_and_to_a_scale(rng: Rng, implementation: Any) -> None:
    (aq, _, _, bq, _, _), (_, *heads, _, bk, bv) = factors(rng, n=3), factors(rng, b=5, m=8)

    def run(*xs: jax.Array, bad: float) -> Any:
        options: Any = dict(page_table=jnp.asarray([[0, 3], [4, 1]]), lengths=jnp.asarray([16, 2]))
        fn = partial(pallas_ops.tpa_decode, **options, implementation=implementation)
        out, pull = jax.vjp(lambda *xs: fn(*xs[:-1], scale_v=xs[-1]), *xs)
        return pull(jnp.ones_like(out).at[1, 0].set(bad))

    xs = aq, *heads, bq, bk, bv, jnp.float32(0.5)
    assert_close(run(*xs, bad=np.nan), run(*xs, bad=0))


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_one_length_for_all_and_lengths_out_of_range(rng: Rng, implementation: Any) -> None:
    """A scalar is every sequence's; more than M means M, less than 0 means 0."""
    xs = factors(rng, b=3)
    run = both(implementation)
    assert_close(run(*xs, lengths=7), run(*xs, lengths=jnp.full(3, 7)), terms=40)
    got = run(*xs, lengths=jnp.asarray([-5, 7, 10**6]))
    assert_close(got, run(*xs, lengths=jnp.asarray([0, 7, 40])), terms=40)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_lengths_of_every_dtype(rng: Rng, dtype: str) -> None:
    """Up to its extremes: the longest means M, the lowest 0."""
    xs = factors(rng, b=3, n=2)
    with jax.enable_x64(dtype.endswith("64")):
        info = jnp.iinfo(dtype)
        lengths = jnp.asarray([info.min, 7, info.max], dtype)
        got = both(KERNEL)(*xs, lengths=lengths)
    assert_close(got, both("xla")(*xs, lengths=jnp.asarray([0, 7, 40])), terms=40)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_nan_in_the_cache_reaches_its_own_batch_element_only(rng: Rng, implementation: Any) -> None:
    aq, ak, av, bq, bk, bv = factors(rng)
    out = both(implementation)(aq, ak, av, bq, bk.at[1, 3, 2].set(jnp.nan), bv)[0]
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("implementation", [KERNEL, "xla"])
@pytest.mark.parametrize("precision", ["highest", "default"])  # ranks first, or q first
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_reaches_no_other(
    rng: Rng, precision: Any, bad: float, implementation: Any
) -> None:
    aq, ak, av, bq, bk, bv = factors(rng, jnp.bfloat16, n=5, r=6, rk=2, rv=2)
    run = both(implementation, precision=precision)
    want = [np.asarray(x) for x in run(aq, ak, av, bq, bk, bv)]
    got = run(aq.at[:, 0, 1, 2].set(bad), ak, av, bq.at[:, 2, 1, 3].set(bad), bk, bv)
    is_bad = np.zeros(want[1].shape, bool)
    is_bad[:, 2] = is_bad[:, 0, 1] = True
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[~is_bad], y[~is_bad])
        assert np.isnan(np.asarray(x, np.float32)[is_bad]).all()


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_gradient_of_keys_that_do_not_exist_is_zero(rng: Rng, implementation: Any) -> None:
    xs = factors(rng, b=3, m=40)
    lengths = jnp.asarray([0, 7, 40], jnp.int32)
    gone = np.arange(40)[None, :] >= np.asarray(lengths)[:, None]
    poisoned = tuple(x if i in (0, 3) else poisoned_with(np.nan, x, gone) for i, x in enumerate(xs))
    f = both(implementation, lengths=lengths)
    out, lse = f(*poisoned)
    cotangents = random_cotangents(rng, (out, lse))
    grads = value_and_vjp(f, poisoned, cotangents)[1]
    for grad in grads:
        assert np.isfinite(grad).all()
    for i in (1, 2, 4, 5):
        assert not np.asarray(grads[i])[gone].any()
    assert not np.asarray(grads[0][0]).any()


@pytest.mark.parametrize(("shape", "full", "dtype"), in_turn(WINDOWS, QUERIES))
def test_a_window_is_the_last_keys(rng: Rng, shape: dict[str, Any], full: bool, dtype: Any) -> None:
    """Keys that no query sees may hold anything, and have no gradient."""
    sizes = dict(shape)
    window, n, m = sizes.pop("window"), sizes["n"], sizes["m"]
    xs = factors(rng, dtype, b=3, full=full, **sizes)
    lengths = jnp.asarray([m, n, m // 2], jnp.int32)
    key, last = np.arange(m), np.asarray(lengths)[:, None]
    gone = (key >= last) | (key < last - (n - 1) - window)
    poisoned = tuple(
        x if x is None or x.shape[1] != m else poisoned_with(np.nan, x, gone) for x in xs
    )
    cotangents = random_cotangents(rng, jax.eval_shape(both(), *xs))
    own, got = (pulled(i, window)(poisoned, lengths, cotangents) for i in ("xla", KERNEL))
    assert_as_good_as_reference(got[0], own[0], loop(xs, lengths, window))
    truth = loop_gradients(xs, lengths, cotangents, window)
    assert_as_good_as_reference(got[1], own[1], truth, floor=16 * EPS32)


def test_a_window_of_all_keys_is_none(rng: Rng) -> None:
    xs = factors(rng)
    for window in (40, 10**30):
        program = jax.make_jaxpr(partial(pallas_ops.tpa_decode, window=window))(*xs)
        assert str(program) == str(jax.make_jaxpr(pallas_ops.tpa_decode)(*xs))


@pytest.mark.parametrize(
    ("window", "implementation"), [(None, "xla"), (None, KERNEL), (520, KERNEL)]
)
def test_bits_know_nothing_of_the_batch(rng: Rng, window: int | None, implementation: Any) -> None:
    """Nor of the others' lengths. The kernel's output knows nothing of the cache's size either.

    For a GPU XLA compiles a batch of one in another way.
    """
    exact = implementation == KERNEL or jax.default_backend() == "cpu"
    xs = factors(rng, jnp.bfloat16, b=5, m=1100, h=5, r=3, d=16, rk=2)
    lengths = jnp.asarray([1100, 3, 600, 0, 1030], jnp.int32)
    run = both(implementation, batch_invariant=True, window=window)
    xs, (out, lse) = on_host((xs, run(*xs, lengths=lengths)))
    assert_close((out, lse), loop(xs, lengths, window), terms=1100)
    for rows in (slice(0, 1), slice(2, 5))[: 1 if implementation == KERNEL else 2]:
        got = run(*(x[rows] for x in xs), lengths=lengths[rows])
        if exact:
            jax.tree.map(np.testing.assert_array_equal, got, (out[rows], lse[rows]))
        else:
            assert_close(got, (out[rows], lse[rows]), terms=1100)
    if implementation == KERNEL:
        rows = slice(2, 5)
        longer = (
            x if x.shape[1] == 1 else np.pad(x, ((0, 0), (0, 999), *((0, 0),) * (x.ndim - 2)))
            for x in (y[rows] for y in xs)
        )
        np.testing.assert_array_equal(run(*longer, lengths=lengths[rows])[0], out[rows])
