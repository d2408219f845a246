"""What chunk_cumsum_decay means, in jax.numpy."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.dtypes import wide

Shift = Literal["chunk", "sequence"]


def accumulate(
    x: jax.Array,
    edges: jax.Array | None,
    carry: jax.Array | None = None,
    *,
    axis: int,
    chunk_size: int,
    reverse: bool,
    shift: Shift | None,
    scale: float | None,
    shift_result: bool = False,
) -> jax.Array:
    """The output in float32 (float64). `shift_result`: of the sums, not of x.

    `carry` is what the first sum that is met starts from. `edges` are as `edges_of` gives them, and
    may be of a longer axis, of which this is a part that begins at 0.
    """
    n = x.shape[axis]
    y = x.astype(wide(x.dtype))
    y = y if scale is None else y * scale
    if edges is not None:
        return _packed(y, edges, carry, axis, chunk_size, reverse, shift, shift_result)
    if shift == "sequence" and not shift_result:
        y = previous(y, axis, reverse)
    num_chunks = -(-n // chunk_size)
    y = _pad(y, axis, 0, num_chunks * chunk_size - n)
    y = y.reshape(*y.shape[:axis], num_chunks, chunk_size, *y.shape[axis + 1 :])
    if shift == "chunk":
        y = previous(y, axis + 1, reverse)
    if carry is not None:
        y = y.at[(slice(None),) * axis + divmod(n - 1 if reverse else 0, chunk_size)].add(carry)
    y = lax.cumsum(y, axis + 1, reverse=reverse)
    y = y.reshape(*x.shape[:axis], num_chunks * chunk_size, *x.shape[axis + 1 :])
    y = lax.slice_in_dim(y, 0, n, axis=axis)
    return previous(y, axis, reverse) if shift_result else y


def previous(y: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """What a sum meets just before each position, and 0 before the first."""
    return _pad(y, axis, -1, 1) if reverse else _pad(y, axis, 1, -1)


def _pad(y: jax.Array, axis: int, low: int, high: int) -> jax.Array:
    if not y.shape[axis]:
        return y
    widths = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(y.ndim)]
    return lax.pad(y, jnp.zeros((), y.dtype), widths)


def edges_of(cu_seqlens: jax.Array, n: int) -> jax.Array:
    """[S + 3]: where S sequences begin and end, between what is before and what is behind them."""
    inside = jnp.clip(cu_seqlens.astype(jnp.int32), 0, n)
    if isinstance(inside.size, int):
        inside = lax.cummax(inside)
    else:  # symbolic (jax.export), which cummax does not take
        _, inside = lax.scan(lambda m, x: (jnp.maximum(m, x),) * 2, jnp.int32(0), inside)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inside, jnp.full(1, n, jnp.int32)])


def among(ends: jax.Array, i: jax.Array) -> jax.Array:
    """How many of the ascending `ends` are at most i."""
    if not isinstance(ends.size, int):  # symbolic (jax.export), which searchsorted does not take
        return jnp.sum(ends[:, None] <= i[None], axis=0, dtype=jnp.int32)
    return jnp.searchsorted(ends, i, side="right", method="scan_unrolled").astype(jnp.int32)


def _packed(
    y: jax.Array,
    bounds: jax.Array,
    carry: jax.Array | None,
    axis: int,
    chunk_size: int,
    reverse: bool,
    shift: Shift | None,
    shift_result: bool,
) -> jax.Array:
    n = y.shape[axis]
    i = jnp.arange(n, dtype=jnp.int32)
    sequence = among(bounds[1:-1], i)
    low, high = bounds[sequence], bounds[sequence + 1]
    offset = (i - low) % chunk_size

    def along(flags: jax.Array) -> jax.Array:
        return lax.expand_dims(flags, [j for j in range(y.ndim) if j != axis])

    edge = along(i + 1 == high if reverse else i == low)  # the first of its sequence to be met
    ahead = (offset == chunk_size - 1) | (i + 1 == high) if reverse else offset == 0
    first = along(ahead)  # the first of its chunk
    y = jnp.where(along((sequence > 0) & (sequence < bounds.size - 2)), y, 0)
    if shift and not shift_result:
        y = jnp.where(first if shift == "chunk" else edge, 0, previous(y, axis, reverse))
    if carry is not None:
        y = y.at[(slice(None),) * axis + (n - 1 if reverse else 0,)].add(carry)
    y = _restarting_sums(first, y, axis, reverse)
    return jnp.where(edge, 0, previous(y, axis, reverse)) if shift_result else y


def _restarting_sums(first: jax.Array, y: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """Running sums of y that restart where `first` is true."""
    if isinstance(y.shape[axis], int):
        _, y = lax.associative_scan(_restarting, (first, y), axis=axis, reverse=reverse)
        return y
    first, y = (jnp.moveaxis(x, axis, 0) for x in (first, y))  # symbolic: a scan in steps

    def step(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = jnp.where(x[0], x[1], total + x[1])
        return total, total

    sums = lax.scan(step, jnp.zeros_like(y.sum(0)), (first, y), reverse=reverse)[1]
    return jnp.moveaxis(sums, 0, axis)


def _restarting(before: Any, after: Any) -> Any:
    """Joins the sums of two neighbouring ranges, each with whether a chunk begins in it."""
    (first, total), (restarts, own) = before, after
    return first | restarts, jnp.where(restarts, own, total + own)
