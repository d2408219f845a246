"""An axis in several parts, where its columns alone would not fill the card.

A first launch sums each part on its own. A second goes through the parts, each of which first joins
the sums of all before it, or, going backward, the gradients of all behind it.
"""

from collections.abc import Callable
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
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.logcumsumexp.sums import add_pairs, joined, log_scale, total_of
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Plan, Tile

PAIRS = 512  # that a warp loads at a time


def totals(plan: Plan, view: jax.Array) -> list[jax.Array]:
    """The log-sum-exp of each part, as pairs [parts, C]."""
    return launch(
        partial(_totals_kernel, plan=plan),
        view,
        name="logcumsumexp_totals",
        grid=(plan.column_blocks, plan.parts, plan.s.b),
        in_specs=[plan.spec(plan.s.n)],
        out_specs=[plan.spec(plan.parts)] * 2,
        out_shape=[plan.shape(plan.parts)] * 2,
        num_warps=plan.c.num_warps,
    )


def _totals_kernel(x_ref: Ref, p_ref: Ref, s_ref: Ref, *, plan: Plan) -> None:
    """One part of x [N, C], as a pair [parts, C]; lanes sum on their own, and join at the end."""
    columns, i = Columns(plan, pl.program_id(0)), pl.program_id(1)
    first, stop = plan.part(i)

    def tile(t: jax.Array) -> jax.Array:
        return Tile(columns, t * plan.c.block_n, plan.c.block_n, grouped=True).load_x(x_ref)

    def step(t: jax.Array, pair: Pair) -> Pair:
        return total_of(tile(pipelined(t, plan.c.num_stages)), pair)

    shape = jax.eval_shape(tile, first).shape[1:]
    pair = lax.fori_loop(first, stop, step, (jnp.full(shape, -HUGE), jnp.zeros(shape)))
    columns.put_pair((p_ref, s_ref), i, joined(pair) if len(shape) > 1 else pair)


def before(columns: Columns, i: jax.Array, refs: tuple[Ref, Ref], initial: Pair) -> Pair:
    """The log-sum-exp of the parts before the i-th, and of what was before them all."""

    def step(part: jax.Array, pair: Pair) -> Pair:
        there = (part < i) & columns.inside[None]
        at = [ref.at[columns.index(part)] for ref in refs]
        p, s = (plgpu.load(x, mask=there, other=y) for x, y in zip(at, (-HUGE, 0.0), strict=True))
        both: Pair = add_pairs(pair, (p, s), exp2=exp2)
        return both

    nothing = -HUGE, 0.0
    pair: Pair = add_pairs(initial, joined(_fold(columns.plan, 0, i, step, nothing)), exp2=exp2)
    return pair


def behind(
    columns: Columns, i: jax.Array, sum_ref: Ref, marks: tuple[Ref, Ref], dfinal_ref: Ref
) -> jax.Array:
    """The gradient of the state after the i-th part.

    sum_ref [parts, C] has that of the state before each part, from that part alone; `dfinal_ref`
    that of the last. It fades by exp(o_j - o_k) on its way from before part k to before j = i + 1.
    """
    plan = columns.plan
    p, s = (x[None] for x in columns.pair(marks, plan.start(i + 1)))
    scale, final = log_scale(s), columns.row(dfinal_ref, 0)[None]

    def step(part: jax.Array, grad: jax.Array) -> jax.Array:
        there = (part > i) & (part <= plan.parts) & columns.inside[None]
        index = columns.index(plan.start(jnp.minimum(part, plan.parts)))
        q, t = (plgpu.load(ref.at[index], mask=there, other=1.0) for ref in marks)
        given = there & (part < plan.parts)
        own = plgpu.load(sum_ref.at[columns.index(part)], mask=given, other=0.0)
        own = jnp.where(part < plan.parts, own, final)
        fade = exp2((p - q) * LOG2E + (scale - log_scale(t)))
        fade = jnp.where((s == 0) | ((s == jnp.inf) & (t == jnp.inf)), 0.0, fade)
        return grad + jnp.where(there, fade * own, 0.0)

    grads = _fold(plan, i + 1, plan.parts + 1, step, 0.0)
    total: jax.Array = grads.sum(axis=0)
    return total


def _fold(
    plan: Plan, first: Any, stop: Any, step: Callable[[jax.Array, Any], Any], carry: Any
) -> Any:
    """`step` of [rows, 1] parts at a time, of which some may not be from `first` to `stop`."""
    rows = min(power_of_two(plan.parts + 1), max(1, PAIRS * plan.c.num_warps // plan.c.block_c))
    carry = jax.tree.map(lambda x: jnp.full((rows, plan.c.block_c), x), carry)

    def some(k: Any, carry: Any) -> Any:
        return step(k * rows + span(rows)[:, None], carry)

    if rows > plan.parts:
        return some(0, carry)

    def loop(k: jax.Array, carry: Any) -> Any:
        return some(pipelined(k, plan.c.num_stages), carry)

    return lax.fori_loop(first // rows, pl.cdiv(stop, rows), loop, carry)
