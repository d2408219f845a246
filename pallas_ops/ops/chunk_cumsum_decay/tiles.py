"""What a program of chunk_cumsum_decay sees: its chunks, and the tiles that it loads and stores.

A shift may cross the end of a chunk, but not that of a sequence: positions beside a chunk are
loaded or stored with the bounds of what a shift may cross.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, both
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig, choose
from pallas_ops.ops.chunk_cumsum_decay.reference import Shift, among
from pallas_ops.scan.tile import Ranges, Tile, per_range
from pallas_ops.scan.view import Sizes, View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The statics of a kernel body."""

    view: View
    c: ChunkCumsumDecayConfig
    shift: Shift | None
    shift_result: bool  # the result is shifted, not x
    scale: float | None

    @property
    def exclusive(self) -> bool:
        """Whether tiles are loaded unshifted and sums exclude their own position.

        So along a last axis the loads stay wide.
        """
        return (
            self.shift is not None
            and not self.shift_result
            and self.view.s.c == self.c.num_steps == 1
        )

    @property
    def step(self) -> int:
        """To the position that the sum meets next."""
        return -1 if self.view.reverse else 1


def plan_of(
    x: jax.Array,
    edges: jax.Array | None,
    *,
    axis: int,
    chunk_size: int,
    config: ChunkCumsumDecayConfig | None,
    reverse: bool,
    **statics: Any,
) -> Plan:
    """How to run along one axis of x."""
    s, n = Sizes.of(x.shape, axis, x.dtype.itemsize), x.shape[axis]
    size = min(chunk_size, n)
    count = pl.cdiv(n, size)
    if edges is not None:  # what is between two edges may end in a short one, or begin in one
        count = (n + edges.size * (size - 1)) // size
    s = dataclasses.replace(s, size=size, count=count)
    c = config or choose(s, card.current())
    view = View(
        s=s,
        reverse=reverse,
        block_n=c.block_n,
        block_c=c.block_c,
        num_ranges=c.num_chunks,
        num_steps=c.num_steps,
        packed=edges is not None,
    )
    return Plan(view=view, c=c, **statics)


def table_of(plan: Plan, edges: jax.Array, size: int) -> jax.Array:
    """[5, slots]: each chunk's start and stop, its sequence's, and whether there is a sequence.

    All of them within the axis. A sequence's chunks are counted from its own edge, which may be
    before the axis.
    """
    s = plan.view.s
    bounds = jnp.clip(edges, 0, s.n)
    skipped = (bounds[:-1] - edges[:-1]) // size
    counts = pl.cdiv(bounds[1:] - edges[:-1], size) - skipped
    counts = jnp.where(bounds[:-1] < bounds[1:], counts, 0)
    ends = jnp.cumsum(counts)
    slot = jnp.arange(s.count, dtype=jnp.int32)
    sequence = among(ends, slot)
    last = counts.size - 1
    own = jnp.minimum(sequence, last)
    low, high = bounds[own], bounds[own + 1]
    begin = edges[own] + (slot - (ends - counts - skipped)[own]) * size
    start = jnp.where(sequence > last, high, jnp.maximum(begin, low))
    stop = jnp.where(sequence > last, high, begin + jnp.minimum(size, high - begin))
    live = (own > 0) & (own < last)
    return jnp.stack([start, stop, low, high, live.astype(jnp.int32)])


class Chunks(Ranges):
    """One program's chunks, and between which positions each may be shifted [chunks, 1]."""

    def __init__(self, plan: Plan, table_ref: Ref | None) -> None:
        self.plan, self.table_ref = plan, table_ref
        self.live: jax.Array | None = None  # whether a chunk is of a sequence; None if all are
        super().__init__(plan.view)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        if self.table_ref is None:
            start, stop = super().bounds()
            low, high = jnp.zeros_like(start), jnp.full_like(start, self.view.s.n)
        else:
            number = self.number
            facts = [self.table_ref.at[jnp.full_like(number, i), number] for i in range(5)]
            start, stop, low, high, live = map(plgpu.load, facts)
            self.live = live > 0
        self.low, self.high = (low, high) if self.plan.shift == "sequence" else (start, stop)
        return start, stop

    @property
    def tiles(self) -> Any:
        """Of the longest chunk."""
        if not self.view.packed:
            return self.view.tiles
        return pl.cdiv(jnp.max(self.stop - self.start), self.view.block_n)

    @property
    def is_first(self) -> jax.Array:
        """Whether a chunk is where the sum begins."""
        edge = self.stop == self.view.s.n if self.view.reverse else self.start == 0
        return edge & (self.start < self.stop)

    def load_tile(self, tile: Tile, ref: Ref) -> jax.Array:
        """What is summed."""
        plan, position = self.plan, tile.position
        mask = both(tile.mask, None if self.live is None else per_range(self.live))
        if plan.shift and not plan.shift_result and not plan.exclusive:
            position = position - plan.step
            mask = both(mask, self._reaches(position, -plan.step))
        return self._scaled(self.load(ref, position, mask))

    def store_tile(self, tile: Tile, ref: Ref, y: jax.Array) -> None:
        position, mask = tile.position, tile.mask
        if self.plan.shift_result:
            position = position + self.plan.step
            mask = both(mask, self._reaches(position, self.plan.step))
        self.store(ref, position, y, mask)

    def load_edges(self, ref: Ref) -> jax.Array | None:
        """What exclusive sums start from, if not from nothing: each chunk's neighbour."""
        if not self.plan.exclusive or self.plan.shift == "chunk":
            return None
        position, mask = self._edge()
        return self._scaled(self.load(ref, position, both(mask, self.live)))

    def store_edges(self, ref: Ref) -> None:
        """The zeros with which a shift of the result begins a sequence."""
        position, reached = self._edge()
        mask = (self.start < self.stop) & ~reached
        zeros = jnp.zeros(self.shape, jnp.float32)
        self.store(ref, position + self.plan.step, zeros, mask)

    def _edge(self) -> tuple[jax.Array, jax.Array]:
        """What is just before each chunk, as the sum goes, and whether a shift may cross to it."""
        position = self.stop if self.view.reverse else self.start - 1
        there = (self.start < self.stop) & self._reaches(position, -self.plan.step)
        return position, there

    def _reaches(self, position: jax.Array, steps: int) -> jax.Array:
        """Whether a position, `steps` beside one of the chunk, is within what a shift may cross."""
        low, high = self.low, self.high
        if position.ndim == 4:
            low, high = per_range(low), per_range(high)
        return position >= low if steps < 0 else position < high

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.plan.scale is None else x * self.plan.scale
