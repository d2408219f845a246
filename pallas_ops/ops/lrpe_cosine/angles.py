"""How far each number of a tile turns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import fastmath
from pallas_ops.core.tiles import Ref, both
from pallas_ops.ops.lrpe_cosine.tiles import Plan, Tile, load_at


@dataclasses.dataclass(frozen=True)
class Angles:
    """How far each number of a tile turns."""

    plan: Plan
    theta: Ref  # [H, E] or [1, E]
    offset: Ref | None = None  # [B] or [1]
    positions: Ref | None = None  # [(B,) N, K]
    cached: Ref | None = None  # [(B,) N, H, D]: turns

    def sincos(self, tile: Tile, b: Any) -> tuple[jax.Array, jax.Array]:
        """In the tile's shape."""
        of = fastmath.precise_sincos if self.plan.precise else fastmath.sincos
        return of(self.turns(tile, b))

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

    def turns(self, tile: Tile, b: Any) -> jax.Array:
        if self.cached is not None:
            return load_at(self.cached, self.cached_index(tile, b), tile.mask)
        turn = fastmath.remainder(self.position(tile, b), *fastmath.frequency(self.rate(tile)))
        return jnp.broadcast_to(turn, tile.shape)

    def cached_index(self, tile: Tile, b: Any) -> tuple[Any, ...]:
        batch = (b,) if self.plan.per_batch else ()
        return (*batch, tile.token, tile.head if self.theta.shape[0] > 1 else 0, tile.feature)

    def rate(self, tile: Tile) -> jax.Array:
        """theta, [rows, features], with one row if all heads share it."""
        heads, width = self.theta.shape
        column, within = tile.feature, None
        if self.num_axes == 1 and width == 1:
            column = jnp.zeros_like(column)
        elif self.num_axes * width < self.plan.blocks_d * self.plan.c.block_d:
            within = column < self.num_axes * width
        if self.num_axes > 1:
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
            position = jnp.where(tile.feature >= axis * self.theta.shape[1], other, position)
        return position

    @property
    def num_axes(self) -> int:
        if self.positions is not None:
            return int(self.positions.shape[-1])
        assert self.plan.shape is not None
        return len(self.plan.shape)

    def _given(self, tile: Tile, b: Any) -> list[jax.Array]:
        batch = (b,) if self.plan.per_batch else ()
        inside = None if tile.mask is None else tile.token < self.plan.s.n
        return [
            load_at(self.positions, (*batch, tile.token, axis), inside)
            for axis in range(self.num_axes)
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
