"""Sums of exponentials that lose nothing, and the test of where one pivot is enough for them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.fastmath import LOG2E, exp2, larger, log2, multiply_add, reciprocal
from pallas_ops.core.tiles import Ref, span
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Carry, Columns, Lost, Pair, Steps, Tile

LN2 = math.log(2)
FAINT = 2.0**-16  # of its pivot: if a prefix is smaller, its logarithm loses digits
SAFE = -math.log(FAINT)  # how far below the pivot a prefix may lie


def finite(x: jax.Array) -> jax.Array:
    return jnp.minimum(larger(x, -HUGE), HUGE)


def largest(x: jax.Array) -> jax.Array:
    """[columns], without NaN, which the card drops, so the interpreter has to."""
    return (jnp.where(x == x, x, -jnp.inf) if launch.is_interpreted() else x).max(axis=0)


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


def add_pairs(before: Any, after: Any, *, exp2: Any = jnp.exp2) -> Any:
    """Two log-sum-exps as one; with the library's exp2, since a scan takes no inline assembly."""
    (p, s), (q, t) = before, after
    pivot = jnp.maximum(p, q)
    return pivot, s * exp2((p - pivot) * LOG2E) + t * exp2((q - pivot) * LOG2E)


def shares_of(pair: Pair) -> Pair:
    """Of pairs [n, columns], the largest pivot [columns], and their sums below that one."""
    p, s = pair
    pivot = largest(p)
    return pivot, below((p, s), pivot[None])


def joined(pair: Pair) -> Pair:
    """The log-sum-exp of pairs [n, columns]."""
    pivot, shares = shares_of(pair)
    return pivot, shares.sum(axis=0)


def carried(pair: Pair) -> Carry:
    return *pair, jnp.zeros_like(pair[1])


def raised(x: jax.Array, pivot: jax.Array) -> jax.Array:
    """The pivot, or x where that is larger by more than 1.

    So from tile to tile a pivot stays what it is, and what is below it needs no factor, or one of
    at most 1 / e: the errors of many factors would add up.
    """
    return jnp.where(x > pivot + 1, jnp.minimum(x, HUGE), pivot)


def plus(s: jax.Array, lost: Lost, x: jax.Array) -> tuple[jax.Array, Lost]:
    """s + x, and what that loses, with what s had lost: many small x may come to something.

    Where |x| > |s| what it loses is known to an ulp of x only: once, if sums grow; and never more
    than that x's own rounding. Where `lost` is None it is let go.
    """
    if lost is None:
        return s + x, None
    x = x + lost
    total = s + x
    return total, jnp.where(jnp.abs(total) < jnp.inf, x - (total - s), 0.0)


def risen(grad: Carry, pivot: jax.Array) -> Pair:
    """The gradient of the sum below another pivot, and what it has lost."""
    factor = exp2((pivot - grad[0]) * LOG2E)
    return grad[1] * factor, grad[2] * factor


def sunk(carry: Carry, pivot: jax.Array) -> tuple[jax.Array, Lost]:
    """The sum below another pivot, and what it has lost."""
    fade = exp2((carry[0] - pivot) * LOG2E)
    return carry[1] * fade, None if carry[2] is None else carry[2] * fade


def add_total(carry: Carry, pair: Pair) -> Carry:
    """A carry with a pair in it, whose pivot is not below the carry's."""
    return pair[0], *plus(*sunk(carry, pair[0]), pair[1])


def _exclusive(before: Any, after: Any) -> Any:
    """The sum of all but the last, and of all; a difference of sums would not be exact."""
    return before[1] + after[0], before[1] + after[1]


def running(
    xs: list[jax.Array], before: Carry, top: jax.Array | None = None
) -> tuple[list[jax.Array], Carry]:
    """Each group's own running sums, and what there is after them, below whose pivot they are."""
    pivot = raised(functools.reduce(larger, xs) if top is None else top, before[0])
    es = exponentials(xs, pivot)
    sums = list(itertools.accumulate(es))
    count = min(8, len(es))
    total = total_of(es[count:], (count, sums[count - 1]))
    return sums, add_total(before, (pivot, total))


