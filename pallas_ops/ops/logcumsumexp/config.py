"""How big logcumsumexp's blocks are."""

import dataclasses
from typing import Literal

from pallas_ops.core.tiles import power_of_two

PARALLEL_ELEMENTS = 2048  # of a tile: 64 a lane of one warp


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogcumsumexpConfig:
    """Launch choices, forward and backward.

    A program goes through one of `num_parts` parts of the axis, `block_n` positions at a time, in
    `block_c` columns (rows, when the axis is the last). The variant `parallel` (the seeds' ptr)
    holds them as a tile and scans it; `recurrence` (rtr) steps through them, every column in a lane
    of its own. Where a tile's range is too wide for one pivot, it is done again exactly,
    `block_exact` positions at a time. Going backward, what was remembered of the forward pass is
    a pair of float32 for every `block_n` positions.
    """

    variant: Literal["parallel", "recurrence"] = "parallel"
    block_n: int
    block_c: int = 1
    block_exact: int = 256
    num_parts: int = 1
    num_warps: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.variant not in ("parallel", "recurrence"):
            raise ValueError(
                f"LogcumsumexpConfig.variant is {self.variant!r}; accepted: 'parallel', "
                "'recurrence'"
            )
        for name in ("block_n", "block_c", "block_exact", "num_parts", "num_warps", "num_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"LogcumsumexpConfig.{name} is {value!r}; accepted: an int >= 1")
            if value & (value - 1) and name not in ("num_parts", "num_stages"):
                raise ValueError(f"LogcumsumexpConfig.{name} is {value}; accepted: a power of two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call (per device): `b` times an axis of `n` beside `c` columns.

    Where the axis is the last one, `b` is 1 and the columns are the array's rows.
    """

    b: int
    n: int
    c: int
    last: bool
    itemsize: int


def choose_block_n(n: int, c: int) -> int:
    """Positions of a tile, by the length of the axis and the columns beside it (1: the last)."""
    width = min(32, power_of_two(c))
    return min(power_of_two(n), max(64, PARALLEL_ELEMENTS // width))


def choose(
    s: Sizes, block_n: int, *, backward: bool = False, num_sms: int = 132
) -> LogcumsumexpConfig:
    """The launch for tiles of `block_n` positions."""
    widest = max(1, PARALLEL_ELEMENTS // block_n)
    block_c = min(power_of_two(s.c), widest, 8 if s.last else 16 if backward else 64)
    elements = block_n * block_c
    blocks = s.b * -(-s.c // block_c)
    tiles = -(-s.n // block_n)
    num_parts = 1 if blocks >= 2 * num_sms else max(1, min(511, tiles, 8 * num_sms // blocks))
    return LogcumsumexpConfig(
        block_n=block_n,
        block_c=block_c,
        block_exact=max(1, min(block_n, 512 // block_c)),
        num_parts=num_parts,
        num_warps=max(1, min(4, elements // (1024 if backward else 2048))),
        num_stages=1 if s.last else 3 if backward else 4,
    )
