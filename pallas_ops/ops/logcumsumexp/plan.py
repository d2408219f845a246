"""How a launch divides the work: what is known of it before a kernel runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import fastmath
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.logcumsumexp.config import STEPS, LogcumsumexpConfig, Sizes, choose


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
    def mirrored(self) -> bool:
        """Whether groups lie the other way round, for loads of a reversed last axis to be wide."""
        return self.reverse and self.s.last and self.c.variant == "parallel"

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

    def groups(self, size: int, columns: int) -> int:
        """Of `size` positions: a lane has one in so many columns, or 16 bytes of the last axis."""
        lanes = self.c.num_warps * 32
        if self.s.last:
            steps = min(size, 16 // self.s.itemsize, size * self.c.block_c // lanes)
            return size // max(1, steps)
        return min(size, max(1, lanes * columns // self.c.block_c))

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
    backward: bool = False,
    **statics: Any,
) -> Plan:
    """How to run along one axis of x, with tiles of `block_n` unless a config is given."""
    s = Sizes.of(x.shape, axis, x.dtype.itemsize)
    if config is None:
        config = choose(s, block_n, backward=backward)
    return Plan(s, config, **statics)
