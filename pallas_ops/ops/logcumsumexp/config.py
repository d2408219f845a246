"""The static arguments of logcumsumexp, and how its kernels are launched."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core import card, checks
from pallas_ops.core.card import Card
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.tiles import power_of_two
from pallas_ops.scan.view import MAX_VECTOR, Sizes, View

ROW_ELEMENTS = 1024  # of a tile along a last axis
TILE_BYTES = 8192  # of a tile with columns
WARP_BYTES = 4096  # of a warp's tile where lanes have whole columns; else a half or a quarter
WIDEST, NARROWER = 64, 32  # columns of a tile: in 16 bits 128 or 64 bytes of memory
MOST_ROWS = 8  # of a program along a last axis
USUAL_SMS = 132  # multiprocessors assumed where saved states must not depend on the card
SPARE_SMS = 4  # multiprocessors that may be idle before an axis is cut into segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogcumsumexpConfig:
    """Launch choices, forward and backward.

    A program scans one of `num_segments` segments of the axis, `block_n` positions at a time, in
    `block_c` columns (along a last axis: `block_c` segments, of one row or more); loads run
    `num_stages` - 1 tiles ahead. With several segments x is read twice, first for their totals.
    The variant `parallel` (xopes' ptr) has one pivot for a tile; where a tile's range is too large
    for that, it scans states instead, `block_exact` positions at a time. The variant `recurrence`
    (rtr) does so everywhere, with every column in a lane of its own. A lane adds up its positions
    of a tile one by one, with a rounding error of at most 2**-24 of the sum each. By default these
    are 32 at most, and 64 in gradients of 16-bit inputs. For gradients a pair of float32 is saved
    for every `block_n` positions.
    """

    variant: Literal["parallel", "recurrence"] = "parallel"
    block_n: int
    block_c: int = 1
    block_exact: int = 256
    num_segments: int = 1
    num_warps: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        checks.one_of("LogcumsumexpConfig.variant", self.variant, ("parallel", "recurrence"))
        powers = "block_n", "block_c", "block_exact", "num_warps"
        checks.launch_choices(self, powers_of_two=powers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments of a call."""

    axis: int
    reverse: bool = False
    clip: float | None = None
    block_n: int  # positions of a tile
    axis_name: tuple[str, ...] | None = None
    implementation: Implementation | None = None
    config: LogcumsumexpConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The statics of a kernel body."""

    view: View
    c: LogcumsumexpConfig
    clip: float | None

    @property
    def num_tiles(self) -> int:
        """Tiles of the whole axis."""
        return pl.cdiv(self.view.s.n, self.c.block_n)

    @property
    def block_exact(self) -> int:
        recurrence = self.c.variant == "recurrence"
        return self.c.block_n if recurrence else min(self.c.block_exact, self.c.block_n)

    def shape(self, size: int) -> jax.ShapeDtypeStruct:
        """The type of a float32 array [b, size, c]."""
        return jax.ShapeDtypeStruct((self.view.s.b, size, self.view.s.c), jnp.float32)


def plan_of(x: jax.Array, params: Params, *, backward: bool = False) -> Plan:
    """The plan of a launch along one axis of x."""
    s = Sizes.of(x.shape, params.axis, x.dtype.itemsize)
    c = params.config or choose(s, params.block_n, card.current(), backward=backward)
    view = View(
        s=s.split(c.num_segments, c.block_n),
        reverse=params.reverse,
        from_end=params.reverse,
        block_n=c.block_n,
        block_c=1 if s.c == 1 else c.block_c,
        num_ranges=c.block_c if s.c == 1 else 1,
        num_steps=num_steps(s, c, c.block_n),
    )
    return Plan(view=view, c=c, clip=params.clip)


def num_steps(s: Sizes, c: LogcumsumexpConfig, block_n: int) -> int:
    """Positions of a tile in each lane: a vector of a last axis; else all of one column's share."""
    most = MAX_VECTOR // s.itemsize if s.c == 1 else block_n
    return min(block_n, most, max(1, block_n * c.block_c // (32 * c.num_warps)))


def choose_block_n(s: Sizes) -> int:
    """Positions of a tile: the same on every card, since a state is saved before each tile."""
    if s.c == 1:
        return min(power_of_two(s.n), ROW_ELEMENTS)
    block_n = TILE_BYTES // s.itemsize // min(power_of_two(s.c), WIDEST)
    if _programs(s, WIDEST) < USUAL_SMS <= _programs(s, NARROWER) + SPARE_SMS:
        block_n *= 2  # then half as many columns make enough programs without segments
    return min(power_of_two(s.n), block_n)


def choose(s: Sizes, block_n: int, card: Card, *, backward: bool = False) -> LogcumsumexpConfig:
    """The launch for tiles of `block_n` positions."""
    most = ROW_ELEMENTS if s.c == 1 else TILE_BYTES // s.itemsize
    widest = min(power_of_two(s.b), MOST_ROWS) if s.c == 1 else min(power_of_two(s.c), WIDEST)
    block_c = max(1, min(widest, most // block_n))
    tiles = pl.cdiv(s.n, block_n)
    is_short = s.c > 1 and _programs(s, block_c) * tiles <= card.num_sms
    if is_short:  # then more programs, of as many warps
        block_c = min(block_c, NARROWER)
    num_segments = _num_segments(s, tiles, block_c, card)
    in_segments = 1 < num_segments < tiles
    # Backward, two warps with whole columns are faster than four that exchange sums of groups.
    whole = s.c == 1 or (backward and in_segments)
    warp_bytes = WARP_BYTES // (1 if whole else 4 if is_short else 2)
    exact = most if s.c > 1 else 256 if backward else 512  # elements; more take too many registers
    num_stages = 2 if backward or in_segments else 3
    return LogcumsumexpConfig(
        block_n=block_n,
        block_c=block_c,
        block_exact=max(1, min(block_n, exact // block_c)),
        num_segments=num_segments,
        num_warps=max(1, block_n * block_c * s.itemsize // warp_bytes),
        num_stages=1 if s.c == 1 or num_segments == tiles else num_stages,
    )


def _programs(s: Sizes, block_c: int) -> int:
    return s.b * pl.cdiv(s.c, block_c)


def _num_segments(s: Sizes, tiles: int, block_c: int, card: Card) -> int:
    """1 where columns fill the GPU; else one a tile, or up to `each` programs a multiprocessor."""
    programs = _programs(s, block_c)
    if programs >= card.num_sms - SPARE_SMS:
        return 1
    if s.c > 1 and programs * tiles <= 4 * card.num_sms:
        return tiles
    each = 16 if s.c == 1 else 4  # programs of a multiprocessor
    return max(1, min(each * card.num_sms // programs, 4 * card.num_sms, tiles // 2))
