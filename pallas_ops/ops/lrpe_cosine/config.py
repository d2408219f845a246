"""Static arguments, operands and launch choices of lrpe_cosine, and the plan of a launch."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core import checks
from pallas_ops.core.card import Card, current
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.tiles import power_of_two

SOFTMAX_FEATURES, SOFTMAX_SEQUENCE = "softmax_features", "softmax_sequence"

WIDEST = 4096  # features that one tile can hold
WALK_TILES = 8  # tiles that one step of a walk loads together
# Walks that store load fewer tiles together, as the compiler moves no load above a store. The walk
# for theta's gradient is pipelined: asynchronous copies are issued before earlier stores.
STORING_WALK_TILES, MOST_STORING_STAGES = 2, 3
SPREAD_ELEMENTS = 2**22  # elements of x from which on a copy of an unaligned theta pays


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrpeCosineConfig:
    """Launch choices, forward and backward.

    In the variant `sequence` (xopes' Sp) a program has `block_n` rows, that is (token, head) pairs
    that are adjacent in memory, and no loop. In the variant `block` (Bp) it has `block_d` features
    of one head and walks the sequence, `block_n` tokens a tile. A softmax over the sequence needs
    this variant. With `num_parts` above 1, a program walks one part of the sequence. For that
    softmax these programs compute its sums only, and a launch of `sequence` writes the output.

    With `cache_angles` (xopes' Tri Ca), angles are computed once, kept in memory, and read,
    also going backward.

    theta's gradient has a launch of its own (`choose_walk`), which by default makes x's, too.
    """

    variant: Literal["sequence", "block"] = "sequence"
    block_n: int = 16
    block_d: int = 128
    num_parts: int = 1
    cache_angles: bool = False
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        of = type(self).__name__
        checks.one_of(f"{of}.variant", self.variant, ("sequence", "block"))
        if not isinstance(self.cache_angles, bool):
            raise ValueError(f"{of}.cache_angles is {self.cache_angles!r}; accepted: True or False")
        checks.launch_choices(self, powers_of_two=("block_n", "block_d", "num_warps"))
        for name in ("num_parts", "num_stages"):
            value = getattr(self, name)
            if self.variant == "sequence" and value != 1:  # the variant has no loop
                raise ValueError(f"{of}.{name} is {value}; accepted: 1, with variant='sequence'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments of a call, checked."""

    act: str  # a name of `ACTIVATIONS`, or one of the two softmaxes
    theta: str  # the axes of theta, as `Op.operands` names them: "h d", "one e", "h single"
    shape: tuple[int, ...]  # of the grid, if there is one
    num_axes: int  # of the grid, or of the positions
    num_prefix_tokens: int
    heads_first: bool
    per_batch: bool  # whether each batch element has its own offset or positions
    axis_name: tuple[str, ...] | None
    implementation: Implementation | None
    config: LrpeCosineConfig | None

    @property
    def op(self) -> str:
        """The op's name; with positions on one axis both ops are the same."""
        return "md_lrpe_cosine" if self.shape or self.num_axes > 1 else "lrpe_cosine"

    @property
    def tokens_axis(self) -> int:
        """The axis of tokens in x."""
        return 2 if self.heads_first else 1

    @property
    def over_sequence(self) -> bool:
        """Whether there is a softmax over the sequence."""
        return self.act == SOFTMAX_SEQUENCE

    @property
    def caches_angles(self) -> bool:
        return self.config is not None and self.config.cache_angles


class Operands(NamedTuple):
    """The operands of a pass, or their refs in its kernel. Absent ones are None.

    In a kernel the axes of tokens and heads of x and dout are one axis of rows.
    """

    x: Any = None  # [B, N, H, D], or with heads first [B, H, N, D]
    dout: Any = None  # [B, .., 2, D]
    theta: Any = None  # [H, E] or [1, E]
    offset: Any = None  # [B] or [1]
    positions: Any = None  # [(B,) N, K]
    cached: Any = None  # angles in turns [(B,) N, H, D], of one head if they share theta
    pivot: Any = None  # [B, H, D], as share and mean: the fields of `Softmax`
    share: Any = None
    mean: Any = None

    @property
    def sized(self) -> Any:
        """The array that gives the sizes, which x and dout have alike."""
        return self.dout if self.x is None else self.x


class Softmax(NamedTuple):
    """Values per feature of a softmax over the sequence: a = exp(x - pivot) * share."""

    pivot: Any = None  # the maximum of x
    share: Any = None  # the reciprocal of the sum of exp(x - pivot)
    mean: Any = None  # the sum of a * da; only the backward pass has it


class Sizes(NamedTuple):
    """The sizes of one call on one device."""

    b: int
    n: int
    h: int
    d: int


def choose(s: Sizes, *, scattered: bool = False) -> LrpeCosineConfig:
    """The launch of kernels that do not walk: 1,024 elements or a row, if possible 8 a thread.

    Where theta is `scattered`, loaded element by element: 512 (or one row), a warp for each 512.
    """
    block_d = min(power_of_two(s.d), WIDEST)
    rows = max(1, (512 if scattered else 1024) // block_d)
    return LrpeCosineConfig(
        block_n=min(rows, power_of_two(s.n * s.h)),
        block_d=block_d,
        num_warps=max(1, block_d // 512) if scattered else 4,
    )


def choose_walk(s: Sizes, act: str, card: Card) -> LrpeCosineConfig:
    """The launch of kernels that walk the sequence: 1,024 elements a tile, 8 a thread.

    The sequence is split until there are 32 programs a multiprocessor. A short sequence is not
    split if the softmax is over it; a softmax over the features has all features in one tile.
    """
    block_d = min(power_of_two(s.d), WIDEST if act == SOFTMAX_FEATURES else 128)
    block_n = max(1, min(1024 // block_d, power_of_two(pl.cdiv(s.n, WALK_TILES))))
    steps = pl.cdiv(s.n, WALK_TILES * block_n)
    walks = s.b * s.h * pl.cdiv(s.d, block_d)
    parts = max(1, min(steps, 32 * card.num_sms // walks))
    return LrpeCosineConfig(
        variant="block",
        block_n=block_n,
        block_d=block_d,
        num_parts=1 if act == SOFTMAX_SEQUENCE and steps <= 2 else parts,
        num_warps=max(1, block_n * block_d // 256),
    )


def storing_stages(c: LrpeCosineConfig, itemsize: int, card: Card) -> int:
    """Stages of a walk that stores: each but the last holds x and dout of a step's tiles."""
    tile = c.block_n * c.block_d * itemsize
    fitting = (card.shared_memory - tile) // (3 * STORING_WALK_TILES * tile)
    return min(MOST_STORING_STAGES, 1 + fitting)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static values of a kernel."""

    p: Params
    s: Sizes
    c: LrpeCosineConfig
    width: int  # features per axis: the columns of theta
    spread: bool  # whether a copy of theta has a column per feature (`kernel._spread`)
    precise: bool  # float32 results need exact sines; 16-bit results hide the approximation
    walk_tiles: int = WALK_TILES

    @property
    def rows(self) -> int:
        return self.s.n * self.s.h

    @property
    def blocks_d(self) -> int:
        return pl.cdiv(self.s.d, self.c.block_d)

    @property
    def blocks_n(self) -> int:
        """Blocks of tokens in the sequence."""
        return pl.cdiv(self.s.n, self.c.block_n)

    @property
    def step_tiles(self) -> int:
        """Tiles of one step of a walk."""
        return min(self.walk_tiles, self.blocks_n)

    @property
    def steps(self) -> int:
        """Steps of the whole sequence, over all of its parts."""
        return pl.cdiv(self.blocks_n, self.walk_tiles)

    @property
    def parts(self) -> int:
        """Parts of the sequence, with one walk each: the same number in all walks of a call."""
        return min(self.c.num_parts, pl.cdiv(self.blocks_n, WALK_TILES))

    @property
    def walks(self) -> bool:
        return self.c.variant == "block"

    @property
    def grid(self) -> tuple[int, ...]:
        """The programs of a launch."""
        if self.walks:
            return self.blocks_d, self.s.h, self.parts, self.s.b
        return pl.cdiv(self.rows, self.c.block_n), self.blocks_d, self.s.b

    def view(self, x: jax.Array) -> jax.Array:
        """x [B, .., .., D] or the output [B, .., .., 2, D], with one axis of rows."""
        return x.reshape(self.s.b, self.rows, *x.shape[3:])

    def unview(self, x: jax.Array) -> jax.Array:
        """The inverse of `view`."""
        tokens = (self.s.h, self.s.n) if self.p.heads_first else (self.s.n, self.s.h)
        return x.reshape(self.s.b, *tokens, *x.shape[2:])


def plan_of(p: Params, o: Operands) -> Plan:
    """The plan of a launch; by default it walks only for a softmax over the sequence."""
    b, n, h = (o.sized.shape[i] for i in (0, p.tokens_axis, 3 - p.tokens_axis))
    s, c = Sizes(b, n, h, o.sized.shape[-1]), p.config
    width = 1 if o.theta is None else o.theta.shape[1]
    unaligned = p.num_axes > 1 and width % 4 > 0  # rows of theta, to 16 bytes
    spread = unaligned and math.prod(s) >= SPREAD_ELEMENTS
    if c is None and p.over_sequence:
        c = choose_walk(s, p.act, current())
    c = c or choose(s, scattered=unaligned and not spread)
    precise = o.sized.dtype == jnp.float32
    return Plan(p=p, s=s, c=c, width=width, spread=spread, precise=precise)
