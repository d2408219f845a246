"""A long axis with few columns, in segments.

One launch finds the total of each segment. Another one scans the tiles of each segment, starting
from the sum of the totals before it. Where a column has few segments, each program adds these
totals up on its own; where it has many, a small launch between the two scans them.

A total is a pair (p, w) for w * exp(p); that of nothing is (-HUGE, 0). Totals are arrays
[b, c, count]: those of a column lie side by side.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core import fastmath
from pallas_ops.core.backend import plgpu
from pallas_ops.core.checks import MAX_WARPS
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import HUGE, Ref, and_masks, power_of_two, span
from pallas_ops.core.triton_ext import scan
from pallas_ops.scan.tile import Ranges
from pallas_ops.scan.view import Sizes

Pair = tuple[jax.Array, jax.Array]

FEW = 16  # segments of a column whose totals each program adds up on its own
SCANNED = 512  # totals that a program scans: several short columns share one program


def shapes(s: Sizes) -> list[jax.ShapeDtypeStruct]:
    """Shapes of pivot and sum of the totals."""
    return [jax.ShapeDtypeStruct((s.b, s.c, s.count), jnp.float32)] * 2


def load(ranges: Ranges, p_ref: Ref, w_ref: Ref, *, reverse: bool = False) -> Pair:
    """The sum before each segment of a program [ranges, columns], from `sums_before`."""
    if ranges.view.s.count <= FEW:
        return _added_up(ranges, p_ref, w_ref, reverse=reverse)
    at, mask = _own(ranges)
    other = None if mask is None else 0.0
    p, w = (plgpu.load(ref.at[at], mask=mask, other=other) for ref in (p_ref, w_ref))
    return p, w


def _added_up(ranges: Ranges, p_ref: Ref, w_ref: Ref, *, reverse: bool) -> Pair:
    """The sum before each segment: the program loads all totals of its columns and adds them up."""
    (row, column, own), there = _own(ranges)
    count = ranges.view.s.count
    number, own = span(power_of_two(count))[None, None], own[..., None]
    before = (number > own) & (number < count) if reverse else number < own
    mask = and_masks(before, None if there is None else there[..., None])
    p, w = (
        plgpu.load(ref.at[row[..., None], column[..., None], number], mask=mask, other=other)
        for ref, other in ((p_ref, -HUGE), (w_ref, 0.0))
    )
    top = p.max(axis=-1)
    return top, (w * fastmath.exp2((p - top[..., None]) * LOG2E)).sum(axis=-1)


def store(ranges: Ranges, p_ref: Ref, w_ref: Ref, total: Pair) -> None:
    at, mask = _own(ranges)
    for ref, y in zip((p_ref, w_ref), total, strict=True):
        plgpu.store(ref.at[at], y, mask=mask)


def _own(ranges: Ranges) -> tuple[Any, jax.Array | None]:
    (row, number, column), mask = ranges.index(ranges.number)
    return (row, column, number), mask


def join(a: Pair, b: Pair, *, exp2: Any = fastmath.exp2) -> Pair:
    """The sum of two pairs, relative to the larger p."""
    p = jnp.maximum(a[0], b[0])
    return p, a[1] * exp2((a[0] - p) * LOG2E) + b[1] * exp2((b[0] - p) * LOG2E)


join_in_scan = partial(join, exp2=jnp.exp2)  # for scans: their operators take no inline assembly


def sum_pairs(totals: Pair, *, axis: int = -1) -> Pair:
    """The sum of pairs along an axis, outside of a kernel."""
    p, w = totals
    top = p.max(axis=axis)
    return top, (w * jnp.exp(p - jnp.expand_dims(top, axis))).sum(axis=axis)


def sums_before(
    s: Sizes, find_totals: Callable[[], Pair], *, reverse: bool = False
) -> tuple[jax.Array | None, jax.Array | None]:
    """What `load` takes: the sum before each segment (in reverse: after it).

    Where there are few segments, their totals: `load` adds these up. (None, None) for one segment.
    """
    if s.count == 1:
        return None, None
    totals = find_totals()
    if s.count <= FEW:
        return totals
    columns, block = s.b * s.c, power_of_two(s.count)
    num_columns = min(power_of_two(columns), max(1, SCANNED // block))
    views = [y.reshape(columns, s.count) for y in totals]
    p, w = launch(
        partial(_kernel, block=block, num_columns=num_columns, reverse=reverse),
        *views,
        name="segments",
        grid=(pl.cdiv(columns, num_columns),),
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in views],
        num_warps=min(MAX_WARPS, max(1, block * num_columns // 128)),  # four totals a lane
    )
    return p.reshape(totals[0].shape), w.reshape(totals[1].shape)


def _kernel(
    p_ref: Ref,  # [columns, count], as all refs
    w_ref: Ref,
    p_before_ref: Ref,
    w_before_ref: Ref,
    *,
    block: int,
    num_columns: int,
    reverse: bool,
) -> None:
    columns, count = p_ref.shape
    column = (pl.program_id(0) * num_columns + span(num_columns))[:, None]
    number = span(block)[None]
    mask = (column < columns) & (number < count)
    p = plgpu.load(p_ref.at[column, number], mask=mask, other=-HUGE)
    w = plgpu.load(w_ref.at[column, number], mask=mask, other=0.0)
    sums = scan(join_in_scan, (p, w), axis=1, reverse=reverse)
    # The sum up to a segment is stored for the next one; nothing is before the first.
    last, first, step = (0, count - 1, -1) if reverse else (count - 1, 0, 1)
    is_last = number == last
    target = column, jnp.where(is_last, first, number + step)
    for ref, y, nothing in zip((p_before_ref, w_before_ref), sums, (-HUGE, 0.0), strict=True):
        plgpu.store(ref.at[target], jnp.where(is_last, nothing, y), mask=mask)
