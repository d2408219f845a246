"""Steps through positions, each lane through a stretch of a column: the variant `recurrence`.

It needs no test and is exact for every range: pivot and sum follow every step. The other variant
steps through tiles that one pivot does not do for, with several stretches to a column; those are
joined by a scan of what each is as a whole. All steps are loaded ahead.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.tiles import Ref
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.sums import (
    add_pairs,
    at,
    exclusive_map,
    exclusive_pairs,
    finite,
    inverse,
    log_of,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Rows, Steps

Refs = tuple[Ref, Ref, Ref | None]  # x, do, dx; nothing to store without dx


def forward(
    columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, out_ref: Ref, size: int
) -> Pair:
    """The positions from `first` on, and the pair after them."""
    tile = _tile(columns, first, size)
    xs = tile.load_x(x_ref)
    pair, after = _stretches(xs, before, columns.plan.mirrored)
    pairs = list(itertools.accumulate(xs, lambda pair, x: advance(pair, x)[0], initial=pair))[1:]
    tile.store(out_ref, [log_of(pair) for pair in pairs])
    if len(xs) == size:
        return pairs[-1][0].reshape(-1), pairs[-1][1].reshape(-1)
    return after


def total(columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, size: int) -> Pair:
    """The pair after the positions from `first` on."""
    xs = _tile(columns, first, size).load_x(x_ref)
    return _stretches(xs, before, columns.plan.mirrored)[1]


def backward(
    columns: Columns, first: jax.Array, before: Pair, behind: jax.Array, refs: Refs, size: int
) -> jax.Array:
    """dx from `first` on; the gradient of the state before, from `behind`, that after."""
    x_ref, do_ref, dx_ref = refs
    tile = _tile(columns, first, size)
    xs, dos = tile.load_x(x_ref), tile.load(do_ref)
    mirrored = columns.plan.mirrored
    pair, _ = _stretches(xs, before, mirrored)
    weights, kept = [], []  # exp(x_i - o_i), exp(o_{i-1} - o_i)
    for x in xs:
        pair, fade, weight = keep(pair, x)
        kept.append(fade)
        weights.append(weight)
    factor, own = jnp.ones_like(pair[1]), jnp.zeros_like(pair[1])
    for fade, do in zip(reversed(kept), reversed(dos), strict=True):
        factor, own = fade * factor, fade * (own + do)
    one, zero = jnp.ones_like(own), jnp.zeros_like(own)
    own_factor, add, factor, own = scan(
        exclusive_map, (one, zero, factor, own), reverse=not mirrored
    )

    def steps(grad: jax.Array) -> Iterator[jax.Array]:
        for weight, fade, do in zip(reversed(weights), reversed(kept), reversed(dos), strict=True):
            grad = grad + do
            yield weight * grad
            grad = fade * grad

    tile.store_dx(dx_ref, x_ref, steps(own_factor * behind[None] + add))
    return at(factor, -1 if mirrored else 0) * behind + at(own, -1 if mirrored else 0)


def _tile(columns: Columns, first: jax.Array, size: int) -> Steps | Rows:
    plan = columns.plan
    if plan.s.last and plan.c.variant == "parallel":
        return Steps(columns, first, size, plan.groups(size, columns=1))
    return Rows(columns, first, size, min(size, plan.stretches))


def _stretches(xs: list[jax.Array], before: Pair, mirrored: bool) -> tuple[Pair, Pair]:
    """The pairs before each stretch [stretches, columns], and after the last [columns]."""
    pivot = functools.reduce(jnp.maximum, map(finite, xs))
    s = functools.reduce(jnp.add, (exp2((x - pivot) * LOG2E) for x in xs))
    nothing = jnp.full_like(pivot, -HUGE), jnp.zeros_like(s)
    p_before, s_before, p_all, s_all = scan(exclusive_pairs, (*nothing, pivot, s), reverse=mirrored)
    last = 0 if mirrored else -1
    p, s = (x[None] for x in before)
    start: Pair = add_pairs((p, s), (p_before, s_before), exp2=exp2)
    after: Pair = add_pairs(before, (at(p_all, last), at(s_all, last)), exp2=exp2)
    return start, after


def advance(pair: Pair, x: jax.Array) -> tuple[Pair, jax.Array, jax.Array]:
    """The pair with x in it, and what the old sum and x were multiplied by."""
    pivot = jnp.maximum(pair[0], finite(x))
    fade = exp2((pair[0] - pivot) * LOG2E)
    e = exp2((x - pivot) * LOG2E)
    return (pivot, pair[1] * fade + e), fade, e


def keep(pair: Pair, x: jax.Array) -> tuple[Pair, jax.Array, jax.Array]:
    """The pair with x in it, exp(o_before - o) and exp(x - o)."""
    after, fade, e = advance(pair, x)
    share = inverse(after[1])
    return after, jnp.where(pair[1] == jnp.inf, 1.0, fade * pair[1]) * share, e * share
