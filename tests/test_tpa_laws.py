"""tpa_decode: laws, and what is left of it at sizes 0."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.core import launch
from pallas_ops.ops.tpa_decode.merge import merge
from tests.h200 import compile_for_h200
from tests.support import assert_close, kernel_implementation, random_array
from tests.tpa_decode import both, factors

KERNEL = kernel_implementation()
Rng = np.random.Generator


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_order_of_the_cache_does_not_matter(rng: Rng, implementation: Any) -> None:
    aq, ak, av, bq, bk, bv = factors(rng)
    order = rng.permutation(40)
    got = both(implementation)(aq, ak[:, order], av[:, order], bq, bk[:, order], bv[:, order])
    assert_close(got, both(implementation)(aq, ak, av, bq, bk, bv), terms=40)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_parts_of_the_cache_merge_by_their_lse(rng: Rng, implementation: Any) -> None:
    xs = factors(rng)
    parts = [
        tuple(x[:, i] if x.shape[1] == 40 else x for x in xs) for i in (slice(0, 13), slice(13, 40))
    ]
    (o1, l1), (o2, l2) = (both(implementation)(*part) for part in parts)
    weight = jax.nn.sigmoid(l1 - l2)[..., None]
    want = both(implementation)(*xs)
    assert_close(weight * o1 + (1 - weight) * o2, want[0], terms=40)
    assert_close(jnp.logaddexp(l1, l2), want[1], terms=40)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_several_queries_are_as_many_steps(rng: Rng, implementation: Any) -> None:
    aq, ak, av, bq, bk, bv = factors(rng, n=3)
    got = both(implementation)(aq, ak, av, bq, bk, bv)[0]
    for i in range(3):
        m = 38 + i
        one = slice(i, i + 1)
        cache = (x[:, :m] for x in (ak, av, bk, bv))
        ak_, av_, bk_, bv_ = cache
        want = both(implementation)(aq[:, one], ak_, av_, bq[:, one], bk_, bv_)[0]
        assert_close(got[:, one], want, terms=40)


@pytest.mark.parametrize("axis", ["b", "n", "m", "h", "r", "d", "e"])
def test_an_axis_of_size_zero(rng: Rng, axis: str) -> None:
    shape: dict[str, Any] = dict(b=2, n=1, m=4, h=3, r=2, d=8, e=8) | {axis: 0}
    xs = factors(rng, **shape)
    out, lse = pallas_ops.tpa_decode_with_lse(*xs)
    assert out.shape == (shape["b"], shape["n"], shape["h"], shape["e"])
    assert np.isfinite(out).all()
    if axis == "m":
        assert (np.asarray(lse) == -np.inf).all()
    if axis in "rd":  # every score is 0
        assert_close(lse, np.full(lse.shape, np.log(4.0)))


def test_more_splits_are_merged_than_a_program_has_threads(rng: Rng) -> None:
    out, lse = random_array(rng, (1, 3000, 2, 3)), random_array(rng, (1, 3000, 2))
    with launch.interpreted(KERNEL == "interpret"):
        merged, total = merge(out, lse, "float32", 4096)
    weight = np.exp(np.asarray(lse, np.float64))
    want = (np.asarray(out, np.float64) * weight[..., None]).sum(axis=1) / weight.sum(axis=1)[
        ..., None
    ]
    assert_close((merged, total), (want, np.log(weight.sum(axis=1))), terms=3000)
    program = compile_for_h200(partial(merge, out_dtype="float32", block=4096), out, lse)
    assert ".reqntid 512" in program.ptx[0]


def test_splits_without_keys_change_no_bit_of_a_merge(rng: Rng) -> None:
    """However many there are, and in however many launches they are merged."""
    out, lse = random_array(rng, (1, 60, 2, 3)), random_array(rng, (1, 60, 2))
    lse = lse.at[0, 7].set(-np.inf)
    with launch.interpreted(KERNEL == "interpret"):
        want = merge(out, lse, "float32", 64)
        for more in (4, 5, 64 * 64 - 59):
            zeros = jnp.pad(out, [(0, 0), (0, more), (0, 0), (0, 0)])
            blind = jnp.pad(lse, [(0, 0), (0, more), (0, 0)], constant_values=-np.inf)
            got = merge(zeros, blind, "float32", 64)
            assert all((x == y).all() for x, y in zip(got, want, strict=True)), more
