"""What a program of chunk_cumsum_decay sees: which chunks, and where their elements are.

Tiles are [steps, chunks, groups, columns], where position group * steps + step of a chunk, counted
as the sum goes, is in a lane with all its steps: a sum along them moves nothing between lanes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import launch
from pallas_ops.core.tiles import Ref, both, span
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig, Sizes, choose
from pallas_ops.ops.chunk_cumsum_decay.reference import Shift, among, edges

MOST_SLOTS = 2**30  # an int32 counts a program's


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: ChunkCumsumDecayConfig
    packed: bool
    reverse: bool
    shift: Shift | None
    late: bool
    scale: float | None

    @property
    def rows(self) -> int:
        """Rows whose chunks are counted through; the grid's last axis has one part for each."""
        return max(1, min(self.s.b, MOST_SLOTS // self.s.chunks))

    @property
    def grid(self) -> tuple[int, int, int]:
        slots = pl.cdiv(self.rows * self.s.chunks, self.c.num_chunks)
        return pl.cdiv(self.s.c, self.c.block_c), slots, pl.cdiv(self.s.b, self.rows)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.s.chunk_size, self.c.block_n)

    @property
    def backward(self) -> bool:
        """Whether tiles are summed from their end. Otherwise reversal is in the index.

        Which is free, but along a last axis would make loads narrow.
        """
        return self.reverse and self.s.c == 1 and self.c.num_steps == 1

    @property
    def exclusive(self) -> bool:
        """Whether tiles are loaded unshifted and summed without the last: loads stay wide."""
        return self.shift is not None and not self.late and self.s.c == self.c.num_steps == 1

    @property
    def step(self) -> int:
        """To the position that the sum meets next."""
        return -1 if self.reverse else 1

    @property
    def all_slots(self) -> bool:
        """Whether no program has slots without a chunk."""
        s = self.s
        return s.b % self.rows == 0 and self.rows * s.chunks % self.c.num_chunks == 0

    @property
    def full(self) -> bool:
        """Whether all tiles are."""
        even = self.s.n % self.s.chunk_size == 0 and self.s.chunk_size % self.c.block_n == 0
        return even and self.all_slots and not self.packed


def plan_of(
    x: jax.Array,
    cu_seqlens: jax.Array | None,
    *,
    axis: int,
    chunk_size: int,
    config: ChunkCumsumDecayConfig | None,
    **statics: Any,
) -> Plan:
    """How to run along one axis of x."""
    n = x.shape[axis]
    chunk_size = min(chunk_size, n)
    chunks = pl.cdiv(n, chunk_size)
    if cu_seqlens is not None:  # each sequence may end in a short one, as what is around them
        chunks = (n + (cu_seqlens.size + 1) * (chunk_size - 1)) // chunk_size
    s = Sizes(
        b=math.prod(x.shape[:axis]),
        n=n,
        c=math.prod(x.shape[axis + 1 :]),
        chunks=chunks,
        chunk_size=chunk_size,
        itemsize=x.dtype.itemsize,
    )
    return Plan(s, config or choose(s), packed=cu_seqlens is not None, **statics)


def table_of(plan: Plan, cu_seqlens: jax.Array) -> jax.Array:
    """[5, slots]: each chunk's start and stop, its sequence's, and whether there is a sequence."""
    size, bounds = plan.s.chunk_size, edges(cu_seqlens, plan.s.n)
    counts = pl.cdiv(bounds[1:] - bounds[:-1], size)
    ends = jnp.cumsum(counts)
    slot = jnp.arange(plan.s.chunks, dtype=jnp.int32)
    sequence = among(ends, slot)
    last = counts.size - 1
    own = jnp.minimum(sequence, last)
    low, high = bounds[own], bounds[own + 1]
    start = jnp.where(sequence > last, high, low + (slot - (ends - counts)[own]) * size)
    stop = start + jnp.minimum(size, high - start)
    live = (own > 0) & (own < last)
    return jnp.stack([start, stop, low, high, live.astype(jnp.int32)])


class Chunks:
    """One program's chunks and columns: rows, starts, stops and so on, as [1, chunks, 1, 1]."""

    def __init__(self, plan: Plan, table_ref: Ref | None) -> None:
        self.plan, s = plan, plan.s
        slot = (pl.program_id(1) * plan.c.num_chunks + span(plan.c.num_chunks))[None, :, None, None]
        self.index = index = lax.rem(slot, jnp.full_like(slot, s.chunks))
        self.row = pl.program_id(2) * plan.rows + lax.div(slot, jnp.full_like(slot, s.chunks))
        self.live = None
        if table_ref is None:
            self.start = index * s.chunk_size
            size = jnp.full_like(index, s.chunk_size)
            if s.n % s.chunk_size:  # what is left is compared: start + size may be beyond int32
                size = jnp.minimum(size, s.n - self.start)
            self.stop = self.start + size
            low, high = jnp.zeros_like(index), jnp.full_like(index, s.n)
        else:
            facts = [table_ref.at[jnp.full_like(index, i), index] for i in range(5)]
            self.start, self.stop, low, high, live = map(plgpu.load, facts)
            self.live = live > 0
        self.low, self.high = (low, high) if plan.shift == "sequence" else (self.start, self.stop)
        if not plan.all_slots:
            there = (slot < plan.rows * s.chunks) & (self.row < s.b)
            self.stop = jnp.where(there, self.stop, self.start)
        column = pl.program_id(0) * plan.c.block_c + span(plan.c.block_c)
        self.column = column[None, None, None, :]
        self.inside = self.column < s.c if s.c % plan.c.block_c else None

    @property
    def tiles(self) -> Any:
        """Of the longest chunk."""
        if not self.plan.packed:
            return self.plan.tiles
        return pl.cdiv(jnp.max(self.stop - self.start), self.plan.c.block_n)

    def reaches(self, position: jax.Array, steps: int) -> jax.Array:
        """Whether a position, `steps` beside one of the chunk, is within what a shift may cross."""
        return position >= self.low if steps < 0 else position < self.high

    def edge(self) -> tuple[jax.Array, jax.Array]:
        """What is just before each chunk, as the sum goes, and whether a shift may cross to it."""
        position = self.stop if self.plan.reverse else self.start - 1
        there = (self.start < self.stop) & self.reaches(position, -self.plan.step)
        return position, there

    def load(self, ref: Ref, position: jax.Array, mask: jax.Array | None) -> jax.Array:
        """In float32, 0 where there is none."""
        at, mask = self._at(position, mask)
        x = plgpu.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)
        return x.astype(jnp.float32)

    def store(self, ref: Ref, position: jax.Array, mask: jax.Array | None, y: jax.Array) -> None:
        at, mask = self._at(position, mask)
        plgpu.store(ref.at[at], y.astype(ref.dtype), mask=mask)

    def _at(self, position: jax.Array, mask: jax.Array | None) -> Any:
        """Index and mask, both of the tile's shape."""
        mask = both(mask, self.inside)
        shape = jnp.broadcast_shapes(position.shape, self.row.shape, self.column.shape)
        if mask is not None:
            mask = jnp.broadcast_to(mask, shape)
        if mask is not None and launch.is_interpreted():
            # which writes back what is masked, so not to where another lane writes
            position = jnp.where(mask, position, self.plan.s.n)
        return (self.row, position, self.column), mask


