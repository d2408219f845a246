"""How big the blocks of lrpe_cosine and md_lrpe_cosine are."""

import dataclasses
from typing import Literal

from pallas_ops.core import checks
from pallas_ops.core.tiles import power_of_two
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE

WIDEST = 4096  # features that one tile can hold
BUNCH = 8  # tiles that a walk loads at a time
AHEAD = 2  # the same of a walk that stores, too: no load overtakes a store
STAGES = 3  # of such a walk: but asynchronous copies do
SPREAD_ELEMENTS = 2**22  # of x, from which on a grid's theta is worth a copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrpeCosineConfig:
    """Launch choices, forward and backward.

    The variant `sequence` (xopes' Sp) gives a program `block_n` rows, which are tokens of one
    head or heads of one token, whichever lie side by side, and `block_b` batch elements, which
    share the angles. The variant `block` (Bp) gives it one head's `block_d` features and lets it
    walk the sequence, `block_n` tokens at a time: it alone does the softmax over the sequence. In
    `num_parts` parts, it walks for what the softmax needs of all tokens; `sequence` does the rest.

    With `cache_angles` (xopes' Tri Ca), angles are computed once, kept in memory, and read,
    also going backward.

    theta's gradient has a launch of its own (`choose_walk`), which by default makes x's, too.
    """

    variant: Literal["sequence", "block"] = "sequence"
    block_n: int = 16
    block_d: int = 128
    block_b: int = 1
    num_parts: int = 1
    cache_angles: bool = False
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.variant not in ("sequence", "block"):
            raise ValueError(
                f"LrpeCosineConfig.variant is {self.variant!r}; accepted: 'sequence', 'block'"
            )
        if not isinstance(self.cache_angles, bool):
            raise ValueError(
                f"LrpeCosineConfig.cache_angles is {self.cache_angles!r}; accepted: True or False"
            )
        checks.launch_choices(self, powers_of_two=("block_n", "block_d", "num_warps"))
        unused = ["block_b"] if self.variant == "block" else ["num_parts"]
        if self.variant == "sequence" and self.block_b == 1:
            unused.append("num_stages")  # there is no loop
        for name in unused:
            if getattr(self, name) != 1:
                raise ValueError(
                    f"LrpeCosineConfig.{name} is {getattr(self, name)}; accepted: 1, with "
                    f"variant={self.variant!r} and block_b={self.block_b}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call (per device)."""

    b: int
    n: int
    h: int
    d: int


def choose(s: Sizes, *, scattered: bool = False) -> LrpeCosineConfig:
    """The launch for what sees one token at a time: 1,024 numbers a program, 8 a thread.

    If theta's are `scattered`, loaded one by one, 512 in a single warp.
    """
    block_d = min(power_of_two(s.d), WIDEST)
    rows = max(1, (512 if scattered else 1024) // block_d)
    return LrpeCosineConfig(
        block_n=min(rows, power_of_two(s.n * s.h)),
        block_d=block_d,
        num_warps=max(1, block_d // 512) if scattered else 4,
    )


def choose_walk(s: Sizes, act: str, *, num_sms: int = 132) -> LrpeCosineConfig:
    """The launch for what walks the sequence: a bunch of 1,024 numbers a tile, 8 a thread.

    It is cut until there are 32 programs a multiprocessor, but one walk sees all of a short one
    for its softmax; that of the features sees all of a token's.
    """
    block_d = min(power_of_two(s.d), WIDEST if act == SOFTMAX_FEATURES else 128)
    block_n = max(1, min(1024 // block_d, power_of_two(-(-s.n // BUNCH))))
    bunches = -(-s.n // (BUNCH * block_n))
    walks = s.b * s.h * -(-s.d // block_d)
    parts = max(1, min(bunches, 32 * num_sms // walks))
    return LrpeCosineConfig(
        variant="block",
        block_n=block_n,
        block_d=block_d,
        num_parts=1 if act == SOFTMAX_SEQUENCE and bunches <= 2 else parts,
        num_warps=max(1, block_n * block_d // 256),
    )
