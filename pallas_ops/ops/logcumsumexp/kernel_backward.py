"""How the gradient of logcumsumexp runs: x is read again, and o never needed.

With pairs (p, s) of all up to i, and W the gradient of the state after a tile: below one pivot,
dx_j = exp(x_j - p) (sum_{i>=j} do_i / s_i + W / s_last), and W of the state before is that sum over
the whole tile, times exp(p_before - p) s_before. Where a tile's range is too wide for one pivot, a
scan of T_i = do_i + exp(o_i - o_{i+1}) T_{i+1} gives dx_i = exp(x_i - o_i) T_i. An axis in several
parts takes three launches: each part as the map W -> factor W + sum, their scan, the parts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, power_of_two, span
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.logcumsumexp import kernel_recurrence
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.sums import (
    exponentials,
    fading_sum,
    inverse,
    log_scale,
    pivot_of,
    repeat,
    running_pairs,
    running_sum,
    too_wide,
    total_of,
)
from pallas_ops.ops.logcumsumexp.tiles import Columns, Pair, Plan, Tile, plan_of

Refs = tuple[Ref, Ref, Ref | None]  # x, do, dx; nothing to store without dx


def backward(
    x: jax.Array,
    do: jax.Array,
    dfinal: jax.Array,
    mark_p: jax.Array,
    mark_s: jax.Array,
    *,
    axis: int,
    reverse: bool,
    clip: float | None,
    block_n: int,
    config: LogcumsumexpConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """dx, and the gradient of the initial state, from the pairs that `forward` saved."""
    plan = plan_of(x, axis, block_n, config, reverse=reverse, clip=clip)
    parts = plan.parts
    arrays = [plan.view(y) for y in (x, do, mark_p, mark_s, dfinal)]
    states = None
    if parts > 1:
        states = _states(plan, *arrays)
    dx, dinitial = launch(
        partial(_backward_kernel, plan=plan),
        *arrays,
        states,
        name="logcumsumexp_backward",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=[*_specs(plan), None if states is None else plan.spec(parts + 1)],
        out_specs=[plan.spec(plan.s.n), plan.spec(1)],
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, x.dtype), plan.shape(1)],
        num_warps=plan.c.num_warps,
    )
    return dx.reshape(x.shape), dinitial.reshape(dfinal.shape)


def _specs(plan: Plan) -> list[pl.BlockSpec]:
    """x, do, mark_p, mark_s, dfinal"""
    sizes = (plan.s.n, plan.s.n, plan.tiles + 1, plan.tiles + 1, 1)
    return [plan.spec(size) for size in sizes]


def _states(plan: Plan, *arrays: jax.Array) -> jax.Array:
    """The gradients of the states before each part and after the last."""
    parts = plan.parts
    (sums,) = launch(
        partial(_sums_kernel, plan=plan),
        *arrays[:-1],
        name="logcumsumexp_backward_sums",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=_specs(plan)[:-1],
        out_specs=[plan.spec(parts)],
        out_shape=[plan.shape(parts)],
        num_warps=plan.c.num_warps,
    )
    narrow = plan.narrowed()
    (states,) = launch(
        partial(_states_kernel, plan=narrow),
        sums,
        *arrays[2:],
        name="logcumsumexp_backward_states",
        grid=(narrow.column_blocks, plan.s.b),
        in_specs=[plan.spec(parts), *_specs(plan)[2:]],
        out_specs=[plan.spec(parts + 1)],
        out_shape=[plan.shape(parts + 1)],
        num_warps=narrow.c.num_warps,
    )
    return states


def _backward_kernel(
    x_ref: Ref,  # [N, C] or [C, N], as do_ref; the others likewise
    do_ref: Ref,
    mark_p_ref: Ref,  # [tiles + 1, C], as mark_s_ref
    mark_s_ref: Ref,
    dfinal_ref: Ref,  # [1, C]
    state_ref: Ref | None,  # [parts + 1, C]
    dx_ref: Ref,
    dinitial_ref: Ref,  # [1, C]
    *,
    plan: Plan,
) -> None:
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    marks = mark_p_ref, mark_s_ref
    ref, position = (dfinal_ref, 0) if state_ref is None else (state_ref, i + 1)
    behind = columns.row(ref, position)
    grad = _tiles(columns, i, behind, marks, (x_ref, do_ref, dx_ref))

    @pl.when(plan.part(i)[0] == 0)
    def _() -> None:
        _, s = columns.pair(marks, 0)
        columns.put_row(dinitial_ref, 0, jnp.where(s == jnp.inf, jnp.nan, grad))


def _sums_kernel(
    x_ref: Ref, do_ref: Ref, mark_p_ref: Ref, mark_s_ref: Ref, sum_ref: Ref, *, plan: Plan
) -> None:
    """The gradient of the state before one part, from that part alone [parts, C]."""
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    nothing = jnp.zeros(columns.column.shape)
    grad = _tiles(columns, i, nothing, (mark_p_ref, mark_s_ref), (x_ref, do_ref, None))
    columns.put_row(sum_ref, i, grad)


def _tiles(
    columns: Columns, i: jax.Array, behind: jax.Array, marks: tuple[Ref, Ref], refs: Refs
) -> jax.Array:
    """Goes through the tiles of the i-th part, from last to first."""
    plan = columns.plan
    step = kernel_recurrence.backward if plan.c.variant == "recurrence" else _tile
    size = plan.c.block_n
    first, stop = plan.part(i)

    def tile(k: jax.Array, behind: jax.Array) -> jax.Array:
        t = stop - 1 - pipelined(k, plan.c.num_stages)
        return step(columns, t * size, columns.pair(marks, t), behind, refs, size)

    grad: jax.Array = lax.fori_loop(0, stop - first, tile, behind)
    return grad


def _tile(
    columns: Columns, first: jax.Array, before: Pair, behind: jax.Array, refs: Refs, size: int
) -> jax.Array:
    """dx from `first` on; the gradient of the state before, from `behind`, that after."""
    x_ref, do_ref, dx_ref = refs
    tile = Tile(columns, first, size, grouped=True)
    x, do = tile.load_x(x_ref), tile.load(do_ref)
    pivot = pivot_of(x, before)

    def plain() -> jax.Array:
        start, e = exponentials(x, before, pivot)
        sums, total = running_sum(e, start)
        tail = behind * inverse(start + total)
        grads, whole = running_sum(do * inverse(sums), tail, reverse=True)
        tile.store_dx(dx_ref, x_ref, e * grads)
        return jnp.where(start == jnp.inf, 0.0, start) * (whole + tail)  # which may be NaN

    def exact() -> jax.Array:
        if size > columns.plan.block_exact:
            return _parts(columns, first, before, behind, refs, size)
        return _exact(Tile(columns, first, size), before, behind, refs)

    grad: jax.Array = lax.cond(too_wide(tile, columns, first, x_ref, before, pivot), exact, plain)
    return grad


def _parts(
    columns: Columns, first: jax.Array, before: Pair, behind: jax.Array, refs: Refs, size: int
) -> jax.Array:
    """`_tile` in smaller ones."""
    part = columns.plan.block_exact

    def step(k: jax.Array, behind: jax.Array) -> jax.Array:
        tile = Tile(columns, first, size)
        x = jnp.where(tile.offset < k * part, tile.load_x(refs[0]), -jnp.inf)
        pair = total_of(x, before)
        return _tile(columns, first + k * part, pair, behind, refs, part)

    grad: jax.Array = repeat(size // part, step, behind, reverse=True)
    return grad


def _exact(tile: Tile, before: Pair, behind: jax.Array, refs: Refs) -> jax.Array:
    """`_tile` by pairs, o_i = p_i + log s_i."""
    x_ref, do_ref, dx_ref = refs
    x = tile.load_x(x_ref)
    p, s = running_pairs(x, before)
    scale = log_scale(s)
    _, _, grads = scan(fading_sum, (p, scale, tile.load(do_ref)), reverse=True)
    end = tile.size - 1
    fade = (p - tile.pick(p, end)[None]) * LOG2E + (scale - tile.pick(scale, end)[None])
    grads = grads + exp2(fade) * behind[None]
    tile.store_dx(dx_ref, x_ref, exp2((x - p) * LOG2E) * inverse(s) * grads)
    fade = (before[0] - tile.pick(p, 0)) * LOG2E + (log_scale(before[1]) - tile.pick(scale, 0))
    return jnp.where(before[1] == 0, 0.0, exp2(fade)) * tile.pick(grads, 0)


def _states_kernel(
    sum_ref: Ref,  # [parts, C]
    mark_p_ref: Ref,  # [tiles + 1, C], as mark_s_ref
    mark_s_ref: Ref,
    dfinal_ref: Ref,  # [1, C]
    state_ref: Ref,  # [parts + 1, C]
    *,
    plan: Plan,
) -> None:
    """W -> factor W + sum, one part after another, from the last."""
    columns = Columns(plan, pl.program_id(0))
    i = span(power_of_two(plan.parts))[:, None]
    there = (i < plan.parts) & columns.inside[None]

    def mark(ref: Ref, i: jax.Array, other: float) -> jax.Array:
        index = columns.index(plan.start(jnp.minimum(i, plan.parts)))
        return plgpu.load(ref.at[index], mask=there, other=other)

    p, q = (mark(mark_p_ref, j, 0.0) for j in (i, i + 1))
    s, t = (mark(mark_s_ref, j, 1.0) for j in (i, i + 1))
    factor = exp2((p - q) * LOG2E + (log_scale(s) - log_scale(t)))
    factor = jnp.where((s == 0) | ((s == jnp.inf) & (t == jnp.inf)), 0.0, factor)
    factor = jnp.where(i < plan.parts, factor, 1.0)
    own = plgpu.load(sum_ref.at[columns.index(i)], mask=there, other=0.0)
    behind = columns.row(dfinal_ref, 0)
    columns.put_row(state_ref, plan.parts, behind)
    factor, own = scan(_affine, (factor, own), reverse=True)
    plgpu.store(state_ref.at[columns.index(i)], factor * behind[None] + own, mask=there)


def _affine(before: Any, after: Any) -> Any:
    (factor, add), (own_factor, own) = before, after
    return factor * own_factor, own_factor * add + own
