"""chunk_cumsum_decay over the shards of its axis.

A chunk may begin in an earlier shard. Then the first sum of a shard starts from a carry: the sum of
the chunk's positions before the shard (and of one position more, with a shift along the sequence).
Each shard adds up those of its own positions that are in the next shard's carry, and sends the sum:
to the next shard if no chunk is longer than a shard and `axis_name` is one mesh axis, else to all.
Where the sums are shifted, the carry is the sum of the chunk before the shard: its first result.

All this goes in the direction of the sum: in reverse a shard begins at its end.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards
from pallas_ops.core.dispatch import Run
from pallas_ops.core.shards import Names
from pallas_ops.core.tiles import along, wide
from pallas_ops.ops.chunk_cumsum_decay.config import Params
from pallas_ops.ops.chunk_cumsum_decay.reference import count_at_most


def accumulate(
    sums: Run,
    axis_name: Names,
    x: jax.Array,
    edges: jax.Array | None,
    _: None,
    *,
    params: Params,
) -> tuple[jax.Array, ...]:
    """The shard's part of the sums; `edges` are those of all of the axis."""
    axis, size, n = params.axis, params.chunk_size, x.shape[params.axis]
    whole, start = n * lax.axis_size(axis_name), n * lax.axis_index(axis_name)
    even = edges is None and (n % size == 0 or size % n == 0)
    if edges is None:
        edges = jnp.array([0, 0, whole, whole], jnp.int32)
    local = None if even else edges - start
    own = dataclasses.replace(params, chunk_size=max(1, min(size, n)) if even else size)
    width = _width(params, n, even=even)
    if width == 0:
        return sums(*shards.unify(x, local), None, params=own)
    begin, end = (start + n, start) if params.reverse else (start, start + n)
    part = _sum_of_last(x, _reach(params, edges, end)[0], width, params)
    reach, spans = _reach(params, edges, begin)
    if size <= n and len(axis_name) == 1:  # `ppermute` orders several as the mesh has them
        # A ring, as `jax.vmap` takes no partial permutation. The last shard sends 0 to the first.
        count = lax.axis_size(axis_name)
        pairs = [(i, (i + 1) % count) for i in range(count)]
        pairs = [pair[::-1] for pair in pairs] if params.reverse else pairs
        carry = lax.ppermute(part, axis_name, pairs)
    else:
        carry = _sum_of_parts(axis_name, part, reach, n, reverse=params.reverse)
    if not params.shift_result:
        return sums(*shards.unify(x, local, carry), params=own)
    (out,) = sums(*shards.unify(x, local, jnp.where(spans, carry, 0)), params=own)
    first = jnp.expand_dims(carry.astype(out.dtype), axis)
    return (lax.dynamic_update_slice_in_dim(out, first, n - 1 if params.reverse else 0, axis),)


def _width(p: Params, n: int, *, even: bool) -> int:
    """At most so many of a shard's positions enter the next shard's sums."""
    if not even or p.chunk_size > n:
        return min(p.chunk_size, n)
    if p.shift != "sequence":
        return 0
    return p.chunk_size if p.shift_result else 1


class Chunk(NamedTuple):
    """The chunk at a position beside a bound, with distances in the direction of the sum."""

    live: jax.Array  # whether it belongs to a sequence
    begun: jax.Array  # from its begin to the bound
    sequence_begun: jax.Array  # from its sequence's begin to the bound
    left: jax.Array  # from the bound to its sequence's end


def _reach(p: Params, edges: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many positions before a bound enter the sums after it, and if a chunk spans the bound."""

    def chunk_at(i: jax.Array) -> Chunk:
        sequence = count_at_most(edges[1:-1], i[None])[0]
        low, high = edges[sequence], edges[sequence + 1]
        start = low + (i - low) // p.chunk_size * p.chunk_size
        live = (sequence > 0) & (sequence < edges.size - 2)
        if p.reverse:
            stop = start + jnp.minimum(p.chunk_size, high - start)
            return Chunk(live, stop - bound, high - bound, bound - low)
        return Chunk(live, bound - start, bound - low, high - bound)

    before, after = (bound, bound - 1) if p.reverse else (bound - 1, bound)
    chunk = chunk_at(after)
    spans = chunk.live & (chunk.begun > 0)
    if p.shift_result:
        last = chunk_at(before)
        return jnp.where(last.live & (last.left > 0), last.begun, 0), spans
    if p.shift == "sequence":
        chunk = chunk._replace(begun=jnp.minimum(chunk.begun + 1, chunk.sequence_begun))
    return jnp.where(chunk.live, chunk.begun, 0), spans


def _sum_of_last(x: jax.Array, count: jax.Array, width: int, p: Params) -> jax.Array:
    """The sum of a shard's last positions: so many, at most `width`."""
    first = 0 if p.reverse else x.shape[p.axis] - width
    x = lax.slice_in_dim(x, first, first + width, axis=p.axis).astype(wide(x.dtype))
    i = jnp.arange(width, dtype=jnp.int32)
    inside = (i if p.reverse else width - 1 - i) < count
    inside = along(inside, x, p.axis)
    return jnp.where(inside, x if p.scale is None else x * p.scale, 0).sum(p.axis)


def _sum_of_parts(
    axis_name: Names, part: jax.Array, reach: jax.Array, n: int, *, reverse: bool
) -> jax.Array:
    """The sum of the parts of the shards within reach."""
    ahead = lax.axis_index(axis_name) - jnp.arange(lax.axis_size(axis_name), dtype=jnp.int32)
    ahead = -ahead if reverse else ahead
    parts = shards.gather(part, axis_name)
    inside = (ahead > 0) & ((ahead - 1) * n < reach)
    return jnp.where(along(inside, parts), parts, 0).sum(axis=0)
