"""Forward kernels of logcumsumexp.

Each program scans one segment of the axis for a block of columns, tile by tile, and carries a
state. Inside a tile all exponentials share one pivot, exp(x - pivot), and running sums of them are
the output's exponentials. This is exact while every prefix stays above 2**-16 of exp(pivot);
`exact.range_too_large` tests that, and other tiles have a state at every position (`exact.py`).
"""

from functools import partial
from typing import Any

import jax
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import is_interpreted
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.logcumsumexp import exact
from pallas_ops.ops.logcumsumexp.config import Params, Plan, plan_of
from pallas_ops.ops.logcumsumexp.reference import State
from pallas_ops.ops.logcumsumexp.tiles import (
    Segments,
    compensated,
    empty,
    exponentials,
    largest,
    largest_in_lane,
    log_of,
    pair_of,
    raised,
    rebase,
    rescaled,
    state_of,
)
from pallas_ops.scan import segments
from pallas_ops.scan.running import GROUPS, STEPS, running_sums
from pallas_ops.scan.segments import Pair
from pallas_ops.scan.tile import Tile, per_range
from pallas_ops.scan.view import MAX_VECTOR, launch_plan


def forward(
    x: jax.Array, *given: jax.Array | None, params: Params, save: bool = False
) -> tuple[jax.Array, ...]:
    """Output and final state; to save: pivots and totals before each tile, and after the last."""
    plan = plan_of(x, params)
    s, tiles = plan.view.s, plan.num_tiles
    sizes = (1, tiles, tiles, 1, 1) if save else (1,)
    view = x.reshape(s.b, s.n, s.c)
    before = segments.sums_before(s, partial(_totals, plan, is_interpreted(), view))
    columns = (None if y is None else y.reshape(s.b, 1, s.c) for y in given)
    shapes = [jax.ShapeDtypeStruct(view.shape, x.dtype), *map(plan.shape, sizes)]
    out, final, *saved = launch_plan(
        _forward_kernel, plan, "logcumsumexp", shapes, view, *columns, *before, save=save
    )
    outer, inner = x.shape[: params.axis], x.shape[params.axis + 1 :]
    states = [y.reshape(*outer, -1, *inner) for y in saved[:2]]
    final, *last = (y.reshape(*outer, *inner) for y in (final, *saved[2:]))
    return out.reshape(x.shape), final, *states, *last


saving = partial(forward, save=True)


def totals(x: jax.Array, *, params: Params) -> Pair:
    """The pivot and total of all of the axis."""
    plan = plan_of(x, params)
    s = plan.view.s
    p, w = segments.sum_pairs(_totals(plan, is_interpreted(), x.reshape(s.b, s.n, s.c)))
    shape = x.shape[: params.axis] + x.shape[params.axis + 1 :]
    return p.reshape(shape), w.reshape(shape)


@partial(jax.jit, static_argnums=(0, 1))
def _totals(plan: Plan, _: bool, x: jax.Array) -> Pair:
    """The log-sum-exp of each segment; traced once for a shard's exchange and for its scan.

    XLA drops a launch that repeats another one. The text of a kernel contains the source locations
    of its callers, so two traces of one kernel would not be the same to XLA. Interpreted kernels
    have traces of their own.
    """
    shapes = segments.shapes(plan.view.s)
    p, w = launch_plan(_totals_kernel, plan, "logcumsumexp_totals", shapes, x)
    return p, w


def _totals_kernel(
    x_ref: Ref,  # [b, n, c]
    p_ref: Ref,  # [b, c, count], as w_ref
    w_ref: Ref,
    *,
    plan: Plan,
) -> None:
    """Each lane sums what it loads; at the end the lanes' sums are joined."""
    ranges, view = Segments(plan), plan.view
    vector = min(view.block_c, MAX_VECTOR // view.s.itemsize)  # columns that a lane loads at once
    steps = view.num_steps if view.s.c == 1 else max(1, view.num_steps // vector)

    def step(t: Any, state: State) -> State:
        tile = Tile(ranges, t * plan.c.block_n, plan.c.block_n, steps, exchange=False)
        x = ranges.load_x(tile, x_ref)
        pivot = raised(largest_in_lane(x), state.pivot)
        total = exp2((x - pivot[None]) * LOG2E).sum(axis=STEPS)
        return State(pivot, *compensated(*rescaled(state, pivot), total))

    groups = plan.c.block_n // steps
    state = ranges.loop(step, empty((view.num_ranges, groups, view.block_c)))
    top = state.pivot.max(axis=GROUPS - 1)
    total = rebase(state.total, state.pivot, top[:, None]).sum(axis=GROUPS - 1)
    segments.store(ranges, p_ref, w_ref, (top, total))


def _forward_kernel(
    x_ref: Ref,  # [b, n, c], as out_ref
    initial_ref: Ref | None,  # [b, 1, c], as total_ref: a logarithm, or a pivot beside total_ref
    total_ref: Ref | None,
    p_ref: Ref | None,  # sums before segments [b, c, count], as w_ref
    w_ref: Ref | None,
    out_ref: Ref,
    final_ref: Ref,  # [b, 1, c]
    *saved_refs: Ref,  # if states are saved: two [b, tiles, c], two [b, 1, c] of the last
    plan: Plan,
    save: bool,
) -> None:
    ranges, view = Segments(plan), plan.view
    pair = empty(ranges.shape)[:2]
    if initial_ref is not None:
        pair = pair_of(ranges.load(initial_ref, 0))
    if total_ref is not None:
        pair = pair[0], ranges.load(total_ref, 0)
    if p_ref is not None:
        pair = segments.join(pair, segments.load(ranges, p_ref, w_ref))

    def step(t: Any, state: State) -> State:
        if save:
            number = ranges.number * view.tiles + t
            there = number < plan.num_tiles if view.s.n % view.s.size else None
            for ref, y in zip(saved_refs[:2], state[:2], strict=True):
                ranges.store(ref, ranges.place(number), y, there)
        return _tile(ranges, t * plan.c.block_n, state, x_ref, out_ref)

    state = ranges.loop(step, state_of(pair))
    is_last = None if view.s.count == 1 else ranges.number == view.s.count - 1
    ranges.store(final_ref, 0, log_of(*state[:2]), is_last)
    for ref, y in zip(saved_refs[2:], state[:2], strict=False):
        ranges.store(ref, 0, y, is_last)


def _tile(ranges: Segments, first: Any, state: State, x_ref: Ref, out_ref: Ref) -> State:
    """Scans a tile and stores its output; returns the state after it."""
    tile = ranges.tile(first)
    x = ranges.load_x(tile, x_ref)

    def stepwise() -> State:
        return exact.forward(ranges, tile, x, state, (x_ref, out_ref))

    if ranges.c.variant == "recurrence":
        return stepwise()
    pivot = raised(largest(x), state.pivot)

    def plain() -> State:
        total, error = rescaled(state, pivot)
        sums, added = running_sums(exponentials(x, pivot), total, reverse=ranges.view.mirrored)
        tile.store(out_ref, log_of(per_range(pivot), sums))
        return State(pivot, *compensated(total, error, added))

    return lax.cond(exact.range_too_large(x, state, pivot), stepwise, plain)
