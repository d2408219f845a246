"""What chunk_cumsum_decay means, in jax.numpy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.partition import gathered, is_partly_manual, reshard_like
from pallas_ops.core.tiles import OF_SYMBOLIC, along, as_int32, wide
from pallas_ops.ops.chunk_cumsum_decay.config import Params


def accumulate(
    x: jax.Array, edges: jax.Array | None, carry: jax.Array | None, *, params: Params
) -> tuple[jax.Array]:
    """The sums, in the dtype of the result. The first one in scan direction starts from `carry`.

    `edges` are as `edges_of` gives them, and may be of a longer axis, of which this is a part that
    begins at 0.
    """
    y = gathered(x, params.axis).astype(wide(x.dtype))
    y = y if params.scale is None else y * params.scale
    y = _regular(y, carry, params) if edges is None else _packed(y, edges, carry, params)
    return (reshard_like(y.astype(params.dtypes[1]), x),)


def _regular(y: jax.Array, carry: jax.Array | None, p: Params) -> jax.Array:
    """The sums without `edges`: chunks are counted from 0, so each is a row of a reshaped array."""
    axis, reverse, size = p.axis, p.reverse, p.chunk_size
    outer, n, inner = y.shape[:axis], y.shape[axis], y.shape[axis + 1 :]
    num_chunks = -(-n // size)
    if p.shift == "sequence" and not p.shift_result:
        y = previous(y, axis, reverse)
    widths = [(0, num_chunks * size - n if i == axis else 0) for i in range(y.ndim)]
    y = jnp.pad(y, widths).reshape(*outer, num_chunks, size, *inner)
    if p.shift == "chunk":
        y = previous(y, axis + 1, reverse)
    if carry is not None:
        y = y.at[(slice(None),) * axis + divmod(n - 1 if reverse else 0, size)].add(carry)
    y = lax.cumsum(y, axis + 1, reverse=reverse).reshape(*outer, num_chunks * size, *inner)
    y = lax.slice_in_dim(y, 0, n, axis=axis)
    return previous(y, axis, reverse) if p.shift_result else y


def previous(y: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """The number just before each position in scan direction, and 0 for the first."""
    n = y.shape[axis]
    if not n:
        return y
    zero = jnp.zeros_like(lax.slice_in_dim(y, 0, 1, axis=axis))
    # XLA's partitioner loses the shift of a `lax.pad` with a negative width.
    parts = (
        [lax.slice_in_dim(y, 1, n, axis=axis), zero]
        if reverse
        else [zero, lax.slice_in_dim(y, 0, n - 1, axis=axis)]
    )
    return lax.concatenate(parts, axis)


def edges_of(cu_seqlens: jax.Array, n: int) -> jax.Array:
    """[S + 3]: 0, where S sequences begin, where the last one ends, and the end of the axis."""
    inside = jnp.clip(as_int32(gathered(cu_seqlens, 0)), 0, n)
    if isinstance(inside.size, int):
        inside = lax.cummax(inside)
    else:  # symbolic (jax.export), which cummax does not take
        _, inside = lax.scan(lambda m, x: (jnp.maximum(m, x),) * 2, jnp.int32(0), inside)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inside, jnp.full(1, n, jnp.int32)])


def count_at_most(ends: jax.Array, i: jax.Array) -> jax.Array:
    """How many of the ascending `ends` are at most i."""
    # searchsorted takes no symbolic sizes (jax.export), and fails beside automatic mesh axes.
    if not isinstance(ends.size, int) or is_partly_manual():
        return jnp.sum(ends[:, None] <= i[None], axis=0, dtype=jnp.int32)
    return jnp.searchsorted(ends, i, side="right", method="scan_unrolled").astype(jnp.int32)


def _packed(y: jax.Array, edges: jax.Array, carry: jax.Array | None, p: Params) -> jax.Array:
    """The sums with `edges`: chunks are counted from where their sequence begins."""
    axis, reverse, n = p.axis, p.reverse, y.shape[p.axis]
    i = jnp.arange(n, dtype=jnp.int32)
    sequence = count_at_most(edges[1:-1], i)
    low, high = edges[sequence], edges[sequence + 1]
    offset = (i - low) % p.chunk_size

    edge = along(i + 1 == high if reverse else i == low, y, axis)  # the first of its sequence
    ahead = (offset == p.chunk_size - 1) | (i + 1 == high) if reverse else offset == 0
    first = along(ahead, y, axis)  # the first of its chunk
    live = (sequence > 0) & (sequence < edges.size - 2)
    y = jnp.where(along(live, y, axis), y, 0)
    if p.shift and not p.shift_result:
        y = jnp.where(first if p.shift == "chunk" else edge, 0, previous(y, axis, reverse))
    if carry is not None:
        y = y.at[(slice(None),) * axis + (n - 1 if reverse else 0,)].add(carry)
    y = _restarting_sums(first, y, axis, reverse)
    return jnp.where(edge, 0, previous(y, axis, reverse)) if p.shift_result else y


def _restarting_sums(first: jax.Array, y: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """Running sums of y that restart where `first` is true."""
    if isinstance(y.shape[axis], int):
        _, y = lax.associative_scan(_restarting, (first, y), axis=axis, reverse=reverse)
        return y
    # Symbolic (jax.export): segments side by side, then a scan in steps over their totals.
    first, y = (jnp.moveaxis(x, axis, 0) for x in (first, y))
    n, end = y.shape[0], 0 if reverse else -1
    count = -(-n // OF_SYMBOLIC)
    first, y = (
        jnp.pad(x, [(0, count * OF_SYMBOLIC - n), *[(0, 0)] * (x.ndim - 1)]).reshape(
            count, OF_SYMBOLIC, *x.shape[1:]
        )
        for x in (first, y)
    )
    first, y = lax.associative_scan(_restarting, (first, y), axis=1, reverse=reverse)
    totals = first[:, end], y[:, end]
    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), totals)

    def step(before: Any, own: Any) -> tuple[Any, Any]:
        return _restarting(before, own), before

    before = lax.scan(step, nothing, totals, reverse=reverse)[1]
    _, y = _restarting(jax.tree.map(lambda x: x[:, None], before), (first, y))
    return jnp.moveaxis(lax.collapse(y, 0, 2)[:n], 0, axis)


def _restarting(before: Any, after: Any) -> Any:
    """Joins the sums of two neighbouring ranges, each with whether a chunk begins in it."""
    (first, total), (restarts, own) = before, after
    return first | restarts, jnp.where(restarts, own, total + own)
