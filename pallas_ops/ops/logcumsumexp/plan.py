"""What is static about a launch, and the tiles that its programs load."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import card, fastmath
from pallas_ops.core.tiles import Ref
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig, choose
from pallas_ops.scan.segments import Pair
from pallas_ops.scan.tile import Ranges, Tile
from pallas_ops.scan.view import MAX_VECTOR, Sizes, View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The statics of a kernel body."""

    view: View
    c: LogcumsumexpConfig
    clip: float | None

    @property
    def num_tiles(self) -> int:
        """Of the whole axis: as many states are saved, and one."""
        return -(-self.view.s.n // self.c.block_n)

    @property
    def block_exact(self) -> int:
        recurrence = self.c.variant == "recurrence"
        return self.c.block_n if recurrence else min(self.c.block_exact, self.c.block_n)

    def tile(self, ranges: Ranges, first: Any) -> Tile:
        return Tile(ranges, first, self.c.block_n, self.view.num_steps)

    def exact_tile(self, ranges: Ranges, first: Any) -> Tile:
        """`block_exact` positions; the variant `recurrence` has all of a column's in one lane."""
        size = self.block_exact
        if self.view.s.c > 1 and self.c.variant == "recurrence":
            return Tile(ranges, first, size, size)
        return Tile(ranges, first, size, num_steps(self.view.s, self.c, size))

    def load_x(self, tile: Tile, ref: Ref) -> jax.Array:
        """x in float32, clipped; -inf beyond the range."""
        x = tile.load(ref, -jnp.inf)
        if self.clip is None:
            return x
        x = jnp.where(x > self.clip, self.clip, jnp.where(x < -self.clip, -self.clip, x))
        return x if tile.mask is None else jnp.where(tile.mask, x, -jnp.inf)  # NaN stays

    def store_dx(self, tile: Tile, ref: Ref, x_ref: Ref, dx: jax.Array) -> None:
        """dx is 0 where x was clipped."""
        if self.clip is not None:
            dx = jnp.where(jnp.abs(tile.load(x_ref)) > self.clip, 0.0, dx)
        tile.store(ref, dx)

    def load_saved(self, ranges: Ranges, refs: tuple[Ref, Ref], tile: Any) -> Pair:
        """The state saved before a tile of the axis; beyond its end, the last one."""
        if self.view.s.n % self.view.s.size:
            tile = jnp.minimum(tile, self.num_tiles)
        p, s = (ranges.load(ref, tile) for ref in refs)
        return self.settled(p), self.settled(s)

    def settled(self, x: jax.Array) -> jax.Array:
        """What a loop loads, if its loads run ahead."""
        return fastmath.settled(x) if self.c.num_stages > 1 else x

    def loop(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`step` of each tile of a range."""
        return loop(self.view.tiles, step, carry, self.c.num_stages)

    def shape(self, size: int) -> jax.ShapeDtypeStruct:
        """Of an array [b, size, c] in float32."""
        return jax.ShapeDtypeStruct((self.view.s.b, size, self.view.s.c), jnp.float32)


def loop(count: int, step: Callable[[Any, Any], Any], carry: Any, num_stages: int = 1) -> Any:
    """`step` of 0 to count - 1, whose loads run up to `num_stages` ahead."""
    if count == 1:
        return step(0, carry)
    return lax.fori_loop(0, count, lambda t, y: step(pipelined(t, num_stages), y), carry)


def plan_of(
    x: jax.Array,
    axis: int,
    block_n: int,
    config: LogcumsumexpConfig | None,
    *,
    backward: bool = False,
    reverse: bool,
    clip: float | None,
) -> Plan:
    """How to run along one axis of x, with tiles of `block_n` unless a config is given."""
    s = Sizes.of(x.shape, axis, x.dtype.itemsize)
    c = config or choose(s, block_n, card.current(), backward=backward)
    view = View(
        s=s.split(c.num_segments, c.block_n),
        reverse=reverse,
        from_end=reverse,
        block_n=c.block_n,
        block_c=1 if s.c == 1 else c.block_c,
        num_ranges=c.block_c if s.c == 1 else 1,
        num_steps=num_steps(s, c, c.block_n),
    )
    return Plan(view=view, c=c, clip=clip)


def num_steps(s: Sizes, c: LogcumsumexpConfig, block_n: int) -> int:
    """Positions of a tile in each lane: a vector of a last axis; else all of one column's share."""
    lanes = 32 * c.num_warps
    share = max(1, block_n * c.block_c // lanes)
    return min(block_n, share, MAX_VECTOR // s.itemsize if s.c == 1 else share)
