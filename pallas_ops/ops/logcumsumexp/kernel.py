"""How logcumsumexp runs forward: the launchers first, then the kernel bodies.

A tile is summed below one pivot, the largest number met so far, where that loses nothing: no prefix
lies more than a factor of 2**24 below it. Otherwise it is read again, in smaller tiles, and those
that are still too wide are scanned by pairs of pivot and sum. An axis in several parts takes three
launches: the parts' totals, their scan, the parts.
"""

from functools import partial

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, power_of_two, span
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.logcumsumexp import kernel_recurrence
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.sums import (
    add_pairs,
    exponentials,
    initial_pair,
    log_of,
    over,
    pivot_of,
    repeat,
    running_pairs,
    running_sum,
    too_wide,
    total_of,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Plan, Tile, plan_of


def forward(
    x: jax.Array,
    initial: jax.Array | None,
    *,
    axis: int,
    reverse: bool,
    clip: float | None,
    block_n: int,
    config: LogcumsumexpConfig | None,
    save: bool,
) -> tuple[jax.Array, ...]:
    """Output and final state; to save: the pairs before each tile and after the last."""
    plan = plan_of(x, axis, block_n, config, saves=save, reverse=reverse, clip=clip)
    parts, marks = plan.parts, plan.tiles + 1
    column = None if initial is None else plan.view(initial)
    view = plan.view(x)
    starts = _starts(plan, view, column) if parts > 1 else [None, None]
    out, *small = launch(
        partial(_forward_kernel, plan=plan, save=save),
        view,
        column if parts == 1 else None,
        *starts,
        name="logcumsumexp",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=[
            plan.spec(plan.s.n),
            None if column is None or parts > 1 else plan.spec(1),
            *(None if x is None else plan.spec(parts + 1) for x in starts),
        ],
        out_specs=[plan.spec(plan.s.n), plan.spec(1), *[plan.spec(marks)] * (2 * save)],
        out_shape=[
            jax.ShapeDtypeStruct(view.shape, x.dtype),
            *(plan.shape(size) for size in (1, *[marks] * (2 * save))),
        ],
        num_warps=plan.c.num_warps,
    )
    outer, inner = x.shape[:axis], x.shape[axis + 1 :]
    final, *saved = small
    saved = [mark.reshape(*outer, marks, *inner) for mark in saved]
    return out.reshape(x.shape), final.reshape(*outer, *inner), *saved


def _starts(plan: Plan, view: jax.Array, initial: jax.Array | None) -> list[jax.Array]:
    """The pairs before each part and after the last."""
    parts = plan.parts
    totals = launch(
        partial(_totals_kernel, plan=plan),
        view,
        name="logcumsumexp_totals",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=[plan.spec(plan.s.n)],
        out_specs=[plan.spec(parts)] * 2,
        out_shape=[plan.shape(parts)] * 2,
        num_warps=plan.c.num_warps,
    )
    narrow = plan.narrowed()
    return launch(
        partial(_starts_kernel, plan=narrow),
        *totals,
        initial,
        name="logcumsumexp_starts",
        grid=(narrow.column_blocks, plan.s.b),
        in_specs=[*[plan.spec(parts)] * 2, None if initial is None else plan.spec(1)],
        out_specs=[plan.spec(parts + 1)] * 2,
        out_shape=[plan.shape(parts + 1)] * 2,
        num_warps=narrow.c.num_warps,
    )


def _forward_kernel(
    x_ref: Ref,  # [N, C] or [C, N]; the others likewise
    initial_ref: Ref | None,  # [1, C]
    start_p_ref: Ref | None,  # [parts + 1, C], as start_s_ref
    start_s_ref: Ref | None,
    out_ref: Ref,
    final_ref: Ref,  # [1, C]
    *mark_refs: Ref,  # [tiles + 1, C]
    plan: Plan,
    save: bool,
) -> None:
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    step = kernel_recurrence.forward if plan.c.variant == "recurrence" else _tile
    first, stop = plan.part(i)

    def tile(t: jax.Array, pair: Pair) -> Pair:
        t = pipelined(t, plan.c.num_stages)
        if save:
            columns.put_pair(mark_refs, t, pair)
        return step(columns, t * plan.c.block_n, pair, x_ref, out_ref, plan.c.block_n)

    pair = initial_pair(columns, initial_ref)
    if start_p_ref is not None:
        pair = columns.pair((start_p_ref, start_s_ref), i)
    pair = lax.fori_loop(first, stop, tile, pair)

    @pl.when(stop == plan.tiles)
    def _() -> None:
        columns.put_row(final_ref, 0, log_of(pair))
        if save:
            columns.put_pair(mark_refs, plan.tiles, pair)


def _tile(
    columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, out_ref: Ref, size: int
) -> Pair:
    """The positions from `first` on, and the pair after them."""
    tile = Tile(columns, first, size, grouped=True)
    x = tile.load_x(x_ref)
    pivot = pivot_of(x, before)

    def plain() -> Pair:
        start, e = exponentials(x, before, pivot)
        sums, total = running_sum(e, start)
        tile.store(out_ref, log_of((over(pivot, x), sums)))
        return pivot, start + total

    def exact() -> Pair:
        part = columns.plan.block_exact
        if size > part:
            after: Pair = repeat(
                size // part,
                lambda k, pair: _tile(columns, first + k * part, pair, x_ref, out_ref, part),
                before,
            )
            return after
        tile = Tile(columns, first, size)
        p, s = running_pairs(tile.load_x(x_ref), before)
        tile.store(out_ref, log_of((p, s)))
        return tile.pick(p, size - 1), tile.pick(s, size - 1)

    pair: Pair = lax.cond(too_wide(tile, columns, first, x_ref, before, pivot), exact, plain)
    return pair


def _totals_kernel(x_ref: Ref, p_ref: Ref, s_ref: Ref, *, plan: Plan) -> None:
    """The log-sum-exp of one part [N, C], as a pair [parts, C]."""
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    first, stop = plan.part(i)

    def tile(t: jax.Array, pair: Pair) -> Pair:
        t = pipelined(t, plan.c.num_stages)
        x = Tile(columns, t * plan.c.block_n, plan.c.block_n, grouped=True).load_x(x_ref)
        return total_of(x, pair)

    pair = lax.fori_loop(first, stop, tile, initial_pair(columns, None))
    columns.put_pair((p_ref, s_ref), i, pair)


def _starts_kernel(
    total_p_ref: Ref,  # [parts, C], as total_s_ref
    total_s_ref: Ref,
    initial_ref: Ref | None,  # [1, C]
    start_p_ref: Ref,  # [parts + 1, C], as start_s_ref
    start_s_ref: Ref,
    *,
    plan: Plan,
) -> None:
    columns = Columns(plan, pl.program_id(0))
    i = span(power_of_two(plan.parts))[:, None]
    there = (i < plan.parts) & columns.inside[None]
    total = (
        plgpu.load(total_p_ref.at[columns.index(i)], mask=there, other=-HUGE),
        plgpu.load(total_s_ref.at[columns.index(i)], mask=there, other=0.0),
    )
    initial = initial_pair(columns, initial_ref)
    columns.put_pair((start_p_ref, start_s_ref), 0, initial)
    starts = add_pairs(tuple(x[None] for x in initial), scan(add_pairs, total))
    for ref, start in zip((start_p_ref, start_s_ref), starts, strict=True):
        plgpu.store(ref.at[columns.index(i + 1)], start, mask=there)
