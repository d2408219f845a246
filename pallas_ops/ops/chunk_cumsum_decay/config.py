"""How big chunk_cumsum_decay's blocks are."""

import dataclasses

from pallas_ops.core.tiles import power_of_two

LANE_ELEMENTS = 128  # of a tile with columns: what a lane holds in registers
FEW_ELEMENTS = 32  # the same along a last axis, and where loads are narrow
MOST_CHUNKS = 16  # of a tile with columns: of each, where it is takes registers
MAX_WARPS = 4
LEAST_PARTS = 8  # of a chunk that is all of the axis: fewer do not make up for another pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkCumsumDecayConfig:
    """Launch choices.

    A program sums `num_chunks` chunks in `block_c` columns, `block_n` positions of each at a time,
    `num_steps` of which are neighbours that a lane adds up on its own. Along a last axis there are
    no columns and `num_steps` is 1: lanes hold neighbours as it is. Where a chunk takes several
    blocks, their loads run up to `num_stages` ahead. Where one chunk is all of the axis, it can be
    summed in `num_parts` parts at once: x is read twice, first for the sums that parts start from.
    """

    block_n: int
    block_c: int = 1
    num_chunks: int = 1
    num_steps: int = 1
    num_warps: int = 1
    num_stages: int = 1
    num_parts: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"ChunkCumsumDecayConfig.{name} is {value!r}; accepted: an int >= 1"
                )
            if value & (value - 1) and name not in ("num_stages", "num_parts"):
                raise ValueError(
                    f"ChunkCumsumDecayConfig.{name} is {value}; accepted: a power of two"
                )
        if self.num_steps > self.block_n:
            raise ValueError(
                f"ChunkCumsumDecayConfig.num_steps is {self.num_steps}; accepted: at most block_n, "
                f"{self.block_n}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call (per device): an array [b, n, c], each of whose rows has `chunks` chunks."""

    b: int
    n: int
    c: int
    chunks: int
    chunk_size: int
    itemsize: int

    @property
    def vector(self) -> int:
        """Numbers that a lane can load at once."""
        most = 16 // self.itemsize
        return most if self.c == 1 else min(most, self.c & -self.c)


def choose(s: Sizes, *, num_sms: int = 132) -> ChunkCumsumDecayConfig:
    """Full lanes, and where the array is small, rather more warps than full lanes."""
    block_c = min(power_of_two(s.c), 32)
    each = FEW_ELEMENTS if s.c == 1 or s.vector < 4 else LANE_ELEMENTS
    widest = 32 * each // block_c  # positions of a warp
    num_parts = min(2 * num_sms // (s.b * -(-s.c // block_c)), s.n // (4 * widest))
    if s.chunks == 1 and num_parts >= LEAST_PARTS:
        part = dataclasses.replace(s, chunk_size=-(-s.n // num_parts), chunks=num_parts)
        return dataclasses.replace(choose(part, num_sms=num_sms), num_parts=num_parts)
    block_n = min(power_of_two(s.chunk_size), MAX_WARPS * widest)
    if s.c > 1 and block_n < s.chunk_size:
        block_n = widest  # a loop within one warp: nothing to wait for between tiles
    most_chunks = widest if s.c == 1 else MOST_CHUNKS
    num_chunks = max(1, min(widest // block_n, power_of_two(s.b * s.chunks), most_chunks))
    num_warps = max(1, block_n // widest)
    programs = -(-s.c // block_c) * -(-s.b * s.chunks // num_chunks)
    while num_chunks > 1 and programs < 32 * num_sms:
        num_chunks //= 2
        programs *= 2
    elements = block_n * num_chunks * block_c
    while num_warps < MAX_WARPS and programs * num_warps < 8 * num_sms:
        if elements // (32 * num_warps) <= 2 * s.vector:
            break
        num_warps *= 2
    groups = max(1, 32 * num_warps * s.vector // (block_c * num_chunks))
    return ChunkCumsumDecayConfig(
        block_n=block_n,
        block_c=block_c,
        num_chunks=num_chunks,
        num_steps=1 if s.c == 1 else max(1, block_n // groups),
        num_warps=num_warps,
        num_stages=1 if s.chunk_size <= block_n else 3,
    )
