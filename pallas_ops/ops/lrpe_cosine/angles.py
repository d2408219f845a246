"""How far each number of a tile turns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import fastmath
from pallas_ops.core.tiles import Ref, both
from pallas_ops.ops.lrpe_cosine.config import SPREAD_ELEMENTS
from pallas_ops.ops.lrpe_cosine.tiles import Plan, Tile, load_at


@dataclasses.dataclass(frozen=True)
class Angles:
    """How far each number of a tile turns."""

    plan: Plan
    theta: Ref  # [H, E] or [1, E], or spread: [H, D]
    offset: Ref | None = None  # [B] or [1]
    positions: Ref | None = None  # [(B,) N, K]
    cached: Ref | None = None  # [(B,) N, H, D]: turns
    frequency: tuple[jax.Array, jax.Array] | None = None  # of tiles that have it in common

    def sincos(
        self, tile: Tile, b: Any, position: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """In the tile's shape."""
        of = fastmath.precise_sincos if self.plan.precise else fastmath.sincos
        return of(self.turns(tile, b, position))

    def turn_back(
        self,
        tile: Tile,
        b: Any,
        dout_ref: Ref,
        sincos: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """The gradient of the activated x, from that of the output."""
        sin, cos = sincos or self.sincos(tile, b)
        return tile.load(dout_ref, b, 0) * cos + tile.load(dout_ref, b, 1) * sin

    def turns(self, tile: Tile, b: Any, position: jax.Array | None = None) -> jax.Array:
        if self.cached is not None:
            return load_at(self.cached, self.cached_index(tile, b), tile.mask)
        position = self.position(tile, b) if position is None else position
        frequency = self.frequency or fastmath.frequency(self.rate(tile))
        return jnp.broadcast_to(fastmath.remainder(position, *frequency), tile.shape)

    def cached_index(self, tile: Tile, b: Any) -> tuple[Any, ...]:
        batch = (b,) if self.plan.per_batch else ()
        return (*batch, tile.token, tile.head if self.theta.shape[0] > 1 else 0, tile.feature)

    def rate(self, tile: Tile) -> jax.Array:
        """theta, [rows, features], with one row if all heads share it."""
        heads, width = self.theta.shape
        column, within = tile.feature, None
        last = width if width == self.plan.s.d else self.plan.num_axes * width
        if self.plan.num_axes == 1 and width == 1:
            column = jnp.zeros_like(column)
        elif last < self.plan.blocks_d * self.plan.c.block_d:
            within = column < last
        if last > width:
            column = lax.rem(column, jnp.int32(width))
        head, inside = jnp.zeros((1, 1), jnp.int32), None
        if heads > 1:
            head, inside = tile.head, tile.mask
        return load_at(self.theta, (head, column), both(within, inside))

    def position(self, tile: Tile, b: Any) -> jax.Array:
        """In float32, [rows, 1], or [rows, features] where those turn by several axes."""
        each = self._given(tile, b) if self.positions is not None else self._counted(tile, b)
        position = each[0]
        for axis, other in enumerate(each[1:], start=1):
            position = jnp.where(tile.feature >= axis * self.plan.width, other, position)
        return position

    def _given(self, tile: Tile, b: Any) -> list[jax.Array]:
        batch = (b,) if self.plan.per_batch else ()
        inside = None if tile.mask is None else tile.token < self.plan.s.n
        return [
            load_at(self.positions, (*batch, tile.token, axis), inside)
            for axis in range(self.plan.num_axes)
        ]

    def _counted(self, tile: Tile, b: Any) -> list[jax.Array]:
        prefix = self.plan.num_prefix_tokens
        rest, each = tile.token - prefix, []
        for size in reversed((self.plan.shape or ())[1:]):
            count = jnp.int32(max(1, size))  # a grid without points may have prefix tokens
            each.append(lax.rem(rest, count))
            rest = lax.div(rest, count)
        each = [rest, *reversed(each)]
        if self.offset is not None:
            each = [each[0] + self.offset[b if self.plan.per_batch else 0]]
        if prefix:
            each = [jnp.where(tile.token < prefix, 0, position) for position in each]
        return [position.astype(jnp.float32) for position in each]


def spread(plan: Plan, theta: jax.Array) -> jax.Array:
    """theta, with a column for each feature where that makes its loads wide and pays.

    Where axes have 43 features, say, a row of theta is not aligned, and is loaded number by number;
    a copy of it takes 2 us.
    """
    aligned = plan.width % 4 == 0
    if plan.num_axes == 1 or aligned or plan.s.b * plan.rows * plan.s.d < SPREAD_ELEMENTS:
        return theta
    return jnp.tile(theta, (1, plan.num_axes))[:, : plan.s.d]
