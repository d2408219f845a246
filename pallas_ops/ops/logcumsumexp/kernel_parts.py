"""An axis in several parts, where its columns alone would not fill the card.

Each program sums its part on its own, tells what that came to, and waits for what all before it
told; going backward, all behind it. Then it goes through its part again, which is in the cache. The
last of a band of parts to start tells what the band came to: of p parts each reads some 2 sqrt(p).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.messages import tell, told
from pallas_ops.core.tiles import Ref, power_of_two, span
from pallas_ops.ops.logcumsumexp.plan import Plan
from pallas_ops.ops.logcumsumexp.sums import add_pairs, carried, inverse, joined, running
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Carry, Columns, Pair, Steps

NOTHING = -HUGE, 0.0  # as a pair


def messages(plan: Plan, words: int) -> dict[str, Any]:
    """To launch with, where there are parts: `words` for every part and every band."""
    if plan.parts == 1:
        return {}
    rows = plan.parts + _bands(plan)
    word = jax.ShapeDtypeStruct(plan.shape(rows).shape, jnp.int32)
    return {"messages": [word] * words, "message_spec": plan.spec(rows)}


def _size(plan: Plan) -> int:
    """Parts of a band: about as many as there are bands."""
    return power_of_two(math.isqrt(plan.parts))


def _bands(plan: Plan) -> int:
    return pl.cdiv(plan.parts, _size(plan))


def _rows(plan: Plan, count: int) -> jax.Array:
    """[k, 1], at least `count` of them, and enough for all threads to have a column's."""
    least = plan.c.num_warps * 32 // plan.c.block_c
    return span(power_of_two(max(count, least)))[:, None]


def before(
    columns: Columns, i: jax.Array, words: tuple[Ref, ...], own: Pair, initial: Pair
) -> Pair:
    """The log-sum-exp of the parts before the i-th, which told its `own`, and of all before."""
    plan = columns.plan
    band, first = _band(plan, i)

    def sum_of(first: Any, count: int, stop: jax.Array) -> Pair:
        rows = first + _rows(plan, count)
        p, s = told(words, columns.index(rows), columns.inside[None] & (rows < stop), NOTHING)
        return joined((p, s))

    siblings = sum_of(first, _size(plan), i)

    @pl.when(i == first + _size(plan) - 1)
    def _() -> None:
        put(columns, words, plan.parts + band, add_pairs(siblings, own, exp2=exp2))

    bands = sum_of(plan.parts, _bands(plan), plan.parts + band)
    result: Pair = add_pairs(add_pairs(initial, bands, exp2=exp2), siblings, exp2=exp2)
    return result


def _band(plan: Plan, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The i-th part's band, and its first part."""
    band = lax.div(i, jnp.full_like(i, _size(plan)))
    return band, band * _size(plan)


def total(columns: Columns, i: jax.Array, x_ref: Ref) -> Pair:
    """The log-sum-exp of the i-th part; lanes sum on their own, and join at the end."""
    size = columns.plan.c.block_n
    groups = columns.plan.groups(size, columns=2)

    def step(t: jax.Array, carry: Carry) -> Carry:
        return running(Steps(columns, t * size, size, groups).load_x(x_ref), carry)[1]

    shape = groups, columns.plan.c.block_c
    nothing = carried((jnp.full(shape, -HUGE), jnp.zeros(shape)))
    return joined(columns.plan.through(i, step, nothing)[:2])


def put(
    columns: Columns, words: tuple[Ref, ...], row: jax.Array, values: tuple[jax.Array, ...]
) -> None:
    for ref, value in zip(words, values, strict=True):
        tell(ref, columns.at(row), value, columns.inside)


def behind(
    columns: Columns,
    i: jax.Array,
    words: tuple[Ref, ...],
    marks: tuple[Ref, Ref],
    own: jax.Array,
    dfinal_ref: Ref,
) -> jax.Array:
    """The gradient of the sum after the i-th part.

    `own` [columns], which it told, is the gradient of the sum before it, from the part alone. One
    takes a factor exp(p_j - p_k) on its way from before part k to before part j.
    """
    plan = columns.plan
    band, first = _band(plan, i)

    def sum_of(row: Any, part: jax.Array, there: jax.Array) -> jax.Array:
        """Of rows [k, 1], each the gradient of the sum before a part."""
        fade = _fade(columns, marks[0], i + 1, jnp.where(there, part, i + 1))
        mask = columns.inside[None] & there
        (grads,) = told(words, columns.index(row), mask, (0.0,))
        return jnp.where(mask, fade * grads, 0.0).sum(axis=0)

    row = first + _rows(plan, _size(plan))
    grad = sum_of(row, row, (row > i) & (row < first + _size(plan)) & (row < plan.parts))

    @pl.when((i == first) & (band > 0))
    def _() -> None:
        fade = _fade(columns, marks[0], i, jnp.broadcast_to(i + 1, (1, 1)))[0]
        put(columns, words, plan.parts + band, (own + fade * grad,))

    row = _rows(plan, _bands(plan))
    grad += sum_of(plan.parts + row, row * _size(plan), (row > band) & (row < _bands(plan)))
    fade = _fade(columns, marks[0], i + 1, jnp.full((1, 1), plan.parts))[0]
    return grad + fade * last(columns, marks, dfinal_ref)


def last(columns: Columns, marks: tuple[Ref, Ref], dfinal_ref: Ref) -> jax.Array:
    """The gradient of the last sum, from that of its logarithm."""
    return columns.row(dfinal_ref, 0) * inverse(columns.row(marks[1], columns.plan.tiles))


def _fade(columns: Columns, mark_p: Ref, to: jax.Array, part: jax.Array) -> jax.Array:
    """[k, columns]: from before each `part` [k, 1] to before part `to`."""
    p = columns.row(mark_p, columns.plan.start(to))[None]
    index = columns.index(columns.plan.start(part))
    mask = jnp.broadcast_to(columns.inside[None], jnp.broadcast_shapes(part.shape, p.shape))
    return exp2((p - plgpu.load(mark_p.at[index], mask=mask, other=0.0)) * LOG2E)
