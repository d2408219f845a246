"""Steps through positions, each lane through a stretch of a column: the variant `recurrence`.

It needs no test and is exact for every range: pivot and sum follow every step. The other variant
steps through tiles that one pivot does not do for, with several stretches to a column; those are
joined by a scan of what each is as a whole. All steps are loaded ahead.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.tiles import Ref
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.sums import (
    add_pairs,
    add_total,
    at,
    exclusive_map,
    exclusive_pairs,
    inverse,
    log_of,
    plus,
    raised,
    risen,
    total_of,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Carry, Columns, Pair, Rows, Steps

Refs = tuple[Ref, Ref, Ref | None]  # x, do, dx; nothing to store without dx
Back = tuple[jax.Array, jax.Array, jax.Array]  # a step's factor of U, exp(x - p), do / s


def forward(
    columns: Columns, first: jax.Array, before: Carry, x_ref: Ref, out_ref: Ref, size: int
) -> Carry:
    """The positions from `first` on, and the sum after them."""
    tile = _tile(columns, first, size)
    xs = tile.load_x(x_ref)
    pair, after = _stretches(xs, before, columns.plan.mirrored)
    tile.store(out_ref, [log_of(pair) for pair in running_pairs(xs, pair, before[0][None])])
    return after


def total(columns: Columns, first: jax.Array, before: Carry, x_ref: Ref, size: int) -> Carry:
    """The sum after the positions from `first` on."""
    xs = _tile(columns, first, size).load_x(x_ref)
    return _stretches(xs, before, columns.plan.mirrored)[1]


def backward(
    columns: Columns, first: jax.Array, before: Carry, grad: Carry, refs: Refs, size: int
) -> Pair:
    """dx from `first` on; the gradient of the sum before, from that of the sum after."""
    x_ref, do_ref, dx_ref = refs
    tile = _tile(columns, first, size)
    xs, dos = tile.load_x(x_ref), tile.load(do_ref)
    mirrored = columns.plan.mirrored
    pair, after = _stretches(xs, before, mirrored)
    _, factor, own, steps = steps_back(xs, dos, pair, before[0][None])
    one, zero = jnp.ones_like(own), jnp.zeros_like(own)
    own_factor, add, factor, own = scan(
        exclusive_map, (one, zero, factor, own), reverse=not mirrored
    )
    behind, lost = risen(grad, after[0])

    tile.store_dx(dx_ref, x_ref, dx_back(steps, own_factor * behind[None] + add))
    factor, own = (at(y, -1 if mirrored else 0) for y in (factor, own))
    return plus(factor * behind, factor * lost, own)


def _tile(columns: Columns, first: jax.Array, size: int) -> Steps | Rows:
    plan = columns.plan
    if plan.s.last and plan.c.variant == "parallel":
        return Steps(columns, first, size, plan.groups(size, columns=1))
    return Rows(columns, first, size, min(size, plan.stretches))


def _stretches(xs: list[jax.Array], before: Carry, mirrored: bool) -> tuple[Pair, Carry]:
    """The pairs before each stretch [stretches, columns], and the sum after the last [columns]."""
    ahead = before[0][None], before[1][None]
    pivot = functools.reduce(jnp.maximum, (raised(x, ahead[0]) for x in xs))
    s = total_of(exp2((x - pivot) * LOG2E) for x in xs)
    nothing = jnp.full_like(pivot, -HUGE), jnp.zeros_like(s)
    p_before, s_before, p_all, s_all = scan(exclusive_pairs, (*nothing, pivot, s), reverse=mirrored)
    last = 0 if mirrored else -1
    start: Pair = add_pairs(ahead, (p_before, s_before), exp2=exp2)
    return start, add_total(before, (at(p_all, last), at(s_all, last)))


def running_pairs(xs: list[jax.Array], pair: Pair, least: jax.Array) -> list[Pair]:
    """The pair after each of xs, with pivots of at least this."""
    return list(itertools.accumulate(xs, lambda y, x: _advance(y, x, least)[0], initial=pair))[1:]


def steps_back(
    xs: Iterable[jax.Array], dos: Iterable[jax.Array], pair: Pair, least: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, list[Back]]:
    """The pivot after xs; factor and own of U before them, factor * U + own; for `dx_back`."""
    factor, own, steps = jnp.ones_like(pair[1]), jnp.zeros_like(pair[1]), []
    for x, do in zip(xs, dos, strict=True):
        pair, fade, e = _advance(pair, x, least)
        share = do * inverse(pair[1])
        factor = factor * fade
        own = own + factor * share
        steps.append((fade, e, share))
    return pair[0], factor, own, steps[::-1]


def dx_back(steps: list[Back], grad: jax.Array) -> Iterator[jax.Array]:
    """dx, the last first, from the gradient of the sum after them."""
    for fade, e, share in steps:
        grad = grad + share
        yield e * grad
        grad = fade * grad


def _advance(pair: Pair, x: jax.Array, least: jax.Array) -> tuple[Pair, jax.Array, jax.Array]:
    """The pair with x in it, and what the old sum and x were multiplied by."""
    pivot = jnp.maximum(pair[0], raised(x, least))
    fade = exp2((pair[0] - pivot) * LOG2E)
    e = exp2((x - pivot) * LOG2E)
    return (pivot, pair[1] * fade + e), fade, e
