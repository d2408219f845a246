"""What a program of lrpe_cosine sees: a tile of rows and features, and the angles of its elements.

A row is one head of one token. x is viewed as [B, rows, D], with rows in the order (token, head)
or, with heads first, (head, token). The output is viewed as [B, rows, 2, D].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, and_masks, span
from pallas_ops.ops.lrpe_cosine import angles
from pallas_ops.ops.lrpe_cosine.config import Operands, Plan, Softmax


class Tile:
    """Rows and features of one batch element; index arrays are [rows, 1] and [1, features]."""

    def __init__(
        self,
        plan: Plan,
        b: Any,
        row: jax.Array,
        token: jax.Array,
        head: jax.Array,
        block_d: Any,
        inside: jax.Array | None,
    ) -> None:
        self.plan, self.b = plan, b
        self.row, self.token, self.head = row[:, None], token[:, None], head[:, None]
        self.feature = features(plan, block_d)
        self.shape = (plan.c.block_n, plan.c.block_d)
        within = self.feature < plan.s.d if plan.s.d % plan.c.block_d else None
        mask = and_masks(None if inside is None else inside[:, None], within)
        self.mask = None if mask is None else jnp.broadcast_to(mask, self.shape)

    @classmethod
    def of_rows(cls, plan: Plan) -> "Tile":
        """The `block_n` adjacent rows of a program that does not walk."""
        block, block_d, b = map(pl.program_id, range(3))
        row = block * plan.c.block_n + span(plan.c.block_n)
        inner = jnp.int32(plan.s.n if plan.p.heads_first else plan.s.h)
        token, head = lax.div(row, inner), lax.rem(row, inner)
        if plan.p.heads_first:
            token, head = head, token
        inside = row < plan.rows if plan.rows % plan.c.block_n else None
        return cls(plan, b, row, token, head, block_d, inside)

    @classmethod
    def of_tokens(cls, plan: Plan, b: Any, block: Any, head: Any, block_d: Any) -> "Tile":
        """`block_n` tokens of one head."""
        token = block * plan.c.block_n + span(plan.c.block_n)
        row = head * plan.s.n + token if plan.p.heads_first else token * plan.s.h + head
        whole = plan.steps * plan.step_tiles * plan.c.block_n == plan.s.n
        inside = None if whole else token < plan.s.n
        return cls(plan, b, row, token, jnp.full_like(token, head), block_d, inside)

    def load(self, ref: Ref, *half: int) -> jax.Array:
        """The tile in float32, 0 outside the array; `half` 0 or 1 selects cos or sin."""
        index = (self.b, self.row, *half, self.feature)
        return load_at(ref, index, self.mask).astype(jnp.float32)

    def load_x(self, ref: Ref) -> jax.Array:
        """The tile of x in float32. Outside the array it is 0, and -inf for a softmax."""
        x = self.load(ref)
        return self.masked(x, -jnp.inf) if self.plan.p.act.startswith("softmax") else x

    def load_da(self, dout_ref: Ref, sin: jax.Array, cos: jax.Array) -> jax.Array:
        """The gradient of act(x), from the gradient of the output."""
        return self.load(dout_ref, 0) * cos + self.load(dout_ref, 1) * sin

    def masked(self, x: jax.Array, other: float = 0.0) -> jax.Array:
        """x, and `other` outside the array."""
        return x if self.mask is None else jnp.where(self.mask, x, other)

    def store(self, ref: Ref, value: jax.Array, *half: int) -> None:
        """Stores the tile; `half` 0 or 1 selects cos or sin."""
        index = (self.b, self.row, *half, self.feature)
        plgpu.store(ref.at[index], value.astype(ref.dtype), mask=self.mask)


def features(plan: Plan, block_d: Any) -> jax.Array:
    """The indices of a block of features [1, features]."""
    index: jax.Array = block_d * plan.c.block_d + span(plan.c.block_d)
    return index[None]


def load_softmax(refs: Operands, at: Any) -> Softmax:
    """The values of a softmax over the sequence for the heads and features of a tile or walk."""
    index, of_softmax = (at.b, at.head, at.feature), (refs.pivot, refs.share, refs.mean)
    return Softmax(*(None if ref is None else load_at(ref, index, at.mask) for ref in of_softmax))


def load_at(ref: Ref, index: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """The elements at an index of scalars and of arrays that broadcast; 0 outside the mask."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0.0)


class Angles:
    """The angles of a tile's elements, in turns: phi / (2 pi) less a whole number.

    With a `first` tile, all tiles have its heads and features, and so share their frequencies.
    """

    def __init__(self, plan: Plan, refs: Operands, first: Tile | None = None) -> None:
        self.plan, self.refs, self.frequency = plan, refs, None
        if first is not None and refs.cached is None:
            self.frequency = angles.frequency(self.rate(first))

    def sincos(self, tile: Tile, position: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """sin and cos [rows, features]; `position` if it is known already."""
        sincos = angles.precise_sincos if self.plan.precise else angles.sincos
        return sincos(self.turns(tile, position))

    def turns(self, tile: Tile, position: jax.Array | None = None) -> jax.Array:
        """The angles [rows, features]; `position` if it is known already."""
        if self.refs.cached is not None:
            return load_at(self.refs.cached, self.cached_index(tile), tile.mask)
        position = self.position(tile) if position is None else position
        frequency = self.frequency or angles.frequency(self.rate(tile))
        return jnp.broadcast_to(angles.remainder(position, *frequency), tile.shape)

    def cached_index(self, tile: Tile) -> tuple[Any, ...]:
        """The index of the tile's elements in the cached angles."""
        head = tile.head if self.refs.theta.shape[0] > 1 else 0
        return *self._batch(tile), tile.token, head, tile.feature

    def rate(self, tile: Tile) -> jax.Array:
        """theta of each element [rows, features], or [1, features] if all heads share it."""
        heads, width = self.refs.theta.shape
        column, within = tile.feature, None
        last = width if width == self.plan.s.d else self.plan.p.num_axes * width
        if self.plan.p.num_axes == 1 and width == 1:
            column = jnp.zeros_like(column)
        elif last < self.plan.blocks_d * self.plan.c.block_d:
            within = column < last  # features from `last` on have theta 0
        if last > width:
            column = lax.rem(column, jnp.int32(width))
        if heads > 1:
            within = and_masks(within, tile.mask)
        return load_at(self.refs.theta, (tile.head if heads > 1 else 0, column), within)

    def position(self, tile: Tile) -> jax.Array:
        """The position in float32 [rows, 1]; on a grid of several axes [rows, features]."""
        position, *others = self._positions(tile)
        for axis, other in enumerate(others, start=1):
            position = jnp.where(tile.feature >= axis * self.plan.width, other, position)
        return position

    def _positions(self, tile: Tile) -> list[jax.Array]:
        """The position of each token in float32 [rows, 1], per axis."""
        p, offset = self.plan.p, self.refs.offset
        if self.refs.positions is not None:
            inside = None if tile.mask is None else tile.token < self.plan.s.n
            places = [(*self._batch(tile), tile.token, axis) for axis in range(p.num_axes)]
            return [load_at(self.refs.positions, place, inside) for place in places]
        if offset is not None:
            offset = offset[tile.b if p.per_batch else 0]
        counted = angles.indices(tile.token, p.shape, p.num_prefix_tokens, offset)
        return [index.astype(jnp.float32) for index in counted]

    def _batch(self, tile: Tile) -> tuple[Any, ...]:
        """The index along the batch axis of positions and cached angles, if they have one."""
        return (tile.b,) if self.plan.p.per_batch else ()
