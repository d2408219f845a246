"""Any array as [rows, axis, columns], cut into ranges along the axis, and what one program covers.

A range is a chunk of `chunk_cumsum_decay`, a segment of a long axis, or the whole axis. A program
scans `num_ranges` of them in `block_c` columns, one tile of `block_n` positions after the other.

A tile is an array [steps, ranges, groups, columns]. Its element (step, group) is position
group * steps + step in scan order (in memory order if `View.mirrored`). One lane holds all steps of
a group, so a scan along the steps moves nothing between lanes: only group totals cross lanes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import NoKernelError
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.implementations import LONGEST, kernel_or_reference
from pallas_ops.core.launch import launch

MOST_RANGES = 2**30  # at most so many are counted by one axis of the grid
MAX_VECTOR = 16  # bytes of one load of a lane


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """An array [b, n, c] whose rows have `count` ranges of `size` positions (the last: fewer)."""

    b: int
    n: int
    c: int
    size: int
    count: int
    itemsize: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int, itemsize: int) -> "Sizes":
        """One range: the whole axis."""
        b, n, c = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        if b > LONGEST:  # with the rows that `jax.vmap` has added
            raise NoKernelError(f"{b} rows, of which kernels count {LONGEST}")
        return cls(b=b, n=n, c=c, size=n, count=1, itemsize=itemsize)

    def split(self, count: int, multiple_of: int) -> "Sizes":
        """The axis in at most so many ranges of whole tiles."""
        size = pl.cdiv(pl.cdiv(self.n, multiple_of), count) * multiple_of
        return dataclasses.replace(self, size=size, count=pl.cdiv(self.n, size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Sizes, direction and blocks: all that is static about what programs see."""

    s: Sizes
    reverse: bool
    block_n: int
    block_c: int
    num_ranges: int
    num_steps: int
    from_end: bool = False  # ranges are counted from the end of the axis
    packed: bool = False  # ranges begin and end anywhere

    @property
    def rows(self) -> int:
        """Rows that the second axis of the grid counts; the third axis counts blocks of them."""
        return max(1, min(self.s.b, MOST_RANGES // self.s.count))

    @property
    def grid(self) -> tuple[int, int, int]:
        slots = pl.cdiv(self.rows * self.s.count, self.num_ranges)
        return pl.cdiv(self.s.c, self.block_c), slots, pl.cdiv(self.s.b, self.rows)

    @property
    def tiles(self) -> int:
        """How many tiles a range has."""
        return pl.cdiv(self.s.size, self.block_n)

    @property
    def mirrored(self) -> bool:
        """Whether tiles lie as in memory and are scanned from their end: for a reversed last axis.

        Elsewhere reversal is in the index. Along a last axis that would break loads of 16 bytes up
        into single numbers.
        """
        return self.reverse and self.s.c == 1

    @property
    def all_slots(self) -> bool:
        """Whether no program has slots without a range."""
        s = self.s
        return s.b % self.rows == 0 and self.rows * s.count % self.num_ranges == 0

    @property
    def full(self) -> bool:
        """Whether no tile needs a mask for its positions."""
        s = self.s
        even = s.n % s.size == 0 and s.size % self.block_n == 0
        return even and self.all_slots and not self.packed

    @property
    def wraps(self) -> bool:
        """Whether positions of a tile that ends beyond the axis may exceed int32."""
        last = self.s.n if self.packed else (self.s.count - 1) * self.s.size
        return last + self.tiles * self.block_n >= 2**31


def launch_plan(
    kernel: Callable[..., None],
    plan: Any,
    name: str,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array | None,
    **static: Any,
) -> list[jax.Array]:
    """Runs `kernel` over the programs of a plan, which has a `View` and a config `c`."""
    return launch(
        partial(kernel, plan=plan, **static),
        *operands,
        name=name,
        grid=plan.view.grid,
        out_shape=out_shape,
        num_warps=plan.c.num_warps,
    )


def implementation_for(
    implementation: Implementation | None,
    shape: tuple[int, ...],
    axis: int,
    *dtypes: Any,
    **sizes: int,
) -> Implementation | None:
    """The reference for what no kernel takes, else as asked; `sizes`: of other operands.

    Positions, rows and columns of a `View` are counted in 32 bits.
    """
    sizes |= {f"axis {i}": size for i, size in enumerate(shape)}
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    sizes |= {"product of the axes before": outer, "product of the axes after": inner}
    for dtype in dtypes:
        implementation = kernel_or_reference(implementation, dtype, sizes)
    return implementation


def names(before: int, after: int, *scanned: str) -> str:
    """The axis names of an array of an `Op`: outer axes, those that are given, inner axes."""
    outer, inner = (f"o{i}" for i in range(before - 1)), (f"i{i}" for i in range(after))
    return " ".join(("b", *outer, *scanned, *inner))