def total_of(xs: Iterable[jax.Array], *known: tuple[int, jax.Array]) -> jax.Array:
    """The sum of a power of two of them, as a tree: fewer roundings. Each is added at once.

    That of the first ones may be `known`, and how many they were.
    """
    sums = list(known)
    for x in xs:
        sums.append((1, x))
        while len(sums) > 1 and sums[-2][0] == sums[-1][0]:
            (count, total), (_, last) = sums[-2:]
            sums[-2:] = [(2 * count, total + last)]
    ((_, total),) = sums
    return total


def running_sums(
    xs: list[jax.Array], start: jax.Array, *, reverse: bool = False, mirrored: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Of all groups, from `start` [columns], and the sum of them."""
    xs = xs[::-1] if reverse else xs
    totals = total_of(xs)
    before = start[None] + sum_before(totals, reverse=reverse != mirrored)
    sums = list(itertools.accumulate(xs, initial=before))[1:]
    return sums[::-1] if reverse else sums, totals.sum(axis=0)


def sum_before(x: jax.Array, *, reverse: bool = False) -> jax.Array:
    """The sum of what stands before each, in a tile."""
    return scan(_exclusive, (jnp.zeros_like(x), x), reverse=reverse)[0]


def pivot_of(xs: list[jax.Array], before: Carry) -> jax.Array:
    """One [columns] for all groups and all before them."""
    return raised(largest(functools.reduce(larger, xs)), before[0])


def below(pair: Pair | Carry, pivot: jax.Array) -> jax.Array:
    """The sum below another pivot."""
    return pair[1] * exp2((pair[0] - pivot) * LOG2E)


def exponentials(xs: list[jax.Array], pivot: jax.Array) -> list[jax.Array]:
    return [exp2((x - pivot) * LOG2E) for x in xs]


def too_wide(
    tile: Steps, columns: Columns, first: jax.Array, x_ref: Ref, before: Carry, pivot: jax.Array
) -> jax.Array:
    """Whether some prefix may lie too far below the tile's pivot.

    No prefix lies below the first, which is quickly seen. That may be -inf, which masks leave,
    so then it is the smallest of all others that counts.
    """

    def rarely() -> jax.Array:
        xs = [jnp.where(x == -jnp.inf, -jnp.inf, -x) for x in tile.load_x(x_ref)]
        smallest = -largest(functools.reduce(larger, xs))
        floor = jnp.minimum(smallest, jnp.where(before[1] == 0, jnp.inf, before[0]))
        return any_of(~(pivot - floor <= SAFE))

    lead = Tile(columns, first, 1).load_x(x_ref).reshape(-1)
    suspect = any_of(~(pivot - jnp.maximum(lead, before[0]) <= SAFE))
    wide: jax.Array = lax.cond(suspect, rarely, lambda: suspect)
    return wide


def any_of(x: jax.Array) -> jax.Array:
    """Reduced over 32 copies as well: then the compiler knows that all lanes of a warp agree."""
    return jnp.broadcast_to(jnp.where(x, 1, 0).max(), (32,)).max() > 0


def exclusive_pairs(before: Any, after: Any) -> Any:
    """The log-sum-exp of all but the last, and of all."""
    total = before[2:]
    return (*add_pairs(total, after[:2]), *add_pairs(total, after[2:]))


def at(x: jax.Array, i: int) -> jax.Array:
    """x[i] of a tile, which cannot be indexed."""
    there = span(x.shape[0]) == i % x.shape[0]
    return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0).sum(axis=0)


def exclusive_map(before: Any, after: Any) -> Any:
    """U -> factor U + own, of all but what was met last, and of all."""
    (_, _, factor, own), (a, b, c, d) = before, after
    return a * factor, a * own + b, c * factor, c * own + d


def inverse(s: jax.Array) -> jax.Array:
    """1 / s, and 0 where nothing has been summed yet."""
    return jnp.where(s == 0, 0.0, reciprocal(s))


def repeat(
    count: int, step: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False
) -> Any:
    """step(count - 1, ... step(0, carry)), or backwards; no loop if `count` is 1."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(0, count, lambda k, y: step(count - 1 - k if reverse else k, y), carry)
