"""The static arguments of chunk_cumsum_decay, and how its kernel is launched."""

import dataclasses
from typing import Literal

import jax
from jax.experimental import pallas as pl

from pallas_ops.core import card, checks
from pallas_ops.core.card import Card
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.tiles import power_of_two
from pallas_ops.scan.view import MAX_VECTOR, Sizes, View

Shift = Literal["chunk", "sequence"]

LINE_BYTES = 256  # of columns side by side: half as many cost a third of the speed
TILE_BYTES = 4096  # of a warp's tile with columns
ROW_ELEMENTS = 1024  # of a warp's tile along a last axis
NARROW = 16  # up to so many columns a lane sums 1 or 2 positions, and the rest is across lanes
TALL = 2048  # positions of a column that is loaded at once
MOST_WARPS = 4  # that are chosen for a program
LEAST_SEGMENTS = 8  # of a chunk that is the whole axis: fewer do not make up for another pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkCumsumDecayConfig:
    """Launch choices.

    A program sums `num_chunks` chunks in `block_c` columns, `block_n` positions of each at a time,
    `num_steps` of which are neighbours that a lane adds up on its own. Along a last axis `block_c`
    and `num_steps` are 1: what a lane loads at once are neighbours anyway. Where a chunk takes
    several blocks, their loads run `num_stages` - 1 ahead. A chunk that is the whole axis can be
    cut into `num_segments` segments: x is read twice, first for the sums that segments start from.
    """

    block_n: int
    block_c: int = 1
    num_chunks: int = 1
    num_steps: int = 1
    num_warps: int = 1
    num_stages: int = 1
    num_segments: int = 1

    def __post_init__(self) -> None:
        powers = "block_n", "block_c", "num_chunks", "num_steps", "num_warps"
        checks.launch_choices(self, powers_of_two=powers)
        if self.num_steps > self.block_n:
            raise ValueError(
                f"ChunkCumsumDecayConfig.num_steps is {self.num_steps}; accepted: at most block_n, "
                f"{self.block_n}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments of a call."""

    axis: int
    chunk_size: int
    reverse: bool = False
    shift: Shift | None = None
    scale: float | None = None
    dtypes: tuple[str, str]  # of x and of the result
    axis_name: tuple[str, ...] | None = None
    implementation: Implementation | None = None
    config: ChunkCumsumDecayConfig | None = None
    shift_result: bool = False  # the shift moves the sums, not x (gradients)
    is_gradient: bool = False

    @property
    def name(self) -> str:
        """The name of the op and of its kernel."""
        return "chunk_cumsum_decay" + "_backward" * self.is_gradient

    def transposed(self) -> "Params":
        """The arguments of the gradient; transposed twice, they are the same again."""
        return dataclasses.replace(
            self,
            reverse=not self.reverse,
            shift_result=self.shift == "sequence" and not self.shift_result,
            dtypes=self.dtypes[::-1],
            is_gradient=not self.is_gradient,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The statics of a kernel body."""

    view: View
    c: ChunkCumsumDecayConfig
    params: Params


def plan_of(x: jax.Array, edges: jax.Array | None, params: Params) -> Plan:
    """The plan of a launch along one axis of x."""
    s, n = Sizes.of(x.shape, params.axis, x.dtype.itemsize), x.shape[params.axis]
    size = min(params.chunk_size, n)
    count = pl.cdiv(n, size)
    if edges is not None:  # a short chunk may end at each edge, and begin at the shard's start
        count = (n + edges.size * (size - 1)) // size
    s = dataclasses.replace(s, size=size, count=count)
    c = params.config or choose(s, card.current())
    if edges is None and c.num_segments > 1:
        # There is one chunk; a shift within it is a shift along the sequence.
        s = s.split(c.num_segments, c.block_n)
        params = dataclasses.replace(params, shift=params.shift and "sequence")
    view = View(
        s=s,
        reverse=params.reverse,
        block_n=c.block_n,
        block_c=c.block_c,
        num_ranges=c.num_chunks,
        num_steps=c.num_steps,
        packed=edges is not None,
    )
    return Plan(view=view, c=c, params=params)


def choose(s: Sizes, card: Card) -> ChunkCumsumDecayConfig:
    """Segments for one long chunk, one tile for short ones of few columns, else several tiles."""
    block_c, most = _usual(s)
    if 1 < s.c <= NARROW and most < s.size <= TALL and s.b * s.count * s.c <= 4 * card.num_sms:
        # Too few programs to hide a load's latency: each column's chunk is loaded at once.
        return ChunkCumsumDecayConfig(block_n=power_of_two(s.size), num_warps=MOST_WARPS)
    num_segments = min(8 * card.num_sms // (s.b * pl.cdiv(s.c, block_c)), pl.cdiv(s.n, most))
    if s.count > 1 or num_segments < LEAST_SEGMENTS:
        return _choose_tiles(s, card)
    part = dataclasses.replace(s, size=pl.cdiv(s.n, num_segments), count=num_segments)
    return dataclasses.replace(_choose_tiles(part, card), num_segments=num_segments)


def _usual(s: Sizes) -> tuple[int, int]:
    """Columns of a tile, and positions of the tile of one warp."""
    block_c = min(power_of_two(s.c), LINE_BYTES // s.itemsize)
    return block_c, ROW_ELEMENTS if s.c == 1 else max(64, TILE_BYTES // (block_c * s.itemsize))


def _choose_tiles(s: Sizes, card: Card) -> ChunkCumsumDecayConfig:
    """Whole lines of memory, loads that run ahead, and more warps where the array is small."""
    block_c, most = _usual(s)
    block_n = min(power_of_two(s.size), MOST_WARPS * most if s.c == 1 else most)
    if s.c > NARROW and block_n == 64:
        block_n = min(block_n, power_of_two(s.size) // 2)  # two: one loads while one is summed
    per_warp = ROW_ELEMENTS if s.c == 1 else TILE_BYTES // s.itemsize
    num_chunks = max(1, min(per_warp // (block_n * block_c), power_of_two(s.b * s.count)))
    programs = pl.cdiv(s.c, block_c) * pl.cdiv(s.b * s.count, num_chunks)
    while num_chunks > 1 and programs < 32 * card.num_sms:
        num_chunks //= 2
        programs *= 2
    elements = block_n * num_chunks * block_c
    num_warps = max(1, elements // per_warp)
    vector = MAX_VECTOR // s.itemsize  # numbers that a lane can load at once
    vector = vector if s.c == 1 else min(vector, s.c & -s.c)
    while (
        num_warps < MOST_WARPS
        and programs * (num_warps if s.c > NARROW else 1) < 3 * card.num_sms
        and elements // (32 * num_warps) > 2 * vector
    ):
        num_warps *= 2
    is_one_tile = s.size <= block_n
    if s.c <= NARROW:
        num_steps = 1 if s.c == 1 or (is_one_tile and programs >= 15 * card.num_sms) else 2
    else:
        num_steps = block_n if block_n <= 16 else 8
    return ChunkCumsumDecayConfig(
        block_n=block_n,
        block_c=block_c,
        num_chunks=num_chunks,
        num_steps=min(block_n, num_steps),
        num_warps=num_warps,
        num_stages=1 if is_one_tile else 3,
    )
