"""How big logcumsumexp's blocks are."""

import dataclasses
import math
from typing import Literal

from pallas_ops.core import checks
from pallas_ops.core.tiles import power_of_two

ROW_ELEMENTS = 1024  # of a tile along the last axis
TILE_BYTES = 8192  # of a tile along another
WARP_BYTES = 4096  # of a tile, for each warp; half of that along another axis than the last
STEPS = 16  # of a lane through a tile, where parts of the axis have a program each
HELD = 32  # more positions of a lane take a second program's registers
WIDEST = 64  # columns: 128 bytes of memory side by side


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogcumsumexpConfig:
    """Launch choices, forward and backward.

    A program goes through one of `num_parts` parts of the axis, `block_n` positions at a time, in
    `block_c` columns (rows, when the axis is the last). In parts along another axis than the last,
    with up to 16 positions at a time, each lane goes through a stretch of its own; going forward,
    the sums of its last `held_n` positions stay in registers, not to be made twice. Else the
    variant `parallel` (xopes' ptr) holds them as a tile, in which each lane sums a group of
    neighbours, and groups are scanned; `recurrence` (rtr) steps through them, every column in a
    lane of its own. Where a tile's range is too wide for one pivot, it is done again exactly,
    `block_exact` positions at a time. A lane's steps through a tile are added one by one, which may
    take 2**-24 from a result each: with more than 32 of them (`recurrence`, or large tiles in few
    warps) results are exact to that only. Going backward, what was remembered of the forward pass
    is a pair of float32 for every `block_n` positions.
    """

    variant: Literal["parallel", "recurrence"] = "parallel"
    block_n: int
    block_c: int = 1
    block_exact: int = 256
    held_n: int = 0
    num_parts: int = 1
    num_warps: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.variant not in ("parallel", "recurrence"):
            raise ValueError(
                f"LogcumsumexpConfig.variant is {self.variant!r}; accepted: 'parallel', "
                "'recurrence'"
            )
        powers = "block_n", "block_c", "block_exact", "num_warps"
        checks.launch_choices(self, powers_of_two=powers, least={"held_n": 0})


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

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int, itemsize: int) -> "Sizes":
        """Of an array, along one axis."""
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        last = inner == 1
        b, c = (1, outer) if last else (outer, inner)
        return cls(b=b, n=shape[axis], c=c, last=last, itemsize=itemsize)

    def small(self, num_sms: int = 132) -> bool:
        """Whether usual tiles are too few to hide what each waits for."""
        return not self.last and self.b * self.n * self.c * self.itemsize < 2 * num_sms * WARP_BYTES


def choose_block_n(s: Sizes) -> int:
    """Positions of a tile."""
    if s.last:
        return min(power_of_two(s.n), ROW_ELEMENTS)
    if not fills(s):
        return min(power_of_two(s.n), STEPS // 2 if s.c % 4 else STEPS)
    return min(power_of_two(s.n), TILE_BYTES // s.itemsize // min(power_of_two(s.c), WIDEST))


def choose(
    s: Sizes, block_n: int, *, backward: bool = False, num_sms: int = 132
) -> LogcumsumexpConfig:
    """The launch for tiles of `block_n` positions."""
    if not s.last and not fills(s, num_sms=num_sms) and block_n <= STEPS:
        return _choose_parts(s, block_n, backward=backward, num_sms=num_sms)
    most = ROW_ELEMENTS if s.last else TILE_BYTES // s.itemsize
    widest = 8 if s.last else 16 if s.small(num_sms) else WIDEST
    block_c = min(power_of_two(s.c), widest, max(1, most // block_n))
    # Narrow loads take more registers.
    narrow = not s.last and (s.c % 4 > 0 or (backward and block_c < 16))
    warp_bytes = WARP_BYTES if s.last else WARP_BYTES // 2
    num_warps = max(1, block_n * block_c * s.itemsize // warp_bytes) << narrow
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
        num_stages=1 if s.last else 3,
    )


def _choose_parts(s: Sizes, block_n: int, *, backward: bool, num_sms: int) -> LogcumsumexpConfig:
    """Parts of the axis, whose lanes step through stretches: as many as run at once."""
    share, columns = s.b * s.n * s.c * s.itemsize // num_sms, s.b * s.c
    # Columns and warps of a program, programs that run at once, positions held.
    if share < WARP_BYTES or s.n <= 8 * STEPS:
        widest, num_warps, at_once, held_n = 16, 1, 4, HELD
    elif share <= 16 * WARP_BYTES and columns <= num_sms * WIDEST // 2 and not backward:
        widest, num_warps, at_once, held_n = WIDEST // 2, 4, 2, HELD
    elif columns <= WIDEST and not backward:
        widest, num_warps, at_once, held_n = WIDEST, 16, 1, HELD
    else:
        widest, num_warps, at_once, held_n = WIDEST, 8, 2, 0
    block_c = min(power_of_two(s.c), widest)
    stretches, blocks = num_warps * 64 // block_c, s.b * -(-s.c // block_c)
    tiles, most_parts = -(-s.n // block_n), max(1, at_once * num_sms // blocks)
    each = -(-tiles // (most_parts * stretches))
    return LogcumsumexpConfig(
        block_n=block_n,
        block_c=block_c,
        held_n=held_n,
        num_parts=-(-tiles // (each * stretches)),
        num_warps=num_warps,
    )


def fills(s: Sizes, *, num_sms: int = 132) -> bool:
    """Whether the columns alone make as many programs as the card needs."""
    if s.last:
        return s.c >= 2 * num_sms
    return s.b * -(-s.c // WIDEST) >= num_sms
