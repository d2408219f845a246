"""Sums of exponentials that lose nothing, and the test of where one pivot is enough for them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.fastmath import LOG2E, exp2, log2, multiply_add, reciprocal
from pallas_ops.core.tiles import Ref, span
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Tile

LN2 = math.log(2)
FAR = 1e30  # log2 of what is infinite
FAINT = 2.0**-24  # of its pivot: if a prefix is smaller, the logarithm loses digits
SAFE = -math.log(FAINT)  # how far below the pivot a prefix may lie


def larger(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """Without NaN, which the card drops, so the interpreter has to."""
    return jnp.fmax(x, y) if launch.is_interpreted() else jnp.maximum(x, y)


def finite(x: jax.Array) -> jax.Array:
    return jnp.minimum(larger(x, -HUGE), HUGE)


def largest(x: jax.Array, ndim: int = 1) -> jax.Array:
    """[columns], without NaN, as `larger`."""
    x = jnp.where(x == x, x, -jnp.inf) if launch.is_interpreted() else x
    while x.ndim > ndim:
        x = x.max(axis=0)
    return x


def pair_of(x: jax.Array) -> Pair:
    """A logarithm as pivot and sum."""
    pivot = finite(x)
    return pivot, exp2((x - pivot) * LOG2E)


def initial_pair(columns: Columns, ref: Ref | None) -> Pair:
    """The state before the first position."""
    if ref is None:
        return jnp.full(columns.column.shape, -HUGE), jnp.zeros(columns.column.shape)
    return pair_of(columns.row(ref, 0, -jnp.inf))


def log_of(pair: Pair) -> jax.Array:
    return multiply_add(log2(pair[1]), LN2, pair[0])


def add(before: Any, after: Any) -> Any:
    return tuple(x + y for x, y in zip(before, after, strict=True))


def add_pairs(before: Any, after: Any, *, exp2: Any = jnp.exp2) -> Any:
    """Two log-sum-exps as one; with the library's exp2, since a scan takes no inline assembly."""
    (p, s), (q, t) = before, after
    pivot = jnp.maximum(p, q)
    return pivot, s * exp2((p - pivot) * LOG2E) + t * exp2((q - pivot) * LOG2E)


def shares_of(pair: Pair) -> Pair:
    """Of pairs [n, columns], the largest pivot [columns], and their sums below that one."""
    p, s = pair
    pivot = largest(p)
    return pivot, s * exp2((p - pivot[None]) * LOG2E)


def joined(pair: Pair) -> Pair:
    """The log-sum-exp of pairs [n, columns]."""
    pivot, shares = shares_of(pair)
    return pivot, shares.sum(axis=0)


def _exclusive(before: Any, after: Any) -> Any:
    """The sum of all but the last, and of all; a difference of sums would not be exact."""
    return before[1] + after[0], before[1] + after[1]


def running_sum(
    x: jax.Array, start: jax.Array, *, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Running sums along a tile's positions, from `start` [columns], and the sum of the tile."""
    inner = scan(add, (x,), reverse=True)[0] if reverse else jnp.cumsum(x, axis=0)
    total = x.sum(axis=0)
    if x.ndim == 2:
        return start[None] + inner, total
    before = sum_before(total, reverse=reverse)
    return (start[None] + before)[None] + inner, total.sum(axis=0)


def sum_before(x: jax.Array, *, reverse: bool = False) -> jax.Array:
    """The sum of what stands before each, in a tile."""
    return scan(_exclusive, (jnp.zeros_like(x), x), reverse=reverse)[0]


def over(row: jax.Array, tile: jax.Array) -> jax.Array:
    """[columns] or [groups, columns] with as many axes as a tile."""
    return row.reshape((1,) * (tile.ndim - row.ndim) + row.shape)


def pivot_of(x: jax.Array, before: Pair) -> jax.Array:
    """The largest of a tile and all before it, finite, in the shape of what was before."""
    return jnp.minimum(jnp.maximum(largest(x, before[0].ndim), before[0]), HUGE)


def exponentials(x: jax.Array, before: Pair, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was before the tile, and the tile, both below one pivot."""
    start = before[1] * exp2((before[0] - pivot) * LOG2E)
    return start, exp2((x - over(pivot, x)) * LOG2E)


def total_of(x: jax.Array, before: Pair) -> Pair:
    """The pair after a tile; or the pairs, one for each lane, if there are as many before."""
    pivot = pivot_of(x, before)
    start, e = exponentials(x, before, pivot)
    return pivot, start + sum_of(e, pivot.ndim)


def too_wide(
    tile: Tile, columns: Columns, first: jax.Array, x_ref: Ref, before: Pair, pivot: jax.Array
) -> jax.Array:
    """Whether some prefix may lie too far below the tile's pivot.

    No prefix lies below the first, which is quickly seen. That may be -inf, which masks leave,
    so then it is the smallest of all others that counts.
    """

    def rarely() -> jax.Array:
        x = tile.load_x(x_ref)
        smallest = -largest(jnp.where(x == -jnp.inf, -jnp.inf, -x))
        floor = jnp.minimum(smallest, jnp.where(before[1] == 0, jnp.inf, before[0]))
        return any_of(~(pivot - floor <= SAFE))

    lead = Tile(columns, first, 1).load_x(x_ref).reshape(-1)
    suspect = any_of(~(pivot - jnp.maximum(lead, before[0]) <= SAFE))
    wide: jax.Array = lax.cond(suspect, rarely, lambda: suspect)
    return wide


def any_of(x: jax.Array) -> jax.Array:
    return jnp.where(x, 1, 0).max() > 0


def exclusive_pairs(before: Any, after: Any) -> Any:
    """The log-sum-exp of all but the last, and of all."""
    total = before[2:]
    return (*add_pairs(total, after[:2]), *add_pairs(total, after[2:]))


def at(x: jax.Array, i: int) -> jax.Array:
    """x[i] of a tile, which cannot be indexed."""
    there = span(x.shape[0]) == i % x.shape[0]
    return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0).sum(axis=0)


def sum_of(x: jax.Array, ndim: int = 1) -> jax.Array:
    """[columns]"""
    while x.ndim > ndim:
        x = x.sum(axis=0)
    return x


def fading_sum(before: Any, after: Any) -> Any:
    """T of two stretches, `after` the earlier one; each below its own first o, (p, scale)."""
    (p, scale, grad), (q, own_scale, own) = before, after
    return q, own_scale, own + jnp.exp2((q - p) * LOG2E + (own_scale - scale)) * grad


def exclusive_map(before: Any, after: Any) -> Any:
    """W -> kept W + own, of all but the last, which comes first in a tile, and of all."""
    (_, _, kept, own), (a, b, c, d) = before, after
    return a * kept, a * own + b, c * kept, c * own + d


def inverse(s: jax.Array) -> jax.Array:
    """1 / s, and 0 where nothing has been summed yet."""
    return jnp.where(s == 0, 0.0, reciprocal(s))


def log_scale(s: jax.Array) -> jax.Array:
    """log2(s), finite so that differences are numbers."""
    x = log2(s)
    return jnp.where(x > FAR, FAR, jnp.where(x < -FAR, -FAR, x))


def repeat(
    count: int, step: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False
) -> Any:
    """step(count - 1, ... step(0, carry)), or backwards; no loop if `count` is 1."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(0, count, lambda k, y: step(count - 1 - k if reverse else k, y), carry)
