"""What a program of logcumsumexp sees: where its elements are, and sums that carry a pivot.

A log-sum-exp is held as a pair: a finite pivot p and s = sum exp(x - p), so that it is exact
however large p is. Tiles are [positions, columns], or [steps, groups, columns], where position
group * steps + step is in a lane of its own with all its steps: a scan along them moves nothing
between lanes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import fastmath, launch
from pallas_ops.core.tiles import Ref, both, span
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.logcumsumexp.config import (
    STEPS,
    LogcumsumexpConfig,
    Sizes,
    choose,
    choose_block_n,
)

Pair = tuple[jax.Array, jax.Array]

HUGE = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: LogcumsumexpConfig
    reverse: bool
    clip: float | None

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.s.n, self.c.block_n)

    @property
    def column_blocks(self) -> int:
        return pl.cdiv(self.s.c, self.c.block_c)

    @property
    def stepped(self) -> bool:
        """Whether each lane steps through a stretch of a part."""
        if self.s.last or self.s.n >= 2**30 or self.c.variant != "parallel":
            return False
        return self.c.num_parts > 1 and self.tiles > self.stretches and self.c.block_n <= STEPS

    @property
    def each(self) -> int:
        """Tiles of such a stretch."""
        return pl.cdiv(self.tiles, self.stretches * self.c.num_parts)

    @property
    def parts(self) -> int:
        if self.stepped:
            return pl.cdiv(self.tiles, self.stretches * self.each)
        return min(self.c.num_parts, self.tiles)

    @property
    def covered(self) -> int:
        """Positions of all programs."""
        share = self.stretches * self.each if self.stepped else 1
        return -(-self.tiles // share) * share * self.c.block_n

    def part(self, i: jax.Array) -> tuple[Any, Any]:
        """The first tile of the i-th part, and one past its last."""
        if self.parts == 1:
            return 0, self.tiles
        return self.start(i), self.start(i + 1)

    def start(self, i: Any) -> Any:
        """The tiles before the i-th part, of 32 bits on the way too."""
        if self.stepped:
            return jnp.minimum(i * (self.stretches * self.each), self.tiles)
        return i * (self.tiles // self.parts) + jnp.minimum(i, self.tiles % self.parts)

    def through(
        self, i: jax.Array, step: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False
    ) -> Any:
        """`step` of each tile of the i-th part."""
        first, stop = self.part(i)
        if self.parts == self.tiles:
            return step(first, carry)

        def one(k: jax.Array, carry: Any) -> Any:
            k = pipelined(k, self.c.num_stages)
            return step(stop - 1 - k if reverse else first + k, carry)

        return lax.fori_loop(0, stop - first, one, carry)

    @property
    def block_exact(self) -> int:
        return min(self.c.block_exact, self.c.block_n)

    @property
    def groups(self) -> int:
        """Of a tile's positions: as many as there are lanes beside its columns."""
        lanes = self.c.num_warps * 32 * max(1, 16 // self.s.itemsize)
        return max(1, lanes // self.c.block_c)

    @property
    def stretches(self) -> int:
        """Of a column's positions, for as many lanes: each loads two columns."""
        if self.s.last or self.c.variant == "recurrence":
            return 1
        return max(1, self.c.num_warps * 64 // self.c.block_c)

    def settled(self, x: jax.Array) -> jax.Array:
        """What a loop loads, if its loads run ahead."""
        return fastmath.settled(x) if self.c.num_stages > 1 else x

    def view(self, x: jax.Array) -> jax.Array:
        """[..., k, ...] as [b, k, c], or [rows, k] where the axis is the last."""
        return x.reshape(self.s.c, -1) if self.s.last else x.reshape(self.s.b, -1, self.s.c)

    def spec(self, size: int) -> pl.BlockSpec:
        """All of a view with `size` positions, but its batch axis, which is the grid's last."""
        if self.s.last:
            return pl.BlockSpec((self.s.c, size), lambda *_: (0, 0))
        return pl.BlockSpec((None, size, self.s.c), lambda *ids: (ids[-1], 0, 0))

    def shape(self, size: int) -> jax.ShapeDtypeStruct:
        """Of a view in float32."""
        s = self.s
        return jax.ShapeDtypeStruct((s.c, size) if s.last else (s.b, size, s.c), jnp.float32)


def plan_of(
    x: jax.Array,
    axis: int,
    block_n: int,
    config: LogcumsumexpConfig | None,
    *,
    alone: bool = False,
    backward: bool = False,
    **statics: Any,
) -> Plan:
    """How to run along one axis of x, with tiles of `block_n` if they are remembered."""
    s = Sizes.of(x.shape, axis, x.dtype.itemsize)
    if config is None:
        block_n = choose_block_n(s, alone=True) if alone else block_n
        config = choose(s, block_n, backward=backward)
    return Plan(s, config, **statics)


class Columns:
    """One program's columns, and where its elements are in views of arrays."""

    def __init__(self, plan: Plan, block: jax.Array) -> None:
        self.plan = plan
        self.column = block * plan.c.block_c + span(plan.c.block_c)
        self.inside = self.column < plan.s.c

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
        self,
        columns: Columns,
        first: jax.Array,
        size: int,
        *,
        grouped: bool = False,
        every: int = 1,
    ) -> None:
        plan = columns.plan
        self.plan = plan
        if grouped and not plan.s.last:
            groups = min(size, plan.groups)
            steps = size // groups
            offset = span(groups)[None, :, None] * steps + span(steps)[:, None, None]
            column, inside = columns.column[None, None], columns.inside[None, None]
        else:
            offset = span(size)[:, None] * every
            column, inside = columns.column[None], columns.inside[None]
        position = first + offset
        stored = plan.s.n - 1 - position if plan.reverse else position
        if launch.is_interpreted():  # which writes back what is masked, so not into what is not
            stored = jnp.where(position < plan.s.n, stored, position)
        self.index = (column, stored) if plan.s.last else (stored, column)
        masks = (
            position < plan.s.n if plan.s.n != plan.covered else None,
            inside if plan.s.c % plan.c.block_c else None,
        )
        shape = jnp.broadcast_shapes(position.shape, column.shape)
        self.mask = both(*(None if x is None else jnp.broadcast_to(x, shape) for x in masks))

    def load(self, ref: Ref, other: float = 0.0) -> jax.Array:
        """The tile in float32, `other` where there is none."""
        mask = self.mask
        x = plgpu.load(ref.at[self.index], mask=mask, other=None if mask is None else other)
        return self.plan.settled(x.astype(jnp.float32))

    def load_x(self, ref: Ref) -> jax.Array:
        """The same of x: -inf where there is none, else clipped."""
        x = self.load(ref, -jnp.inf)
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
