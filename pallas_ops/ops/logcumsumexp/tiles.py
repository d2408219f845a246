"""What a program of logcumsumexp sees: where its elements are.

A log-sum-exp is held as a pair: a finite pivot p and s = sum exp(x - p), so that it is exact
however large p is. From tile to tile it is a carry: with a third number, what rounding has taken
from s; and so is, going backward, the gradient of s. What lanes go through in a tile is a list: an
array [groups, columns] for each step: position group * steps + step (of a `mirrored` axis, from the
last group on). All of a group's are one lane's, so that sums along them move nothing between lanes.
"""

import copy
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import fastmath, launch
from pallas_ops.core.tiles import Ref, both, span, stack, unstack
from pallas_ops.ops.logcumsumexp.plan import Plan

Pair = tuple[jax.Array, jax.Array]
Lost = Any  # an array, or None: not kept
Carry = tuple[jax.Array, jax.Array, Lost]

HUGE = float(jnp.finfo(jnp.float32).max)


class Columns:
    """One program's columns, and where its elements are in views of arrays."""

    def __init__(self, plan: Plan, block: jax.Array) -> None:
        self.plan = plan
        self.column = block * plan.c.block_c + span(plan.c.block_c)
        self.inside = self.column < plan.s.c

    def apart(self) -> "Columns":
        """The same for a branch, whose addresses are to take none of the loop's registers."""
        columns = copy.copy(self)
        columns.column = fastmath.settled(self.column)
        columns.inside = columns.column < self.plan.s.c
        return columns

    def at(self, position: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The index of one position in all columns."""
        position = jnp.broadcast_to(jnp.asarray(position, jnp.int32), self.column.shape)
        return (self.column, position) if self.plan.s.last else (position, self.column)

    def index(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The index of positions [n, 1] in all columns."""
        column = self.column[None]
        return (column, positions) if self.plan.s.last else (positions, column)

    def row(self, ref: Ref, position: jax.Array | int, other: float = 0.0) -> jax.Array:
        """[columns] at one position of a view that is not of x."""
        return plgpu.load(ref.at[self.at(position)], mask=self.inside, other=other)

    def put_row(self, ref: Ref, position: jax.Array | int, value: jax.Array) -> None:
        plgpu.store(ref.at[self.at(position)], value.astype(ref.dtype), mask=self.inside)

    def pair(self, refs: tuple[Ref, Ref], position: jax.Array | int) -> Pair:
        """A pair of remembered numbers; nothing, in columns that do not exist."""
        p, s = self.row(refs[0], position, -HUGE), self.row(refs[1], position)
        return self.plan.settled(p), self.plan.settled(s)

    def put_pair(self, refs: tuple[Ref, Ref], position: jax.Array | int, pair: Pair) -> None:
        for ref, value in zip(refs, pair, strict=True):
            self.put_row(ref, position, value)


class Tile:
    """`size` positions of a program's columns: `first`, and one `every` so many."""

    def __init__(
        self, columns: Columns, first: jax.Array, size: int, *, every: int = 1, groups: int = 0
    ) -> None:
        plan = columns.plan
        self.plan = plan
        column, inside = columns.column[None], columns.inside[None]
        offset = span(size)[:, None] * every
        if groups:
            column, inside = column[None], inside[None]
            steps = size // groups
            offset = span(groups)[None, :, None] * steps + span(steps)[:, None, None]
        if plan.mirrored:
            stored = plan.s.n - size - first + offset
            position, there = plan.s.n - 1 - stored, stored >= 0
        else:
            position = first + offset
            stored = plan.s.n - 1 - position if plan.reverse else position
            there = position < plan.s.n
        if launch.is_interpreted():  # which writes back what is masked, so not into what is not
            stored = jnp.where(position < plan.s.n, stored, position)
        self.index = (column, stored) if plan.s.last else (stored, column)
        masks = (
            there if plan.s.n != plan.covered else None,
            inside if plan.s.c % plan.c.block_c else None,
        )
        shape = jnp.broadcast_shapes(position.shape, column.shape)
        self.mask = both(*(None if x is None else jnp.broadcast_to(x, shape) for x in masks))

    def stored(self, ref: Ref, other: float = 0.0) -> jax.Array:
        """The tile, `other` where there is none."""
        mask = self.mask
        return plgpu.load(ref.at[self.index], mask=mask, other=None if mask is None else other)

    def load(self, ref: Ref, other: float = 0.0) -> jax.Array:
        """The same in float32."""
        return self.plan.settled(self.stored(ref, other).astype(jnp.float32))

    def load_x(self, ref: Ref) -> jax.Array:
        """The tile of x in float32: -inf where there is none, else clipped."""
        return self.clipped(self.load(ref, -jnp.inf))

    def clipped(self, x: jax.Array) -> jax.Array:
        """x of the tile between -clip and clip, if there is one."""
        clip = self.plan.clip
        if clip is None:
            return x
        x = jnp.where(x > clip, clip, jnp.where(x < -clip, -clip, x))  # NaN stays
        return x if self.mask is None else jnp.where(self.mask, x, -jnp.inf)

    def store_dx(self, ref: Ref | None, x_ref: Ref, dx: jax.Array) -> None:
        """Stores dx, which is 0 where x was clipped; nothing without a ref."""
        if ref is None:
            return
        if self.plan.clip is not None:
            dx = jnp.where(jnp.abs(self.load(x_ref)) > self.plan.clip, 0.0, dx)
        self.store(ref, dx)

    def store(self, ref: Ref, value: jax.Array) -> None:
        plgpu.store(ref.at[self.index], value.astype(ref.dtype), mask=self.mask)


class Steps:
    """`size` positions of a program's columns, in `groups` of neighbours, each a lane's.

    Lanes load up to 16 bytes at once, of several columns or along the last axis, and are then dealt
    what is theirs.
    """

    def __init__(self, columns: Columns, first: jax.Array, size: int, groups: int) -> None:
        self.plan, self.shape = columns.plan, (groups, columns.plan.c.block_c)
        self.tile = Tile(columns, first, size, groups=0 if self.plan.s.last else groups)

    def load(self, ref: Ref) -> list[jax.Array]:
        return self._dealt(self.tile.load(ref))

    def load_x(self, ref: Ref) -> list[jax.Array]:
        return self._dealt(self.tile.load_x(ref))

    def store(self, ref: Ref, steps: list[jax.Array]) -> None:
        self.tile.store(ref, self._gathered(steps))

    def store_dx(self, ref: Ref | None, x_ref: Ref, steps: Iterable[jax.Array]) -> None:
        """Stores dx, the last step's first."""
        self.tile.store_dx(ref, x_ref, self._gathered(list(steps)[::-1]))

    def _dealt(self, x: jax.Array) -> list[jax.Array]:
        if not self.plan.s.last:
            return unstack(x.transpose(1, 2, 0))
        steps = unstack(x.reshape(self.shape[0], -1, self.shape[1]).transpose(0, 2, 1))
        return steps[::-1] if self.plan.mirrored else steps

    def _gathered(self, steps: list[jax.Array]) -> jax.Array:
        if not self.plan.s.last:
            return stack(steps).transpose(2, 0, 1)
        steps = steps[::-1] if self.plan.mirrored else steps
        return stack(steps).transpose(0, 2, 1).reshape(-1, self.shape[1])


class Rows:
    """The same, but lanes load and store each step as it is, one or two columns at once."""

    def __init__(self, columns: Columns, first: jax.Array, size: int, groups: int) -> None:
        steps = size // groups
        self.rows = [Tile(columns, first + k, groups, every=steps) for k in range(steps)]

    def load(self, ref: Ref) -> list[jax.Array]:
        return [row.load(ref) for row in self.rows]

    def load_x(self, ref: Ref) -> list[jax.Array]:
        return [row.load_x(ref) for row in self.rows]

    def store(self, ref: Ref, steps: list[jax.Array]) -> None:
        for row, step in zip(self.rows, steps, strict=True):
            row.store(ref, step)

    def store_dx(self, ref: Ref | None, x_ref: Ref, steps: Iterable[jax.Array]) -> None:
        for row, step in zip(reversed(self.rows), steps, strict=True):
            row.store_dx(ref, x_ref, step)
