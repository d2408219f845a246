"""How big logcumsumexp's blocks are."""

import dataclasses
from typing import Literal

from pallas_ops.core.tiles import power_of_two

ROW_ELEMENTS = 1024  # of a tile along the last axis
TILE_ELEMENTS = 8192  # of a tile along another
WARP_BYTES = 4096  # of a tile, for each warp
WIDEST = 64  # columns: 128 bytes of memory side by side


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

    def small(self, num_sms: int = 132) -> bool:
        """Whether usual tiles are too few to hide what each waits for."""
        return not self.last and self.b * self.n * self.c * self.itemsize < 2 * num_sms * WARP_BYTES


def choose_block_n(n: int, c: int, *, alone: bool = False) -> int:
    """Positions of a tile, by the length of the axis and the columns beside it (1: the last).

    The forward pass alone has twice as many as where a backward pass, which has registers for half,
    needs what it remembers of each tile.
    """
    most = ROW_ELEMENTS if c == 1 else TILE_ELEMENTS if alone else TILE_ELEMENTS // 2
    return min(power_of_two(n), most // min(power_of_two(c), WIDEST))


def choose(
    s: Sizes, block_n: int, *, backward: bool = False, num_sms: int = 132
) -> LogcumsumexpConfig:
    """The launch for tiles of `block_n` positions."""
    most = ROW_ELEMENTS if s.last else TILE_ELEMENTS
    widest = 8 if s.last else 16 if s.small(num_sms) else WIDEST // 2 if backward else WIDEST
    block_c = min(power_of_two(s.c), widest, max(1, most // block_n))
    narrow = s.c % 4 > 0 or (backward and block_c < 16)  # which takes more registers
    num_warps = max(1, block_n * block_c * s.itemsize // WARP_BYTES) << (narrow and not s.last)
    blocks, tiles = s.b * -(-s.c // block_c), -(-s.n // block_n)
    # Parts wait for each other, so that all run at once; whose registers are 8 warps', or 16.
    most_parts = min(512, (16 if s.last else 8) * num_sms // (num_warps * blocks))
    each = 1 + (tiles - 1) // max(1, most_parts)
    num_parts = 1 if fills(s, num_sms=num_sms) else -(-tiles // each)
    return LogcumsumexpConfig(
        block_n=block_n,
        block_c=block_c,
        block_exact=min(block_n, (256 if backward else 512) // block_c if s.last else 32),
        num_parts=num_parts,
        num_warps=num_warps,
        num_stages=1 if s.last else 2 if num_parts == 1 or backward else 3,
    )


def fills(s: Sizes, *, num_sms: int = 132) -> bool:
    """Whether the columns alone make as many programs as the card needs."""
    if s.last:
        return s.c >= 2 * num_sms
    return s.b * -(-s.c // WIDEST) >= num_sms
