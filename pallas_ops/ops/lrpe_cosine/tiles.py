"""What a program of lrpe_cosine sees: where its numbers are, and their angles.

x is seen as [B, rows, D], whose rows are (token, head) or (head, token); the output as
[B, rows, 2, D].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.tiles import Ref, both, span
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_SEQUENCE, Column
from pallas_ops.ops.lrpe_cosine.config import (
    BUNCH,
    SPREAD_ELEMENTS,
    LrpeCosineConfig,
    Sizes,
    choose,
    choose_walk,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: LrpeCosineConfig
    act: str
    precise: bool  # for results in float32; 16 bits hide what an approximation loses
    shape: tuple[int, ...] | None  # of the grid; None: positions are given
    num_prefix_tokens: int
    heads_first: bool
    per_batch: bool  # whether offsets or positions are
    num_axes: int  # of the grid, or of the positions
    width: int  # how many features turn by one axis
    ahead: int = BUNCH  # tiles that a walk loads at a time

    @property
    def rows(self) -> int:
        return self.s.n * self.s.h

    @property
    def blocks_d(self) -> int:
        return pl.cdiv(self.s.d, self.c.block_d)

    @property
    def tiles(self) -> int:
        """Of the sequence."""
        return pl.cdiv(self.s.n, self.c.block_n)

    @property
    def bunch(self) -> int:
        """Tiles that one step of a walk has."""
        return min(self.ahead, self.tiles)

    @property
    def bunches(self) -> int:
        return pl.cdiv(self.tiles, self.ahead)

    @property
    def overhangs(self) -> bool:
        """Whether a walk's last bunch goes beyond the sequence, be it by whole tiles."""
        return self.bunches * self.bunch * self.c.block_n != self.s.n

    @property
    def parts(self) -> int:
        """Of the sequence, for as many walks."""
        return min(self.c.num_parts, self.bunches)

    def view(self, x: jax.Array) -> jax.Array:
        """x [B, .., .., D] or the output [B, .., .., 2, D], with one axis of rows."""
        return x.reshape(self.s.b, self.rows, *x.shape[3:])

    def features(self, block: Any) -> jax.Array:
        return jnp.asarray(block * self.c.block_d + span(self.c.block_d))

    def each_element(self, block: jax.Array, element: Callable[[Any], None]) -> None:
        """Calls `element` with the index of each batch element of a block."""
        first = block * self.c.block_b
        if self.c.block_b == 1:
            element(first)
        else:
            stop = jnp.minimum(first + self.c.block_b, self.s.b)
            lax.fori_loop(first, stop, lambda b, _: element(pipelined(b, self.c.num_stages)), None)

    def rows_tile(self, block: Any, features: Any) -> "Tile":
        """`block_n` rows that lie side by side."""
        row = block * self.c.block_n + span(self.c.block_n)
        inner = jnp.int32(self.s.n if self.heads_first else self.s.h)
        token, head = lax.div(row, inner), lax.rem(row, inner)
        if self.heads_first:
            token, head = head, token
        inside = row < self.rows if self.rows % self.c.block_n else None
        return Tile(self, row, token, head, self.features(features), inside)

    def tokens_tile(self, block: Any, head: Any, features: Any) -> "Tile":
        """`block_n` tokens of one head."""
        token = block * self.c.block_n + span(self.c.block_n)
        row = head * self.s.n + token if self.heads_first else token * self.s.h + head
        inside = token < self.s.n if self.overhangs else None
        return Tile(self, row, token, jnp.full_like(token, head), self.features(features), inside)


def plan_of(
    x: jax.Array,
    theta: jax.Array,
    positions: jax.Array | None,
    *,
    config: LrpeCosineConfig | None,
    heads_first: bool,
    act: str,
    shape: tuple[int, ...] | None,
    **statics: Any,
) -> Plan:
    """How to run on x or on the output's gradient."""
    b, first, second = x.shape[:3]
    h, n = (first, second) if heads_first else (second, first)
    s = Sizes(b=b, n=n, h=h, d=x.shape[-1])
    num_axes = len(shape or ()) if positions is None else positions.shape[-1]
    if config is None and act == SOFTMAX_SEQUENCE:
        config = choose_walk(s, act)
    elif config is None:
        small = b * n * h * s.d < SPREAD_ELEMENTS
        config = choose(s, scattered=num_axes > 1 and theta.shape[1] % 4 > 0 and small)
    return Plan(
        s=s,
        c=config,
        heads_first=heads_first,
        act=act,
        precise=x.dtype == jnp.float32,
        shape=shape,
        num_axes=num_axes,
        width=theta.shape[1],
        **statics,
    )


class Tile:
    """Some rows and some features, of any batch element."""

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
        """The tile in float32, 0 where there is none."""
        index = (b, self.row, *half, self.feature)
        return load_at(ref, index, self.mask).astype(jnp.float32)

    def load_x(self, ref: Ref, b: Any) -> jax.Array:
        """The same of x, but -inf where there is none and a softmax would count it."""
        x = self.load(ref, b)
        if self.mask is None or not self.plan.act.startswith("softmax"):
            return x
        return jnp.where(self.mask, x, -jnp.inf)

    def only(self, x: jax.Array) -> jax.Array:
        """x, 0 where there is no tile."""
        return x if self.mask is None else jnp.where(self.mask, x, 0.0)

    def store(self, ref: Ref, b: Any, value: jax.Array, *half: int) -> None:
        place = place_of(ref, (b, self.row, *half, self.feature))
        plgpu.store(place, value.astype(ref.dtype), mask=self.mask)

    def column(self, b: Any, *refs: Ref | None) -> Column | None:
        """From arrays [B, H, D], what belongs to this tile's heads and features."""
        index = (b, self.head, self.feature)
        there = [load_at(ref, index, self.mask) for ref in refs if ref is not None]
        return Column(*there) if there else None


def load_at(ref: Ref, index: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """What is in the places of `place_of`, 0 outside the mask."""
    place = place_of(ref, index)
    if mask is None:
        return plgpu.load(place)
    return plgpu.load(place, mask=jnp.broadcast_to(mask, place.shape), other=0.0)


def place_of(ref: Ref, index: tuple[Any, ...]) -> Any:
    """Places by indices that are scalars or arrays [rows, features], with 1 for either."""
    at = [jnp.reshape(jnp.asarray(i, jnp.int32), (1, 1)) if jnp.ndim(i) == 0 else i for i in index]
    shape = jnp.broadcast_shapes(*(i.shape for i in at))
    return ref.at[tuple(jnp.broadcast_to(i, shape) for i in at)]
