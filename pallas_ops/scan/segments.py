"""A long axis with few columns, in segments.

One launch finds the total of each segment, a small one scans the totals, and a third one scans the
tiles of each segment from there. No program waits for another, so the order in which programs start
does not matter. (To have every program of the third launch join the totals before its segment
saves a launch, but the kernel takes half as many registers again, and more reads than x itself
where there are hundreds of segments.)

A total is a pair (p, w), which stands for w * exp(p).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import checks, fastmath
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, power_of_two, span
from pallas_ops.core.triton_ext import scan
from pallas_ops.scan.view import View

Pair = tuple[jax.Array, jax.Array]

LEAST_TOTALS = 512  # that a program scans, if there are so many
LOWEST = float(jnp.finfo(jnp.float32).min)  # the p of a pair of nothing


def join(a: Pair, b: Pair, *, exp2: Any = fastmath.exp2) -> Pair:
    """The sum of two pairs, below the larger p. A scan takes `jnp.exp2`: no inline assembly."""
    p = jnp.maximum(a[0], b[0])
    return p, a[1] * exp2((a[0] - p) * LOG2E) + b[1] * exp2((b[0] - p) * LOG2E)


def exclusive(before: Any, after: Any) -> Any:
    """For a scan of (p, w, p, w): the sum of all pairs but the last one, and of all."""
    total = before[2:]
    return (*join(total, after[:2], exp2=jnp.exp2), *join(total, after[2:], exp2=jnp.exp2))


def sums_before(view: View, totals: Pair, *, reverse: bool = False) -> Pair:
    """For each segment the sum of the totals [b, count, c] before it; in reverse, after it."""
    s, spec = view.s, view.spec(view.s.count)
    rows = power_of_two(s.count)
    block_c = min(power_of_two(s.c), max(1, LEAST_TOTALS // rows))
    p, w = launch(
        partial(_kernel, rows=rows, block_c=block_c, reverse=reverse),
        *totals,
        name="segments",
        grid=(pl.cdiv(s.c, block_c), s.b),
        in_specs=[spec] * 2,
        out_specs=[spec] * 2,
        out_shape=[jax.ShapeDtypeStruct(totals[0].shape, jnp.float32)] * 2,
        num_warps=min(checks.MAX_WARPS, max(1, rows * block_c // 32)),  # a total a lane
    )
    return p, w


def _kernel(
    p_ref: Ref,  # [b, count, c], as all refs
    w_ref: Ref,
    p_before_ref: Ref,
    w_before_ref: Ref,
    *,
    rows: int,
    block_c: int,
    reverse: bool,
) -> None:
    _, count, columns = p_ref.shape
    shape = rows, block_c
    segment = jnp.broadcast_to(span(rows)[:, None], shape)
    column = jnp.broadcast_to((pl.program_id(0) * block_c + span(block_c))[None], shape)
    at = jnp.full(shape, pl.program_id(1)), segment, column
    mask = (segment < count) & (column < columns)
    p = plgpu.load(p_ref.at[at], mask=mask, other=LOWEST)
    w = plgpu.load(w_ref.at[at], mask=mask, other=0.0)
    nothing = jnp.full_like(p, LOWEST), jnp.zeros_like(w)
    sums = scan(exclusive, (*nothing, p, w), reverse=reverse)
    for ref, y in zip((p_before_ref, w_before_ref), sums[:2], strict=True):
        plgpu.store(ref.at[at], y, mask=mask)
