"""The arguments of tpa_decode, their sizes, and launch choices."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jax.experimental import pallas as pl

from pallas_ops.core import checks, triton_ext
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.tiles import power_of_two

Precision = Literal["highest", "high", "default"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpaDecodeConfig:
    """Launch choices of the forward kernel.

    A program takes `block_n` queries of `block_h` heads and one of `num_splits` parts of the keys,
    `block_m` keys at a time. Several splits are merged by a second kernel. In xopes' words, one
    split with all heads is "parallel over b", one with one head "over b and h", several "b and n".
    """

    block_h: int
    block_n: int = 1
    block_m: int = 128
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        powers = "block_n", "block_m", "num_warps"
        checks.launch_choices(self, powers_of_two=powers, least={"block_m": 8})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments of a call."""

    score_scale: float = 1.0
    value_scale: float = 1.0
    window: int | None = None
    precision: Precision = "highest"
    batch_invariant: bool = False
    axis_name: tuple[str, ...] | None = None
    implementation: Implementation | None = None
    config: TpaDecodeConfig | None = None
    out_dtype: str = "float32"
    has_lse: bool = True  # whether the log-sum-exp is a result, and may have a cotangent


class Operands(NamedTuple):
    """The arrays of a pass, None where absent; the last four are of the backward pass."""

    aq: Any = None  # [B, N, H, R]; without bq [B, N, H, D]
    ak: Any = None  # [B, M, Rk, H]; with a page table the cache has [pages, page size] first
    av: Any = None  # [B, M, Rv, H]
    bq: Any = None  # [B, N, R, D]
    bk: Any = None  # [B, M, Rk, D]
    bv: Any = None  # [B, M, Rv, E]
    lengths: Any = None  # [B]
    page_table: Any = None  # [B, pages of a row]
    out: Any = None  # [B, N, H, E], as dout
    lse: Any = None  # [B, N, H], as dlse
    dout: Any = None
    dlse: Any = None  # absent too where lse is no result

    @property
    def m(self) -> int:
        """The keys of a row."""
        pages: int = 1 if self.page_table is None else self.page_table.shape[1]
        return self.ak.shape[1] * pages

    def with_cache(self, of: Callable[[Any], Any]) -> "Operands":
        """The same, with `of` applied to each of the cache's factors."""
        ak, av, bk, bv = map(of, (self.ak, self.av, self.bk, self.bv))
        return self._replace(ak=ak, av=av, bk=bk, bv=bv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The axes of one call (per device), and the sizes of a program's tiles, which are padded."""

    b: int
    n: int
    m: int
    h: int
    r: int
    d: int
    e: int
    rk: int
    rv: int
    dtype: str  # of the cache
    wide_queries: bool = False  # whether aq and bq are float32 and the cache has 16 bits
    has_bq: bool = True  # else aq is q itself, and r is D
    quantised: str | None = None  # the dtype of bk and bv where they have 8 bits
    out_dtype: str = "float32"
    precision: Precision = "highest"
    pages: tuple[int, int] | None = None  # how many there are, and how many keys each has

    @classmethod
    def of(cls, o: Operands, p: Params) -> "Sizes":
        b, n, h, r = o.aq.shape
        (rk, d), (rv, e) = o.bk.shape[2:], o.bv.shape[2:]
        axes = dict(b=b, n=n, m=o.m, h=h, r=r, d=d, e=e, rk=rk, rv=rv)
        return cls(
            **axes,
            dtype=o.ak.dtype.name,
            wide_queries=o.aq.dtype != o.ak.dtype,
            has_bq=o.bq is not None,
            quantised=None if o.bk.dtype == o.ak.dtype else o.bk.dtype.name,
            out_dtype=p.out_dtype,
            precision=p.precision,
            pages=None if o.page_table is None else o.ak.shape[:2],
        )

    @property
    def tile_r(self) -> int:
        return tile(self.r)

    @property
    def features_per_word(self) -> int:
        """Features of eight bits are loaded two at once, and become two tiles (`words.py`)."""
        return 2 if self.quantised else 1

    @property
    def is_quantised_bfloat16(self) -> bool:
        """Whether features have eight bits, and all else bfloat16, to which weights are rounded."""
        return self.quantised is not None and {self.dtype, self.out_dtype} == {"bfloat16"}

    @property
    def rounds_weights(self) -> bool:
        """Whether weights are rounded to the cache's dtype, and partial results to `out_dtype`."""
        return self.is_quantised_bfloat16 or self.precision == "default"

    @property
    def is_plain_bfloat16(self) -> bool:
        """Whether queries and head factors are bfloat16, whatever features are."""
        return self.dtype == "bfloat16" and not self.wide_queries

    @property
    def has_float16_weights(self) -> bool:
        """Whether forward weights (p av) are multiplied as two float16 tiles (`dot_in_float16`)."""
        is_plain = not (self.rounds_weights or self.wide_queries or self.quantised)
        return self.dtype == "float16" and is_plain

    @property
    def is_rank_first(self) -> bool:
        """Whether q is never formed: q k^T = aq (bq bk^T).

        For 33 to 64 heads, D of at most 64 and bfloat16, q fits into registers and is formed: 3 to
        5 % less time.
        """
        fits = 32 < self.h <= 64 and self.tile_d <= 64 and self.dtype == "bfloat16"
        return self.has_bq and self.precision != "default" and not fits

    @property
    def tile_d(self) -> int:
        return self.features(self.d)

    @property
    def tile_e(self) -> int:
        return self.features(self.e)

    def features(self, size: int) -> int:
        """The padded size of so many features, in all of their tiles together."""
        return self.features_per_word * tile(pl.cdiv(size, self.features_per_word))

    @property
    def tile_rk(self) -> int:
        return power_of_two(self.rk)

    @property
    def tile_rv(self) -> int:
        return power_of_two(self.rv)

    @property
    def has_few_features(self) -> bool:
        """So few that two programs may fit in a multiprocessor."""
        return max(self.tile_d, self.tile_e) <= 64 and self.dtype != "float32"

    @property
    def most_ranks(self) -> int:
        return max(self.tile_rk, self.tile_rv)

    def gathers(self, block_h: int, *, backward: bool = False) -> bool:
        """Whether the head factors of a block of keys are loaded in one piece (`heads._gather`)."""
        keys = self.m if self.pages is None else self.pages[0] * self.pages[1]
        is_short = keys * max(self.rk, self.rv) * self.h < 2**31  # places are int32
        has_all = block_h >= self.h and self.dtype != "float32"
        if not (triton_ext.AVAILABLE and is_short and has_all):
            return False
        if self.h % 2 == 1:  # `cp.async` copies 4 bytes or more; every other row is aligned to 2
            return True
        if backward:
            return False
        if self.h > 32:
            # Two tiles lack registers for more than words of two bfloat16 heads.
            fits = self.dtype == "bfloat16" and (self.quantised is None or self.h <= 80)
            return self.h <= 64 or (self.pages is None and fits)
        # Faster in bfloat16, for two ranks whose rows can lie in different banks (`Keys._spread`).
        is_small = self.has_few_features and self.dtype == "bfloat16" and self.pages is None
        return is_small and self.most_ranks == 2 and self.h % 16 > 0

    def prefetches_heads(self, block_h: int) -> bool:
        """Whether the head factors of the next step are loaded into registers: 5 to 8 % less time.

        Not with pages: the page number would have to be waited for. Two tiles of float16 gain
        nothing.
        """
        fits = len(head_tiles(block_h)) == 1 or self.dtype == "bfloat16"
        return fits and self.pages is None and self.gathers(block_h)


def tile(size: int) -> int:
    """The power of two, at least 16 (the tensor cores' least), that holds `size`."""
    return max(16, power_of_two(size))


def head_tiles(block_h: int, *, backward: bool = False) -> tuple[int, ...]:
    """The tiles that hold so many heads: one, or for 65 to 96 heads 64 and one of 16 or 32.

    Backward: tiles of 32 heads, and one of 16 or 32 for the rest; for more than 96 heads one tile.
    """
    if backward and block_h <= 96:
        wide, rest = divmod(block_h, 32)
        tiles = [32] * wide
        # The narrow tile comes second: of three tiles, that takes 2 % less time than last.
        tiles[1:1] = [tile(rest)] if rest else []
        return tuple(tiles)
    if not backward and 64 < block_h <= 96:
        return 64, tile(block_h - 64)
    return (tile(block_h),)
