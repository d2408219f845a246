"""What `jax.export` runs along an axis whose size is symbolic is as exact as elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.support import assert_close, random_array

SMALL = 5e-8  # next to 1, float32 loses it


def exported(fn: Callable[..., Any], *others: jax.Array) -> Callable[..., Any]:
    """`fn` of a float32 vector of any size and of others, with its gradient."""
    (n,) = jax.export.symbolic_shape("n")
    structs = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in others)
    of_any = jax.export.export(jax.jit(fn))(jax.ShapeDtypeStruct((n,), "float32"), *structs)
    call: Callable[..., Any] = jax.export.deserialize(of_any.serialize(vjp_order=1)).call
    return call


def packed(x: jax.Array, edges: jax.Array, **options: Any) -> jax.Array:
    return pallas_ops.chunk_cumsum_decay(x, axis=0, cu_seqlens=edges, **options)


@pytest.mark.parametrize("size", [1, 512, 513, 100_000])
def test_small_numbers_count(size: int) -> None:
    small, sums = np.full(size, SMALL, np.float32), partial(packed, chunk_size=2**20)
    small[0] = 1
    edges = jnp.array([0, size], jnp.int32)
    scans = exported(sums, edges), exported(pallas_ops.logcumsumexp)
    want = np.float32(1 + SMALL * (size - 1))
    out, pull = jax.vjp(lambda x: scans[0](x, edges), small)
    assert_close(out[-1], want, terms=size)
    assert_close(pull(small[::-1])[0][0], want, terms=size)
    # Nothing adds to the first number's sum, so its gradient is the sum of the cotangents.
    x = np.where(np.arange(size) == 0, 0, -40).astype(np.float32)
    assert_close(jax.vjp(scans[1], x)[1](small[::-1])[0][0], want, terms=size)


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_restart(rng: np.random.Generator, reverse: bool) -> None:
    sums: Any = partial(packed, chunk_size=700, reverse=reverse, shift="chunk")
    x, edges = random_array(rng, (3000,)), jnp.array([5, 600, 600, 2900], jnp.int32)
    assert_close(exported(sums, edges)(x, edges), sums(x, edges), terms=700)
