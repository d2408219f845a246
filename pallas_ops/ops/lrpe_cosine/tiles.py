"""What a program of lrpe_cosine sees: a tile of rows and features, and the angles of its elements.

x is viewed as [B, rows, D], where a row is one head of one token: (token, head) or (head, token).
The output is viewed as [B, rows, 2, D].
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, both, span, whole
from pallas_ops.ops.lrpe_cosine import trigonometry
from pallas_ops.ops.lrpe_cosine.config import SPREAD_ELEMENTS, Plan

Operands = Sequence[jax.Array | None]


def run(
    body: Callable[..., None],
    plan: Plan,
    operands: Operands,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    name: str,
) -> list[jax.Array]:
    """Launches a kernel body whose programs see all of every array."""
    return launch(
        partial(body, plan=plan),
        *operands,
        name=name,
        grid=grid,
        in_specs=[None if x is None else whole(x) for x in operands],
        out_specs=list(map(whole, out)),
        out_shape=out,
        num_warps=plan.c.num_warps,
    )


class Tile:
    """Some rows and some features, of any batch element; index arrays are [rows, features]."""

    def __init__(
        self,
        plan: Plan,
        row: jax.Array,
        token: jax.Array,
        head: jax.Array,
        feature: jax.Array,
        inside: jax.Array | None,
    ) -> None:
        self.plan = plan
        self.row, self.token, self.head = row[:, None], token[:, None], head[:, None]
        self.feature = feature[None]
        self.shape = (row.size, feature.size)
        within = self.feature < plan.s.d if plan.s.d % plan.c.block_d else None
        mask = both(None if inside is None else inside[:, None], within)
        self.mask = None if mask is None else jnp.broadcast_to(mask, self.shape)

    def load(self, ref: Ref, b: Any, *half: int) -> jax.Array:
        """The tile in float32, 0 outside the array; `half` 0 or 1 selects cos or sin."""
        index = (b, self.row, *half, self.feature)
        return load_at(ref, index, self.mask).astype(jnp.float32)

    def load_x(self, ref: Ref, b: Any) -> jax.Array:
        """The tile of x, for a softmax -inf outside the array."""
        x = self.load(ref, b)
        if self.mask is None or not self.plan.act.startswith("softmax"):
            return x
        return jnp.where(self.mask, x, -jnp.inf)

    def masked(self, x: jax.Array) -> jax.Array:
        """x, 0 outside the array."""
        return x if self.mask is None else jnp.where(self.mask, x, 0.0)

    def load_da(self, dout_ref: Ref, b: Any, sin: jax.Array, cos: jax.Array) -> jax.Array:
        """The gradient of act(x), from that of the output."""
        return self.load(dout_ref, b, 0) * cos + self.load(dout_ref, b, 1) * sin

    def store(self, ref: Ref, b: Any, value: jax.Array, *half: int) -> None:
        store_at(ref, (b, self.row, *half, self.feature), value.astype(ref.dtype), self.mask)


def features(plan: Plan, block: Any) -> jax.Array:
    return jnp.asarray(block * plan.c.block_d + span(plan.c.block_d))


def rows_tile(plan: Plan, block: Any, block_d: Any) -> Tile:
    """`block_n` adjacent rows."""
    row = block * plan.c.block_n + span(plan.c.block_n)
    inner = jnp.int32(plan.s.n if plan.heads_first else plan.s.h)
    token, head = lax.div(row, inner), lax.rem(row, inner)
    if plan.heads_first:
        token, head = head, token
    inside = row < plan.rows if plan.rows % plan.c.block_n else None
    return Tile(plan, row, token, head, features(plan, block_d), inside)


def tokens_tile(plan: Plan, block: Any, head: Any, block_d: Any) -> Tile:
    """`block_n` tokens of one head."""
    token = block * plan.c.block_n + span(plan.c.block_n)
    row = head * plan.s.n + token if plan.heads_first else token * plan.s.h + head
    inside = token < plan.s.n if plan.masks_tokens else None
    return Tile(plan, row, token, jnp.full_like(token, head), features(plan, block_d), inside)


def load_at(ref: Ref, index: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """The elements at an index as of `_place`, 0 outside the mask."""
    place = _place(ref, index)
    if mask is None:
        return plgpu.load(place)
    return plgpu.load(place, mask=jnp.broadcast_to(mask, place.shape), other=0.0)


def store_at(ref: Ref, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None) -> None:
    plgpu.store(_place(ref, index), value, mask=mask)


def _place(ref: Ref, index: tuple[Any, ...]) -> Any:
    """Elements whose indices are scalars, or arrays that broadcast to [rows, features]."""
    at = [jnp.reshape(jnp.asarray(i, jnp.int32), (1, 1)) if jnp.ndim(i) == 0 else i for i in index]
    shape = jnp.broadcast_shapes(*(i.shape for i in at))
    return ref.at[tuple(jnp.broadcast_to(i, shape) for i in at)]


@dataclasses.dataclass(frozen=True)
class Angles:
    """The angles of a tile's elements, in turns: phi / (2 pi) less a whole number."""

    plan: Plan
    theta: Ref  # [H, E] or [1, E], or `spread_theta` of it
    offset: Ref | None = None  # [B] or [1]
    positions: Ref | None = None  # [(B,) N, K]
    cached: Ref | None = None  # turns [(B,) N, H, D]
    frequency: tuple[jax.Array, jax.Array] | None = None  # if all tiles of a program share it

    def sincos(
        self, tile: Tile, b: Any, position: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """sin and cos [rows, features]."""
        of = trigonometry.precise_sincos if self.plan.precise else trigonometry.sincos
        return of(self.turns(tile, b, position))

    def turns(self, tile: Tile, b: Any, position: jax.Array | None = None) -> jax.Array:
        if self.cached is not None:
            return load_at(self.cached, self.cached_index(tile, b), tile.mask)
        position = self.position(tile, b) if position is None else position
        frequency = self.frequency or trigonometry.frequency(self.rate(tile))
        return jnp.broadcast_to(trigonometry.remainder(position, *frequency), tile.shape)

    def cached_index(self, tile: Tile, b: Any) -> tuple[Any, ...]:
        batch = (b,) if self.plan.per_batch else ()
        return (*batch, tile.token, tile.head if self.theta.shape[0] > 1 else 0, tile.feature)

    def rate(self, tile: Tile) -> jax.Array:
        """theta of each element [rows, features], of one row if all heads share it."""
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
        """In float32 [rows, 1], or [rows, features] if features have several axes."""
        per_axis = self._given(tile, b) if self.positions is not None else self._counted(tile, b)
        position = per_axis[0]
        for axis, other in enumerate(per_axis[1:], start=1):
            position = jnp.where(tile.feature >= axis * self.plan.width, other, position)
        return position

    def _given(self, tile: Tile, b: Any) -> list[jax.Array]:
        """The given position of each token, per axis."""
        batch = (b,) if self.plan.per_batch else ()
        inside = None if tile.mask is None else tile.token < self.plan.s.n
        return [
            load_at(self.positions, (*batch, tile.token, axis), inside)
            for axis in range(self.plan.num_axes)
        ]

    def _counted(self, tile: Tile, b: Any) -> list[jax.Array]:
        """The row-major index of each token in the grid, per axis."""
        prefix = self.plan.num_prefix_tokens
        rest, per_axis = tile.token - prefix, []
        for size in reversed((self.plan.shape or ())[1:]):
            count = jnp.int32(max(1, size))  # a grid without points may have prefix tokens
            per_axis.append(lax.rem(rest, count))
            rest = lax.div(rest, count)
        per_axis = [rest, *reversed(per_axis)]
        if self.offset is not None:
            per_axis = [per_axis[0] + self.offset[b if self.plan.per_batch else 0]]
        if prefix:
            per_axis = [jnp.where(tile.token < prefix, 0, position) for position in per_axis]
        return [position.astype(jnp.float32) for position in per_axis]


def spread_theta(plan: Plan, theta: jax.Array) -> jax.Array:
    """theta with one column per feature, where that pays; else theta.

    With 43 features per axis, say, the rows of theta are not aligned, and kernels load its elements
    one by one. The copy has aligned rows and takes 2 us.
    """
    aligned = plan.width % 4 == 0
    if plan.num_axes == 1 or aligned or plan.s.b * plan.rows * plan.s.d < SPREAD_ELEMENTS:
        return theta
    return jnp.tile(theta, (1, plan.num_axes))[:, : plan.s.d]