class Tile:
    """`block_n` positions of each of a program's chunks."""

    def __init__(self, chunks: Chunks, t: jax.Array | int) -> None:
        self.chunks, self.plan = chunks, chunks.plan
        c = self.plan.c
        steps, groups = span(c.num_steps), span(c.block_n // c.num_steps)
        offset = groups[None, None, :, None] * c.num_steps + steps[:, None, None, None]
        if self.plan.reverse and not self.plan.backward:
            self.position = chunks.stop - 1 - t * c.block_n - offset
            inside = self.position >= chunks.start
        else:
            self.position = chunks.start + t * c.block_n + offset
            inside = self.position < chunks.stop
        self.mask = None if self.plan.full else inside

    def load(self, ref: Ref) -> jax.Array:
        """What is summed."""
        plan, position = self.plan, self.position
        mask = both(self.mask, self.chunks.live)
        if plan.shift and not plan.late and not plan.exclusive:
            position = position - plan.step
            mask = both(mask, self.chunks.reaches(position, -plan.step))
        x = self.chunks.load(ref, position, mask)
        return x if plan.scale is None else x * plan.scale

    def store(self, ref: Ref, y: jax.Array) -> None:
        position, mask = self.position, self.mask
        if self.plan.late:
            position = position + self.plan.step
            mask = both(mask, self.chunks.reaches(position, self.plan.step))
        self.chunks.store(ref, position, mask, y)


def load_edges(chunks: Chunks, ref: Ref) -> jax.Array | None:
    """What exclusive sums start from, if not from nothing: each chunk's neighbour."""
    if not chunks.plan.exclusive or chunks.plan.shift == "chunk":
        return None
    position, mask = chunks.edge()
    x = chunks.load(ref, position, both(mask, chunks.live))
    return x if chunks.plan.scale is None else x * chunks.plan.scale


def store_edges(chunks: Chunks, ref: Ref) -> None:
    """The zeros with which a late shift begins a sequence."""
    c = chunks.plan.c
    position, mask = chunks.edge()
    mask = (chunks.start < chunks.stop) & ~mask
    zeros = jnp.zeros((1, c.num_chunks, 1, c.block_c))
    chunks.store(ref, position + chunks.plan.step, mask, zeros)
