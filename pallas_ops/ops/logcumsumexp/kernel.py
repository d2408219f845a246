"""How logcumsumexp runs forward: the launchers first, then the kernel bodies.

A tile is summed below one pivot, which no number so far exceeds by more than 1, where that loses
nothing: no prefix lies more than a factor of 2**16 below it. Otherwise it is read again, in smaller
tiles, and pivot and sum follow every step.
"""

from functools import partial

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.logcumsumexp import kernel_parts, kernel_recurrence, kernel_stretches
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.plan import Plan, plan_of
from pallas_ops.ops.logcumsumexp.sums import (
    carried,
    exponentials,
    initial_pair,
    log_of,
    pivot_of,
    plus,
    repeat,
    running_sums,
    sunk,
    too_wide,
)
from pallas_ops.ops.logcumsumexp.tiles import Carry, Columns, Rows, Steps


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
    plan = plan_of(x, axis, block_n, config, reverse=reverse, clip=clip)
    parts, marks = plan.parts, plan.tiles + 1
    column = None if initial is None else plan.view(initial)
    view = plan.view(x)
    out, *small = launch(
        partial(_forward_kernel, plan=plan, save=save),
        view,
        column,
        name="logcumsumexp",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=[
            plan.spec(plan.s.n),
            None if column is None else plan.spec(1),
        ],
        out_specs=[plan.spec(plan.s.n), plan.spec(1), *[plan.spec(marks)] * (2 * save)],
        out_shape=[
            jax.ShapeDtypeStruct(view.shape, x.dtype),
            *(plan.shape(size) for size in (1, *[marks] * (2 * save))),
        ],
        num_warps=plan.c.num_warps,
        **kernel_parts.messages(plan, 2),
    )
    outer, inner = x.shape[:axis], x.shape[axis + 1 :]
    final, *saved = small
    saved = [mark.reshape(*outer, marks, *inner) for mark in saved]
    return out.reshape(x.shape), final.reshape(*outer, *inner), *saved


def _forward_kernel(
    x_ref: Ref,  # [N, C] or [C, N]; the others likewise
    initial_ref: Ref | None,  # [1, C]
    out_ref: Ref,
    final_ref: Ref,  # [1, C]
    *other_refs: Ref,  # [tiles + 1, C], if pairs are saved, and messages, if there are parts
    plan: Plan,
    save: bool,
) -> None:
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    step = kernel_recurrence.forward if plan.c.variant == "recurrence" else _tile
    mark_refs, words = other_refs[: 2 * save], other_refs[2 * save :]

    def tile(t: jax.Array, carry: Carry) -> Carry:
        if save:
            columns.put_pair(mark_refs, t, carry[:2])
        return step(columns, t * plan.c.block_n, carry, x_ref, out_ref, plan.c.block_n)

    pair = initial_pair(columns, initial_ref)
    if plan.stepped:
        refs = x_ref, out_ref
        pair = kernel_stretches.forward(columns, i, words, pair, refs, mark_refs)
    else:
        if words:
            own = kernel_parts.total(columns, i, x_ref)
            kernel_parts.put(columns, words, i, own)
            pair = kernel_parts.before(columns, i, words, own, pair)
        pair = plan.through(i, tile, carried(pair))[:2]

    @pl.when(i == plan.parts - 1)
    def _() -> None:
        columns.put_row(final_ref, 0, log_of(pair))
        if save:
            columns.put_pair(mark_refs, plan.tiles, pair)


def _tile(
    columns: Columns, first: jax.Array, before: Carry, x_ref: Ref, out_ref: Ref, size: int
) -> Carry:
    """The positions from `first` on, and the sum after them."""
    plan = columns.plan
    groups = plan.groups(size, columns=2)
    tile = Steps(columns, first, size, groups)
    out = tile if plan.s.last else Rows(columns, first, size, groups)
    xs = tile.load_x(x_ref)
    pivot = pivot_of(xs, before)

    def plain() -> Carry:
        start, lost = sunk(before, pivot)
        sums, total = running_sums(exponentials(xs, pivot[None]), start, mirrored=plan.mirrored)
        out.store(out_ref, [log_of((pivot[None], s)) for s in sums])
        return pivot, *plus(start, lost, total)

    def exact() -> Carry:
        part, apart = plan.block_exact, columns.apart()

        def step(k: jax.Array, carry: Carry) -> Carry:
            return kernel_recurrence.forward(apart, first + k * part, carry, x_ref, out_ref, part)

        after: Carry = repeat(size // part, step, before)
        return after

    carry: Carry = lax.cond(too_wide(tile, columns, first, x_ref, before, pivot), exact, plain)
    return carry
