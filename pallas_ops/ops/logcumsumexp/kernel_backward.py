"""Backward kernels of logcumsumexp: x is read again, and the output is not needed.

With s_i the sum of exp(x - pivot) up to i, and U the gradient with respect to the sum after a tile,
dx_j = exp(x_j - pivot) * (U + sum_{i >= j} do_i / s_i). The gradient with respect to the sum before
the tile is U + sum_i do_i / s_i over all of the tile. Another pivot multiplies U by a factor.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2, pinned
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.logcumsumexp import exact
from pallas_ops.ops.logcumsumexp.config import Params, Plan, plan_of
from pallas_ops.ops.logcumsumexp.reference import State, of_first_tile
from pallas_ops.ops.logcumsumexp.tiles import (
    Saved,
    Segments,
    compensated,
    exponentials,
    rebase,
    rescaled,
    share,
    state_of,
    sum_of,
)
from pallas_ops.scan import segments
from pallas_ops.scan.running import running_sums
from pallas_ops.scan.segments import Pair
from pallas_ops.scan.view import launch_plan

Refs = tuple[Ref, Ref, Ref | None]  # x, do, dx; nothing is stored without dx


def backward(
    x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array, params: Params
) -> tuple[jax.Array, jax.Array]:
    """dx, and the gradient of the initial state, from the states that `forward` saved."""
    plan = plan_of(x, params, backward=True)
    s = plan.view.s
    arrays = [y.reshape(s.b, -1, s.c) for y in (x, do, *saved)]
    column = None if dfinal is None else dfinal.reshape(s.b, 1, s.c)
    after = segments.sums_before(s, partial(_totals, plan, arrays), reverse=True)
    shapes = [jax.ShapeDtypeStruct(arrays[0].shape, x.dtype), plan.shape(1)]
    dx, dinitial = launch_plan(
        _backward_kernel, plan, "logcumsumexp_backward", shapes, *arrays, column, *after
    )
    shape = x.shape[: params.axis] + x.shape[params.axis + 1 :]
    return dx.reshape(x.shape), dinitial.reshape(shape)


def backward_totals(
    x: jax.Array, do: jax.Array, *saved: jax.Array, params: Params
) -> tuple[jax.Array]:
    """The gradient of the total before the first tile, without that of the final state."""
    plan = plan_of(x, params, backward=True)
    s, pivot = plan.view.s, of_first_tile(saved[0], params)
    arrays = [y.reshape(s.b, -1, s.c) for y in (x, do, *saved)]
    p, w = segments.sum_pairs(_totals(plan, arrays))
    return ((w * jnp.exp(p + pivot.reshape(p.shape))).reshape(pivot.shape),)


def _totals(plan: Plan, arrays: list[jax.Array]) -> Pair:
    """The gradient of the sum before each segment, of the segment alone.

    A gradient w relative to pivot p stands for w * exp(-p), so its pair is (-p, w).
    """
    shapes = segments.shapes(plan.view.s)
    p, w = launch_plan(_totals_kernel, plan, "logcumsumexp_backward_totals", shapes, *arrays)
    return p, w


def _totals_kernel(
    x_ref: Ref,  # [b, n, c], as do_ref
    do_ref: Ref,
    saved_p_ref: Ref,  # [b, tiles, c], as saved_s_ref
    saved_s_ref: Ref,
    last_p_ref: Ref,  # [b, 1, c], as last_s_ref
    last_s_ref: Ref,
    p_ref: Ref,  # [b, c, count], as w_ref
    w_ref: Ref,
    *,
    plan: Plan,
) -> None:
    ranges = Segments(plan)
    saved = Saved(ranges, saved_p_ref, saved_s_ref, last_p_ref, last_s_ref)
    pivot = saved.pivot_after_range()
    grad = state_of((pivot, jnp.zeros(ranges.shape, jnp.float32)))
    grad = _tiles(ranges, grad, saved, (x_ref, do_ref, None))
    segments.store(ranges, p_ref, w_ref, (-grad.pivot, grad.total))


def _backward_kernel(
    x_ref: Ref,  # [b, n, c], as do_ref and dx_ref
    do_ref: Ref,
    saved_p_ref: Ref,  # [b, tiles, c], as saved_s_ref
    saved_s_ref: Ref,
    last_p_ref: Ref,  # [b, 1, c], as last_s_ref and dinitial_ref
    last_s_ref: Ref,
    dfinal_ref: Ref | None,
    p_ref: Ref | None,  # sums after segments [b, c, count], as w_ref
    w_ref: Ref | None,
    dx_ref: Ref,
    dinitial_ref: Ref,
    *,
    plan: Plan,
) -> None:
    ranges = Segments(plan)
    saved = Saved(ranges, saved_p_ref, saved_s_ref, last_p_ref, last_s_ref)
    pivot, total = saved.last
    grad = jnp.zeros(ranges.shape, jnp.float32)
    if dfinal_ref is not None:
        grad = share(ranges.load(dfinal_ref, 0), total)
    if p_ref is not None:
        last, (p, w) = pivot, segments.load(ranges, p_ref, w_ref, reverse=True)
        pivot = saved.pivot_after_range()
        grad = rebase(grad, pivot, last) + w * exp2((p + pivot) * LOG2E)
    after = _tiles(ranges, state_of((pivot, grad)), saved, (x_ref, do_ref, dx_ref))
    _, total = saved.before(0)
    is_first = None if plan.view.s.count == 1 else ranges.number == 0
    dinitial = jnp.where(total == jnp.inf, jnp.nan, total * after.total)
    ranges.store(dinitial_ref, 0, dinitial, is_first)


def _tiles(ranges: Segments, grad: State, saved: Saved, refs: Refs) -> State:
    """Scans the range backward: from the gradient of the sum after it to that of the sum before.

    A gradient is a `State`: the pivot that it is relative to, itself, and a compensation term.
    """
    tiles = ranges.view.tiles

    def step(t: Any, grad: State) -> State:
        t = tiles - 1 - t
        if ranges.view.s.c > 1:  # the exact branch has no registers for addresses (`pinned`)
            t = pinned(jnp.full((1, 1), t))
        before = state_of(saved.before(ranges.number * tiles + t))
        return _tile(ranges, t * ranges.c.block_n, before, grad, refs)

    return ranges.loop(step, grad)


def _tile(ranges: Segments, first: Any, state: State, grad: State, refs: Refs) -> State:
    """dx of a tile; the gradient of the sum before it, from that of the sum after it."""
    x_ref, do_ref, dx_ref = refs
    tile, mirrored = ranges.tile(first), ranges.view.mirrored
    x, do = ranges.load_x(tile, x_ref), tile.load(do_ref)

    def stepwise() -> State:
        return exact.backward(ranges, tile, (x, do), state, grad, refs)

    if ranges.c.variant == "recurrence":
        return stepwise()

    def plain() -> State:
        e = exponentials(x, grad.pivot)
        sums, total = running_sums(e, rescaled(state, grad.pivot)[0], reverse=mirrored)
        shares = share(do, sums)
        if dx_ref is None:
            whole = sum_of(shares)
        else:
            # Always grad.total, as no total is below 0. The comparison makes this scan wait for the
            # one above, which takes the fewest registers.
            tail = jnp.where(total < 0, 0.0, grad.total)
            grads, whole = running_sums(shares, tail, reverse=not mirrored)
            ranges.store_dx(tile, dx_ref, x_ref, e * grads)
        after = compensated(grad.total, grad.error, whole)
        factor = exp2((state.pivot - grad.pivot) * LOG2E)
        return State(state.pivot, *(y * factor for y in after))

    too_large = exact.range_too_large(x, state, grad.pivot)
    return lax.cond(too_large, stepwise, plain)
