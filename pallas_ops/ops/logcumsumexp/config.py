"""How big logcumsumexp's blocks are."""

import dataclasses
from typing import Literal

from pallas_ops.core import checks
from pallas_ops.core.tiles import power_of_two
from pallas_ops.scan.view import Sizes

ROW_ELEMENTS = 1024  # of a tile along a last axis
TILE_BYTES = 8192  # of a tile with columns
WARP_BYTES = 4096  # of a warp's tile along a last axis; half of that with columns
WIDEST, NARROWER = 64, 32  # columns of a tile: 128 or 64 bytes of memory side by side
MOST_ROWS = 8  # of a program along a last axis
MOST_SEGMENTS = 528


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogcumsumexpConfig:
    """Launch choices, forward and backward.

    A program scans one of `num_segments` segments of the axis, `block_n` positions at a time, in
    `block_c` columns (rows, where the axis is the last). With more than one segment x is read
    twice: first for the totals of all segments. The variant `parallel` (xopes' ptr) has one pivot
    for a tile; where a tile's range is too large for that, it scans states instead, `block_exact`
    positions at a time. The variant `recurrence` (rtr) does so everywhere, with every column in a
    lane of its own. A lane's steps through a tile are added one by one, which may take 2**-24 from
    a result each: with more than 32 of them results are exact to that only. For the backward pass
    the forward pass saves a pair of float32 for every `block_n` positions.
    """

    variant: Literal["parallel", "recurrence"] = "parallel"
    block_n: int
    block_c: int = 1
    block_exact: int = 256
    num_segments: int = 1
    num_warps: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.variant not in ("parallel", "recurrence"):
            raise ValueError(
                f"LogcumsumexpConfig.variant is {self.variant!r}; accepted: 'parallel', "
                "'recurrence'"
            )
        powers = "block_n", "block_c", "block_exact", "num_warps"
        checks.launch_choices(self, powers_of_two=powers)


def choose_block_n(s: Sizes, *, num_sms: int = 132) -> int:
    """Positions of a tile."""
    most = ROW_ELEMENTS if s.c == 1 else TILE_BYTES // s.itemsize // _block_c(s, num_sms)
    return min(power_of_two(s.n), most)


def choose(
    s: Sizes, block_n: int, *, backward: bool = False, num_sms: int = 132
) -> LogcumsumexpConfig:
    """The launch for tiles of `block_n` positions."""
    widest = min(power_of_two(s.b), MOST_ROWS) if s.c == 1 else _block_c(s, num_sms)
    most = ROW_ELEMENTS if s.c == 1 else TILE_BYTES // s.itemsize
    block_c = max(1, min(widest, most // block_n))
    num_segments = _num_segments(s, block_n, block_c, backward, num_sms)
    warp_bytes = WARP_BYTES if s.c == 1 else WARP_BYTES // 2
    exact = 2048 if s.c > 1 else 256 if backward else 512  # elements
    return LogcumsumexpConfig(
        block_n=block_n,
        block_c=block_c,
        block_exact=max(1, min(block_n, exact // block_c)),
        num_segments=num_segments,
        num_warps=max(1, block_n * block_c * s.itemsize // warp_bytes),
        num_stages=1 if s.c == 1 else 2 if backward and num_segments == 1 else 3,
    )


def _block_c(s: Sizes, num_sms: int) -> int:
    """Half as many columns where that makes enough programs without segments."""
    if _programs(s, WIDEST) < num_sms <= _programs(s, NARROWER) + 4:
        return NARROWER
    return min(power_of_two(s.c), WIDEST)


def _programs(s: Sizes, block_c: int) -> int:
    return s.b * -(-s.c // block_c)


def _num_segments(s: Sizes, block_n: int, block_c: int, backward: bool, num_sms: int) -> int:
    """Some warps to each multiprocessor, of at least two tiles each."""
    programs = _programs(s, block_c)
    if programs >= num_sms - 4:
        return 1
    each = 16 if s.c == 1 else 2 if backward else 4  # programs of a multiprocessor
    return max(1, min(each * num_sms // programs, MOST_SEGMENTS, -(-s.n // block_n) // 2))
