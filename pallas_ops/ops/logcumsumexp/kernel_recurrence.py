"""Steps through positions, each lane through a stretch of a column: the variant `recurrence`.

It needs no test and is exact for every range: pivot and sum follow every step. The other variant
steps through tiles of columns that one pivot does not do for, with several stretches to a column;
those are joined by a scan of what each is as a whole. All rows are loaded ahead.
"""

import functools

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
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Tile

Refs = tuple[Ref, Ref, Ref | None]  # x, do, dx; nothing to store without dx


def forward(
    columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, out_ref: Ref, size: int
) -> Pair:
    """The positions from `first` on, and the pair after them."""
    rows = _rows(columns, first, size)
    xs = [row.load_x(x_ref) for row in rows]
    pair, after = _stretches(xs, before)
    for row, x in zip(rows, xs, strict=True):
        pair, _, _ = advance(pair, x)
        row.store(out_ref, log_of(pair))
    if len(rows) == size:
        return pair[0].reshape(-1), pair[1].reshape(-1)
    return after


def total(columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, size: int) -> Pair:
    """The pair after the positions from `first` on."""
    return _stretches([row.load_x(x_ref) for row in _rows(columns, first, size)], before)[1]


def backward(
    columns: Columns, first: jax.Array, before: Pair, behind: jax.Array, refs: Refs, size: int
) -> jax.Array:
    """dx from `first` on; the gradient of the state before, from `behind`, that after."""
    x_ref, do_ref, dx_ref = refs
    rows = _rows(columns, first, size)
    xs, dos = [row.load_x(x_ref) for row in rows], [row.load(do_ref) for row in rows]
    pair, _ = _stretches(xs, before)
    weights, kept = [], []  # exp(x_i - o_i), exp(o_{i-1} - o_i)
    for x in xs:
        pair, fade, weight = keep(pair, x)
        kept.append(fade)
        weights.append(weight)
    factor, own = jnp.ones_like(pair[1]), jnp.zeros_like(pair[1])
    for fade, do in zip(reversed(kept), reversed(dos), strict=True):
        factor, own = fade * factor, fade * (own + do)
    one, zero = jnp.ones_like(own), jnp.zeros_like(own)
    own_factor, add, factor, own = scan(exclusive_map, (one, zero, factor, own), reverse=True)
    grad = own_factor * behind[None] + add
    for row, weight, fade, do in reversed(list(zip(rows, weights, kept, dos, strict=True))):
        grad = grad + do
        row.store_dx(dx_ref, x_ref, weight * grad)
        grad = fade * grad
    return at(factor, 0) * behind + at(own, 0)


def _rows(columns: Columns, first: jax.Array, size: int) -> list[Tile]:
    """[stretches, columns] for each step."""
    stretches = min(size, columns.plan.stretches)
    steps = size // stretches
    return [Tile(columns, first + k, stretches, every=steps) for k in range(steps)]


def _stretches(xs: list[jax.Array], before: Pair) -> tuple[Pair, Pair]:
    """The pairs before each stretch [stretches, columns], and after the last [columns]."""
    pivot = functools.reduce(jnp.maximum, map(finite, xs))
    s = functools.reduce(jnp.add, (exp2((x - pivot) * LOG2E) for x in xs))
    nothing = jnp.full_like(pivot, -HUGE), jnp.zeros_like(s)
    p_before, s_before, p_all, s_all = scan(exclusive_pairs, (*nothing, pivot, s))
    p, s = (x[None] for x in before)
    start: Pair = add_pairs((p, s), (p_before, s_before), exp2=exp2)
    after: Pair = add_pairs(before, (at(p_all, -1), at(s_all, -1)), exp2=exp2)
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
