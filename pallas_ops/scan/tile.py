"""The ranges and columns of one program, tiles of them, and the masks of both."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import launch
from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, and_masks, halves, joined, span
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.scan.view import View

T = TypeVar("T")


class Ranges:
    """A program's ranges: row, number, start and stop of each, as arrays [ranges, 1].

    Values per range and column have the shape [ranges, columns] throughout. Arrays
    [1, ranges, 1, columns], which would broadcast beside tiles, cost a kernel up to 80 registers.
    """

    def __init__(self, view: View) -> None:
        self.view, s = view, view.s
        # Ranges are numbered across all rows: a program may have ranges of several rows.
        slot = (pl.program_id(1) * view.num_ranges + span(view.num_ranges))[:, None]
        count = jnp.full_like(slot, s.count)
        self.number = lax.rem(slot, count)
        self.row = pl.program_id(2) * view.rows + lax.div(slot, count)
        self.start, self.stop = self.bounds()
        self.there = None
        if not view.all_slots:  # a slot (place for a range) beyond the last range gets an empty one
            self.there = (slot < view.rows * s.count) & (self.row < s.b)
            self.stop = jnp.where(self.there, self.stop, self.start)
        self.column = (pl.program_id(0) * view.block_c + span(view.block_c))[None, :]
        self.inside = self.column < s.c if s.c % view.block_c else None

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Start and stop: the axis from one of its ends on, in ranges of one size."""
        s, before = self.view.s, self.number * self.view.s.size
        size = jnp.full_like(before, s.size)
        if s.n % s.size:  # compare what is left: before + size may be beyond int32
            size = jnp.minimum(size, s.n - before)
        start = s.n - before - size if self.view.from_end else before
        return start, start + size

    @property
    def shape(self) -> tuple[int, int]:
        return self.view.num_ranges, self.view.block_c

    def load(
        self, ref: Ref, position: jax.Array | int, mask: jax.Array | None = None, other: float = 0.0
    ) -> jax.Array:
        """Loads from an array [b, positions, c], in float32; `other` where the mask is false."""
        at, mask = self.index(position, mask)
        x = plgpu.load(ref.at[at], mask=mask, other=None if mask is None else other)
        return x.astype(jnp.float32)

    def store(
        self, ref: Ref, position: jax.Array | int, y: jax.Array, mask: jax.Array | None = None
    ) -> None:
        at, mask = self.index(position, mask)
        plgpu.store(ref.at[at], y.astype(ref.dtype), mask=mask)

    def index(self, position: jax.Array | int, mask: jax.Array | None = None) -> Any:
        """Index and mask, which broadcast to [ranges, columns] or to the shape of a tile."""
        row, column, inside = self.row, self.column, self.inside
        if jnp.ndim(position) == 4:  # the mask of a tile leaves slots without a range out
            row, column = per_range(row), per_range(column)
            inside = None if inside is None else per_range(inside)
        else:
            mask = and_masks(mask, self.there)
        mask = and_masks(mask, inside)
        if mask is not None and launch.is_interpreted():
            # The interpreter rewrites masked elements: out of bounds they overwrite no result.
            row = jnp.where(mask, row, self.view.s.b)
        return (row, position, column), mask


def loop(count: Any, step: Callable[[Any, T], T], carry: T, num_stages: int = 1) -> T:
    """Calls `step` for 0 to count - 1. A step's loads are issued `num_stages` - 1 steps before."""
    if isinstance(count, int) and count == 1:
        return step(0, carry)
    return lax.fori_loop(0, count, lambda t, y: step(pipelined(t, num_stages), y), carry)


def per_range(x: jax.Array) -> jax.Array:
    """[ranges, columns] as [1, ranges, 1, columns], which broadcasts against tiles."""
    return x[None, :, None, :]


class Tile:
    """`block_n` positions of each of a program's ranges, from `first` on in scan direction.

    Without `exchange` the tile keeps the layout of its load.
    """

    def __init__(
        self, ranges: Ranges, first: Any, block_n: int, num_steps: int, *, exchange: bool = True
    ) -> None:
        self.ranges, self.first, self.exchange, view = ranges, first, exchange, ranges.view
        steps, groups = span(num_steps), span(block_n // num_steps)
        offset = groups[None, None, :, None] * num_steps + steps[:, None, None, None]
        self.order = block_n - 1 - offset if view.mirrored else offset  # of the scan
        if view.mirrored:
            self.position = per_range(ranges.stop - first - block_n) + offset
        elif view.reverse:
            self.position = per_range(ranges.stop - 1 - first) - offset
        else:
            self.position = per_range(ranges.start + first) + offset
        if view.reverse:
            inside = self.position >= per_range(ranges.start)
        else:
            inside = self.position < per_range(ranges.stop)
            if view.wraps:
                inside &= self.position >= per_range(ranges.start)
        self.mask = None if view.full else inside

    def load(self, ref: Ref, other: float = 0.0) -> jax.Array:
        """The tile in float32; `other` beyond the range."""
        x = self.ranges.load(ref, self.position, self.mask, other)
        return _exchanged(x) if self.exchange and self.ranges.view.s.c > 1 else x

    def store(self, ref: Ref, y: jax.Array) -> None:
        self.ranges.store(ref, self.position, y, self.mask)


def _exchanged(x: jax.Array) -> jax.Array:
    """The same tile, in a layout where each lane has all steps of one column (CUB: BlockExchange).

    A lane loads 16 bytes of neighbouring columns, and Triton would keep that layout. But it splits
    a tile only where a lane has both halves. The even and the odd steps are in different lanes, so
    it exchanges the tile for its default layout: neighbouring columns in neighbouring lanes.
    """
    n, *rest = x.shape
    if launch.is_interpreted() or n in (1, x.size):  # Triton crashes on the tile of a single lane
        return x
    return joined(*halves(x.reshape(n // 2, 2, *rest), 1), axis=1).reshape(x.shape)
