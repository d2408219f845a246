"""What a program of logcumsumexp loads, and the state that it carries from tile to tile.

The state is that of `reference.State`, with a finite pivot: exact however large the numbers are.
Values of a range and column are arrays [ranges, columns]; those of a tile are
[steps, ranges, groups, columns].
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core import fastmath, launch
from pallas_ops.core.fastmath import LOG2E, exp2, fmax, log2, multiply_add, reciprocal
from pallas_ops.core.tiles import HUGE, Ref
from pallas_ops.ops.logcumsumexp.config import Plan, num_steps
from pallas_ops.ops.logcumsumexp.reference import State, clamp
from pallas_ops.scan.running import GROUPS, STEPS
from pallas_ops.scan.segments import Pair
from pallas_ops.scan.tile import Ranges, Tile, loop, per_range

LN2 = math.log(2)


def rescaled(state: State, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Total and compensation term, relative to another pivot."""
    factor = exp2((state.pivot - pivot) * LOG2E)
    return state.total * factor, state.error * factor


def state_of(pair: Pair) -> State:
    return State(*pair, jnp.zeros_like(pair[1]))


def empty(shape: tuple[int, ...]) -> State:
    """The state before anything was added."""
    zeros = jnp.zeros(shape, jnp.float32)
    return State(zeros - HUGE, zeros, zeros)


def pair_of(x: jax.Array) -> Pair:
    """A logarithm as pivot and total."""
    pivot = finite(x)
    return pivot, exp2((x - pivot) * LOG2E)


def log_of(pivot: jax.Array, total: jax.Array) -> jax.Array:
    return multiply_add(log2(total), LN2, jnp.broadcast_to(pivot, total.shape))


def rebase(total: jax.Array, pivot: jax.Array, new_pivot: jax.Array) -> jax.Array:
    """A total relative to a new pivot. (The gradient of a total takes the inverse factor.)"""
    return total * exp2((pivot - new_pivot) * LOG2E)


def exponentials(x: jax.Array, pivot: jax.Array) -> jax.Array:
    """exp(x - pivot) of a tile, whose pivots are [ranges, columns]."""
    return exp2((x - per_range(pivot)) * LOG2E)


def compensated(total: jax.Array, error: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """total + x and the new compensation term, by Kahan's algorithm.

    Where |x| > |total| the term has an error of an ulp of x; in growing sums this happens once.
    """
    x = x + error
    after = total + x
    return after, jnp.where(jnp.abs(after) < jnp.inf, x - (after - total), 0.0)


def raised(x: jax.Array, pivot: jax.Array) -> jax.Array:
    """The pivot, or x where that is larger by more than 1 (`reference._sum` says why)."""
    return jnp.where(x > pivot + 1, jnp.minimum(x, HUGE), pivot)


def finite(x: jax.Array) -> jax.Array:
    """Infinities as the largest finite numbers; NaN as -HUGE (`reference.finite` keeps it)."""
    return jnp.minimum(fmax(x, -HUGE), HUGE)


def largest_in_lane(x: jax.Array) -> jax.Array:
    """The largest of each lane's steps [ranges, groups, columns]; NaN is ignored, as on a GPU."""
    return (jnp.where(x == x, x, -jnp.inf) if launch.is_interpreted() else x).max(axis=STEPS)


def largest(x: jax.Array) -> jax.Array:
    return largest_in_lane(x).max(axis=GROUPS - 1)


def sum_of(x: jax.Array) -> jax.Array:
    """The sum of a tile for each range and column."""
    return x.sum(axis=STEPS).sum(axis=GROUPS - 1)


def share(do: jax.Array, total: jax.Array) -> jax.Array:
    """do / total; 0 where nothing has been summed yet, even if do is NaN there."""
    return jnp.where(total == 0, 0.0, do * reciprocal(total))


class Segments(Ranges):
    """One program's segments, and tiles of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.c = plan, plan.c
        super().__init__(plan.view)

    def tile(self, first: Any, size: int | None = None) -> Tile:
        """`size` positions; the variant `recurrence` has all of a column's in one lane."""
        size = size or self.c.block_n
        whole = self.view.s.c > 1 and self.c.variant == "recurrence"
        return Tile(self, first, size, size if whole else num_steps(self.view.s, self.c, size))

    def load_x(self, tile: Tile, ref: Ref) -> jax.Array:
        """x in float32, clipped; -inf beyond the range."""
        x = clamp(tile.load(ref, -jnp.inf), self.plan.clip)
        if self.plan.clip is None or tile.mask is None:
            return x
        return jnp.where(tile.mask, x, -jnp.inf)

    def store_dx(self, tile: Tile, ref: Ref, x_ref: Ref, dx: jax.Array) -> None:
        """dx is 0 where x was clipped."""
        if self.plan.clip is not None:
            dx = jnp.where(jnp.abs(tile.load(x_ref)) > self.plan.clip, 0.0, dx)
        tile.store(ref, dx)

    def place(self, tile: Any) -> Any:
        """Where the state before a tile, counted in the order of the sum, is saved."""
        return self.plan.num_tiles - 1 - tile if self.view.reverse else tile

    def loop(self, step: Callable[[Any, State], State], state: State) -> State:
        """`step` of each tile of a segment."""
        return loop(self.view.tiles, step, state, self.c.num_stages)


class Saved:
    """The states that the forward pass saved: before each tile, and after the last one."""

    def __init__(self, ranges: Segments, p_ref: Ref, s_ref: Ref, *last_refs: Ref) -> None:
        self.ranges, self.refs = ranges, (p_ref, s_ref)
        p, s = (ranges.load(ref, 0) for ref in last_refs)
        self.last: Pair = p, s

    def before(self, tile: Any) -> Pair:
        """The state before a tile of the axis; beyond its end, the last one."""
        view, place = self.ranges.view, self.ranges.place(tile)
        there = tile < self.ranges.plan.num_tiles if view.s.n % view.s.size else None
        p, s = (self.ranges.load(ref, place, there) for ref in self.refs)
        if self.ranges.c.num_stages > 1:
            p, s = fastmath.pinned(p), fastmath.pinned(s)
        if there is not None:
            p, s = (jnp.where(there, *xs) for xs in zip((p, s), self.last, strict=True))
        return p, s

    def pivot_after_range(self) -> jax.Array:
        """The pivot of the state after each range: that before the next range's first tile."""
        ranges = self.ranges
        if ranges.view.s.count == 1:
            return self.last[0]
        tile = (ranges.number + 1) * ranges.view.tiles
        there = tile < ranges.plan.num_tiles
        pivot = ranges.load(self.refs[0], ranges.place(tile), there)
        return jnp.where(there, pivot, self.last[0])
