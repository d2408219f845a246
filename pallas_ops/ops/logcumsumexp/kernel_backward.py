"""How the gradient of logcumsumexp runs: x is read again, and o never needed.

With pairs (p, s) of all up to i, and U the gradient of s after a tile: below one pivot,
dx_j = exp(x_j - p) (sum_{i>=j} do_i / s_i + U), and U before the tile is that sum over all of it:
nothing but a sum, so that it drifts nowhere. Where another pivot is in use, U takes a factor. Where
a tile's range is too wide for one pivot, both follow every step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.logcumsumexp import kernel_parts, kernel_recurrence, kernel_stretches_backward
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.kernel_recurrence import Refs
from pallas_ops.ops.logcumsumexp.plan import Plan, plan_of
from pallas_ops.ops.logcumsumexp.sums import (
    below,
    carried,
    exponentials,
    inverse,
    plus,
    repeat,
    risen,
    running_sums,
    too_wide,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Carry, Columns, Pair, Steps


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
    plan = plan_of(x, axis, block_n, config, backward=True, reverse=reverse, clip=clip)
    parts = plan.parts
    arrays = [plan.view(y) for y in (x, do, mark_p, mark_s, dfinal)]
    dx, dinitial = launch(
        partial(_backward_kernel, plan=plan),
        *arrays,
        name="logcumsumexp_backward",
        grid=(plan.column_blocks, parts, plan.s.b),
        in_specs=[plan.spec(size) for size in (plan.s.n, plan.s.n, *[plan.tiles + 1] * 2, 1)],
        out_specs=[plan.spec(plan.s.n), plan.spec(1)],
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, x.dtype), plan.shape(1)],
        num_warps=plan.c.num_warps,
        **kernel_parts.messages(plan, 1),
    )
    return dx.reshape(x.shape), dinitial.reshape(dfinal.shape)


def _backward_kernel(
    x_ref: Ref,  # [N, C] or [C, N], as do_ref; the others likewise
    do_ref: Ref,
    mark_p_ref: Ref,  # [tiles + 1, C], as mark_s_ref
    mark_s_ref: Ref,
    dfinal_ref: Ref,  # [1, C]
    dx_ref: Ref,
    dinitial_ref: Ref,  # [1, C]
    *words: Ref,  # messages, if there are parts
    plan: Plan,
) -> None:
    columns, i = Columns(plan, pl.program_id(0)), plan.parts - 1 - pl.program_id(1)
    marks = mark_p_ref, mark_s_ref
    refs = x_ref, do_ref, dx_ref
    if plan.stepped:
        grad = kernel_stretches_backward.backward(columns, i, words, marks, dfinal_ref, refs)
    else:
        behind = kernel_parts.last(columns, marks, dfinal_ref)
        if words:
            nothing = jnp.zeros_like(behind)
            own = _tiles(columns, i, nothing, marks, (x_ref, do_ref, None))
            kernel_parts.put(columns, words, i, (own,))
            behind = kernel_parts.behind(columns, i, words, marks, own, dfinal_ref)
        grad = _tiles(columns, i, behind, marks, refs)

    @pl.when(i == 0)
    def _() -> None:
        _, s = columns.pair(marks, 0)
        columns.put_row(dinitial_ref, 0, jnp.where(s == jnp.inf, jnp.nan, s * grad))


def _tiles(
    columns: Columns, i: jax.Array, behind: jax.Array, marks: tuple[Ref, Ref], refs: Refs
) -> jax.Array:
    """Goes through the i-th part from its last tile on; the gradient of the sum before it."""
    plan = columns.plan
    step = kernel_recurrence.backward if plan.c.variant == "recurrence" else _tile
    size = plan.c.block_n

    def tile(t: jax.Array, grad: Pair) -> Pair:
        before = carried(columns.pair(marks, t))
        pivot = plan.settled(columns.row(marks[0], t + 1, -HUGE))
        return step(columns, t * size, before, (pivot, *grad), refs, size)

    grad: jax.Array = plan.through(i, tile, (behind, jnp.zeros_like(behind)), reverse=True)[0]
    return grad


def _tile(
    columns: Columns, first: jax.Array, before: Carry, grad: Carry, refs: Refs, size: int
) -> Pair:
    """dx from `first` on; the gradient of the sum before, from that of the sum after."""
    x_ref, do_ref, dx_ref = refs
    plan = columns.plan
    tile = Steps(columns, first, size, plan.groups(size, columns=1))
    xs, dos = tile.load_x(x_ref), tile.load(do_ref)
    pivot, behind, lost = grad

    def plain() -> Pair:
        start, es = below(before, pivot), exponentials(xs, pivot[None])
        sums, total = running_sums(es, start, mirrored=plan.mirrored)
        shares = [do * inverse(s) for do, s in zip(dos, sums, strict=True)]
        # `behind` as it is, but not ahead of all sums: the order that takes the fewest registers.
        tail = jnp.where(total < 0, 0.0, behind)
        grads, whole = running_sums(shares, tail, reverse=True, mirrored=plan.mirrored)
        dxs = [e * grad for e, grad in zip(es, grads, strict=True)]
        tile.store_dx(dx_ref, x_ref, reversed(dxs))
        return risen((pivot, *plus(behind, lost, whole)), before[0])

    def exact() -> Pair:
        part, apart = plan.block_exact, columns.apart()

        def total(k: jax.Array, carry: Carry) -> Carry:
            return kernel_recurrence.total(apart, first + k * part, carry, x_ref, part)

        def step(k: jax.Array, grad: Carry) -> Carry:
            start: Carry = lax.fori_loop(0, k, total, before)
            result = kernel_recurrence.backward(apart, first + k * part, start, grad, refs, part)
            return start[0], *result

        result: Pair = repeat(size // part, step, grad, reverse=True)[1:]
        return result

    wide = too_wide(tile, columns, first, x_ref, before, pivot)
    result: Pair = lax.cond(wide, exact, plain)
    return result
