"""chunk_cumsum_decay over the shards of its axis.

What a shard's first sum starts from, its carry, is the sum over a range of positions that ends
where the shard begins: what precedes it of its chunk and, with a shift along the sequence, one
position more. So a shard adds up those of its own positions that the next one's range has, and
passes the sum on: to the next shard, if no chunk is longer than a shard, else to all. Where a shift
is of the sums, the range is the chunk before the shard, whose sum also is its first result.

In reverse, the same from the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards, vary
from pallas_ops.core.dtypes import wide
from pallas_ops.core.shards import Names
from pallas_ops.ops.chunk_cumsum_decay.reference import Shift, among


def of_shard(
    sums: Callable[..., tuple[jax.Array]],
    axis_name: Names,
    x: jax.Array,
    edges: jax.Array | None,
    _: None,
    *,
    axis: int,
    chunk_size: int,
    shift: Shift | None,
    shift_result: bool,
    **static: Any,
) -> tuple[jax.Array]:
    """The shard's part of the sums; `edges` are those of all of the axis."""
    n, reverse = x.shape[axis], static["reverse"]
    whole = n * lax.axis_size(axis_name)
    even = edges is None and (n % chunk_size == 0 or chunk_size % n == 0 or chunk_size >= whole)
    start = n * lax.axis_index(axis_name)
    if edges is None:
        edges = jnp.array([0, 0, whole, whole], jnp.int32)
    chunks = _Chunks(edges, chunk_size, shift, shift_result, reverse)
    width = _width(n, chunk_size, shift, shift_result, even=even)
    static |= dict(axis=axis, shift=shift, shift_result=shift_result)
    static |= dict(chunk_size=max(1, min(chunk_size, n)) if even else chunk_size)
    local = None if even else edges - start
    if width == 0:
        return sums(*vary.unify(x, local), None, **static)
    begin, end = (start + n, start) if reverse else (start, start + n)
    part = _sum_to(chunks.reach(end) - start, x, width, axis, reverse, static["scale"])
    # `ppermute` takes several mesh axes in the order of the mesh alone.
    near = chunk_size <= n and len(axis_name) == 1
    carry = _exchanged(axis_name, part, chunks.reach(begin), n, reverse, near=near)
    if not shift_result:
        return sums(*vary.unify(x, local, carry), **static)
    spanning = jnp.where(chunks.spans(begin), carry, 0)
    (out,) = sums(*vary.unify(x, local, spanning), **static)
    first = jnp.expand_dims(carry.astype(out.dtype), axis)
    return (lax.dynamic_update_slice_in_dim(out, first, n - 1 if reverse else 0, axis),)


class _Chunks:
    """The chunks of the whole axis, at the bounds between shards."""

    def __init__(
        self,
        edges: jax.Array,
        size: int,
        shift: Shift | None,
        shift_result: bool,
        reverse: bool,
    ) -> None:
        self.edges, self.size, self.reverse = edges, size, reverse
        self.shift, self.shift_result = shift, shift_result

    def _at(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Start and stop of the chunk around a position, its sequence's, and if there is one."""
        sequence = among(self.edges[1:-1], i[None])[0]
        low, high = self.edges[sequence], self.edges[sequence + 1]
        start = low + (i - low) // self.size * self.size
        stop = start + jnp.minimum(self.size, high - start)
        return start, stop, low, high, (sequence > 0) & (sequence < self.edges.size - 2)

    def reach(self, bound: jax.Array) -> jax.Array:
        """From where on, up to a bound, positions enter the sums behind it."""
        start, stop, low, high, live = self._at(bound - int(self.reverse != self.shift_result))
        if self.reverse:
            far, same = stop, low < bound
            further = (self.shift == "sequence") & (stop < high)
        else:
            far, same = start, bound < high
            further = (self.shift == "sequence") & (low < start)
        if self.shift_result:
            return jnp.where(live & same, far, bound)
        step = 1 if self.reverse else -1
        return jnp.where(live, far + jnp.where(further, step, 0), bound)

    def spans(self, bound: jax.Array) -> jax.Array:
        """Whether the chunk behind a bound begins before it, as the sum goes."""
        start, stop, _, _, live = self._at(bound - 1 if self.reverse else bound)
        return live & (bound < stop if self.reverse else start < bound)


def _width(n: int, chunk_size: int, shift: Shift | None, shift_result: bool, *, even: bool) -> int:
    """How many of a shard's positions at most enter the next shard's sums."""
    if not even or chunk_size > n:
        return min(chunk_size, n)
    if shift != "sequence":
        return 0
    return chunk_size if shift_result else 1


def _sum_to(
    reach: jax.Array, x: jax.Array, width: int, axis: int, reverse: bool, scale: float | None
) -> jax.Array:
    """The sum of x from `reach` on, at most of `width` positions at the end."""
    n = x.shape[axis]
    first = 0 if reverse else n - width
    x = lax.slice_in_dim(x, first, first + width, axis=axis).astype(wide(x.dtype))
    i = first + jnp.arange(width, dtype=jnp.int32)
    inside = i < reach if reverse else i >= reach
    inside = lax.expand_dims(inside, [j for j in range(x.ndim) if j != axis])
    return jnp.where(inside, x if scale is None else x * scale, 0).sum(axis)


def _exchanged(
    axis_name: Names, part: jax.Array, reach: jax.Array, n: int, reverse: bool, *, near: bool
) -> jax.Array:
    """The sum of the parts of the shards within reach: of the previous one, if they are `near`."""
    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if near:
        pairs = [(i + 1, i) if reverse else (i, i + 1) for i in range(count - 1)]
        previous: jax.Array = lax.ppermute(part, axis_name, pairs)
        return previous
    q = jnp.arange(count, dtype=jnp.int32)
    inside = (q > index) & (q * n < reach) if reverse else (q < index) & ((q + 1) * n > reach)
    parts = shards.gather(part, axis_name)
    inside = lax.expand_dims(inside, range(1, parts.ndim))
    return jnp.where(inside, parts, 0).sum(axis=0)
