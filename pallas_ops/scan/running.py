"""Running sums within a tile [steps, ranges, groups, columns].

Each lane scans its own steps; an exclusive scan across lanes joins the groups' totals. Nothing is
ever subtracted: a total minus an element would lose what is small beside the total.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.tiles import flipped
from pallas_ops.core.triton_ext import Combine, Tiles, scan
from pallas_ops.scan.tile import per_range

STEPS, GROUPS, COLUMNS = 0, 2, 3  # axes of a tile


def running_sums(
    x: jax.Array, start: jax.Array | None, *, reverse: bool = False, exclusive: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Running sums of x from `start` on (a tile), and the total of x without `start`.

    `start` and the total are [ranges, columns]. `exclusive` sums leave out their own position, and
    need tiles of one step a group.
    """
    totals = x.sum(axis=STEPS)
    before = None if start is None else per_range(start)
    if exclusive:
        sums = _sums_before(x, GROUPS, reverse)
    elif x.shape[STEPS] == 1:
        sums = _inclusive(x, GROUPS, reverse)
    else:
        sums = _inclusive(x, STEPS, reverse)
        if x.shape[COLUMNS] > 1:  # along a last axis it takes up to 31 registers more
            totals = edge(sums, STEPS, last=not reverse)
        if x.shape[GROUPS] > 1:
            before = plus(before, _sums_before(totals, GROUPS - 1, reverse)[None])
    return plus(before, sums), totals.sum(axis=GROUPS - 1)


def plus(start: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if start is None else start + x


def exclusive_scan(
    combine: Combine, nothing: Tiles, xs: Tiles, *, axis: int, reverse: bool
) -> tuple[jax.Array, ...]:
    """The exclusive scan: the sum of all entries before each one, in scan direction."""
    size = len(xs)

    def join(before: Tiles, after: Tiles) -> Tiles:
        """The sum of all but the last, and of all."""
        total = before[size:]
        return *combine(total, after[:size]), *combine(total, after[size:])

    return scan(join, (*nothing, *xs), axis=axis, reverse=reverse)[:size]


def _sums_before(x: jax.Array, axis: int, reverse: bool) -> jax.Array:
    return exclusive_scan(_add, (jnp.zeros_like(x),), (x,), axis=axis, reverse=reverse)[0]


def _inclusive(x: jax.Array, axis: int, reverse: bool) -> jax.Array:
    if not reverse:
        return jnp.cumsum(x, axis=axis)
    if axis == STEPS and x.shape[COLUMNS] > 1:
        # Triton reverses a scan by two shuffles a number, even where a lane has all of them. Along
        # a last axis this gains little, and took 60 registers more where rows have an odd length.
        return flipped(jnp.cumsum(flipped(x), axis=axis))
    return scan(_add, (x,), axis=axis, reverse=True)[0]


def _add(before: Any, after: Any) -> Any:
    return (before[0] + after[0],)


def edge(x: jax.Array, axis: int, *, last: bool) -> jax.Array:
    """x[0] or x[-1] along an axis, as a masked sum: kernels cannot index arrays.

    Where a lane has the whole axis this takes no instructions: a compiler leaves out the addition
    of -0.0. (It keeps that of 0.0, which changes -0.0.)
    """
    there = lax.broadcasted_iota(jnp.int32, x.shape, axis) == (x.shape[axis] - 1 if last else 0)
    return jnp.where(there, x, -0.0).sum(axis=axis)
