"""What a program of chunk_cumsum_decay sees: its chunks, and the tiles that it loads and stores.

A shift may cross the end of a chunk, but not that of a sequence: positions beside a chunk are
loaded or stored with the bounds of what a shift may cross.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, and_masks
from pallas_ops.ops.chunk_cumsum_decay.config import Plan
from pallas_ops.ops.chunk_cumsum_decay.reference import count_at_most
from pallas_ops.scan.tile import Ranges, Tile, per_range


def table_of(plan: Plan, edges: jax.Array) -> jax.Array:
    """[5, slots]: each chunk's start and stop, its sequence's, and whether there is a sequence.

    All of them within the axis. A sequence's chunks are counted from its own edge, which may be
    before the axis: the chunks that end there are skipped, and have no slot. The other chunks of
    all sequences lie one after the other; slots that are left over are empty.
    """
    s, size = plan.view.s, plan.params.chunk_size
    bounds = jnp.clip(edges, 0, s.n)
    skipped = (bounds[:-1] - edges[:-1]) // size
    counts = (bounds[1:] - edges[:-1] - 1) // size + 1 - skipped  # `pl.cdiv` would add first
    counts = jnp.where(bounds[:-1] < bounds[1:], counts, 0)
    ends = jnp.cumsum(counts)
    first_slot = ends - counts
    slot = jnp.arange(s.count, dtype=jnp.int32)
    sequence = count_at_most(ends, slot)  # of each slot; beyond the last for an empty one
    last = counts.size - 1
    own = jnp.minimum(sequence, last)
    low, high = bounds[own], bounds[own + 1]
    begin = edges[own] + (slot - first_slot[own] + skipped[own]) * size
    start = jnp.where(sequence > last, high, jnp.maximum(begin, low))
    stop = jnp.where(sequence > last, high, begin + jnp.minimum(size, high - begin))
    live = (own > 0) & (own < last)
    return jnp.stack([start, stop, low, high, live.astype(jnp.int32)])


class Chunks(Ranges):
    """One program's chunks, and between which positions each may be shifted [chunks, 1]."""

    def __init__(self, plan: Plan, table_ref: Ref | None) -> None:
        self.params, self.table_ref = plan.params, table_ref
        self.step = -1 if plan.view.reverse else 1  # to the position that the sum meets next
        self.shifts_x = self.params.shift is not None and not self.params.shift_result
        # Along a last axis the shift is not in the loads, which then would not be aligned: each sum
        # leaves out its own position instead.
        self.exclusive = self.shifts_x and plan.view.s.c == plan.c.num_steps == 1
        self.live: jax.Array | None = None  # whether a chunk is of a sequence; None if all are
        super().__init__(plan.view)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        if self.table_ref is None:
            start, stop = super().bounds()
            low, high = jnp.zeros_like(start), jnp.full_like(start, self.view.s.n)
        else:
            facts = (plgpu.load(self.table_ref.at[i, self.number]) for i in range(5))
            start, stop, low, high, live = facts
            self.live = live > 0
        self.low, self.high = (low, high) if self.params.shift == "sequence" else (start, stop)
        return start, stop

    @property
    def tiles(self) -> Any:
        """How many tiles the longest chunk has."""
        if self.view.tiles == 1 or not self.view.packed:
            return self.view.tiles
        return pl.cdiv(jnp.max(self.stop - self.start), self.view.block_n)

    @property
    def is_first(self) -> jax.Array:
        """Whether a chunk is the first one, in the direction of the sum, and not empty."""
        edge = self.stop == self.view.s.n if self.view.reverse else self.start == 0
        return edge & (self.start < self.stop)

    def load_tile(self, tile: Tile, ref: Ref) -> jax.Array:
        """The numbers to sum: x, scaled and shifted."""
        position = tile.position
        mask = and_masks(tile.mask, None if self.live is None else per_range(self.live))
        if self.shifts_x and not self.exclusive:
            position = position - self.step
            mask = and_masks(mask, self._may_cross(position, -self.step))
        return self._scaled(self.load(ref, position, mask))

    def store_tile(self, tile: Tile, ref: Ref, y: jax.Array) -> None:
        position, mask = tile.position, tile.mask
        if self.params.shift_result:
            position = position + self.step
            mask = and_masks(mask, self._may_cross(position, self.step))
        self.store(ref, position, y, mask)

    def load_edges(self, ref: Ref) -> jax.Array | None:
        """The x before each chunk, for exclusive sums shifted along the sequence; else None."""
        if not self.exclusive or self.params.shift == "chunk":
            return None
        position, mask = self._edge()
        return self._scaled(self.load(ref, position, and_masks(mask, self.live)))

    def store_edges(self, ref: Ref) -> None:
        """Stores the zero with which each sequence begins where the result is shifted."""
        position, reached = self._edge()
        mask = (self.start < self.stop) & ~reached
        zeros = jnp.zeros(self.shape, jnp.float32)
        self.store(ref, position + self.step, zeros, mask)

    def _edge(self) -> tuple[jax.Array, jax.Array]:
        """The position before each chunk in scan direction, and whether a shift may cross to it."""
        position = self.stop if self.view.reverse else self.start - 1
        there = (self.start < self.stop) & self._may_cross(position, -self.step)
        return position, there

    def _may_cross(self, position: jax.Array, step: int) -> jax.Array:
        """Whether a shift may cross to a position that is one `step` from one of the chunk."""
        low, high = self.low, self.high
        if position.ndim == 4:
            low, high = per_range(low), per_range(high)
        return position >= low if step < 0 else position < high

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.params.scale is None else x * self.params.scale
