"""What a program of tpa_decode sees: its rows (queries x heads), its keys, and their tiles."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, power_of_two, span, split_evenly, unstack
from pallas_ops.ops.tpa_decode.config import (
    Sizes,
    TpaDecodeConfig,
    head_tiles,
    split_size,
    tile,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: TpaDecodeConfig
    score_scale: float
    value_scale: float
    window: int | None = None
    batch_invariant: bool = False

    @property
    def pairs(self) -> bool:
        """Whether heads are loaded in pairs."""
        return self.s.has_pairs(self.c.block_h)

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.s.h, self.c.block_h)

    @property
    def pieces(self) -> Literal[2, 3]:
        """Of a float32 side of products; float32 results need all of its bits."""
        return 3 if self.s.wide_queries else 2

    @property
    def row_blocks(self) -> int:
        return self.head_blocks * pl.cdiv(self.s.n, self.c.block_n)


def sizes(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array | None,
    bk: jax.Array,
    bv: jax.Array,
) -> Sizes:
    b, n, h, r = aq.shape
    _, m, rk, _ = ak.shape
    return Sizes(
        b=b,
        n=n,
        m=m,
        h=h,
        r=r,
        d=bk.shape[-1],
        e=bv.shape[-1],
        rk=rk,
        rv=av.shape[2],
        dtype=ak.dtype.name,
        wide_queries=aq.dtype != ak.dtype,
        has_bq=bq is not None,
    )


def flat(x: jax.Array, split: int) -> jax.Array:
    """[B, ...] as [B, I, J]: the axes before and from `split` on become one each."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:split]), -1)


def per_batch(x: jax.Array) -> pl.BlockSpec:
    """All of an array but its batch axis, which is the last of the grid."""
    ndim = x.ndim
    return pl.BlockSpec((None, *x.shape[1:]), lambda *ids: (ids[-1], *(0,) * (ndim - 1)))


def load(ref: Ref, i: jax.Array, j: jax.Array, mask: jax.Array) -> jax.Array:
    """The tile ref[i, j], 0 outside the mask."""
    return plgpu.load(ref.at[i[:, None], j[None, :]], mask=mask, other=0.0)


def store(ref: Ref, value: jax.Array, i: jax.Array, j: jax.Array, mask: jax.Array) -> None:
    plgpu.store(ref.at[i[:, None], j[None, :]], value.astype(ref.dtype), mask=mask)


def grouped(groups: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Group and place within it of groups * size lanes; sizes are powers of two."""
    lane = span(groups * size)
    return lane >> (size.bit_length() - 1), lane & (size - 1)


class Rows:
    """Rows of one program: block_n queries x `size` heads, and their side of the scores.

    Of pairs of heads, eight even heads come before the eight odd ones between them: a thread that
    has row r of a tile of the tensor cores has row r + 8 as well.
    """

    def __init__(self, plan: Plan, block: jax.Array | int, offset: int, size: int) -> None:
        s, c = plan.s, plan.c
        first_n = block // plan.head_blocks * c.block_n
        self.first_n = first_n if s.n > c.block_n else 0
        self.first_h = block % plan.head_blocks * c.block_h + offset
        self.plan, self.tile_h = plan, size

        def head(row: jax.Array) -> jax.Array:
            return (row & ~15) + 2 * (row & 7) + (row >> 3 & 1) if plan.pairs else row

        def is_inside(head: jax.Array) -> jax.Array:
            return (head < c.block_h - offset) & (self.first_h + head < s.h)

        self.column = head(span(size))
        self.column_inside = is_inside(self.column)
        query, lane = grouped(c.block_n, size)
        lane = head(lane)
        self.query = first_n + query
        self.inside = (self.query < s.n) & is_inside(lane)
        self.index = self.query * s.h + self.first_h + lane
        query, self.rank = grouped(c.block_n, s.tile_r)
        self.rank_query = first_n + query
        self.rank_inside = (self.rank < s.r) & (self.rank_query < s.n)
        # Block diagonal: a row of query n meets only the ranks of query n.
        self.own = self.query[:, None] == self.rank_query[None, :]
        self.own &= self.inside[:, None] & self.rank_inside[None, :]

    @classmethod
    def of_program(cls, plan: Plan, block: jax.Array | int) -> list["Rows"]:
        """A program's heads in one tile or two, which share what they have of the keys."""
        sizes = head_tiles(plan.c.block_h)
        return [cls(plan, block, sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    def whole(self, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where an array [N H, size] has this program's rows."""
        column = span(tile(size))
        return self.index, column, self.inside[:, None] & (column < size)[None, :]

    def load_aq(self, ref: Ref) -> jax.Array:
        """[rows, queries x ranks]; without bq [rows, D]"""
        if not self.plan.s.has_bq:
            return load(ref, *self.whole(self.plan.s.d))
        return load(ref, self.index, self.rank, self.own)

    def load_bq(self, ref: Ref | None) -> jax.Array | None:
        """[queries x ranks, D]"""
        if ref is None:
            return None
        d = span(self.plan.s.tile_d)
        mask = self.rank_inside[:, None] & (d < self.plan.s.d)[None, :]
        return load(ref, self.rank_query * self.plan.s.r + self.rank, d, mask)

    def spread(self, x: jax.Array) -> jax.Array:
        """[heads, entries] as [rows, entries], the same for every query."""
        heads, entries, n = *x.shape, self.plan.c.block_n
        if n == 1:
            return x
        return jnp.broadcast_to(x[None], (n, heads, entries)).reshape(n * heads, entries)

    def gather(self, x: jax.Array) -> jax.Array:
        """[rows, entries] summed over queries, as [entries, heads]; the transpose of `spread`."""
        n = self.plan.c.block_n
        return (x if n == 1 else x.reshape(n, -1, x.shape[1]).sum(0)).T


class Keys:
    """One step's keys, of which those from `first` to before `stop` count.

    An entry is one rank of one key. Tiles hold a power of two of ranks a key.
    """

    def __init__(
        self, plan: Plan, step: jax.Array, stop: jax.Array | int, first: jax.Array | int = 0
    ) -> None:
        self.plan, self.stop, self.first = plan, stop, first
        self.begin = step * plan.c.block_m
        self.index = self.begin + span(plan.c.block_m)
        self.inside = self._count(self.index)

    def _count(self, index: jax.Array) -> jax.Array:
        inside = index < self.stop
        if isinstance(self.stop, int) and self.stop % self.plan.c.block_m == 0:
            inside = jnp.full(index.shape, True)  # the compiler cannot tell
        if not isinstance(self.first, int) or self.first > 0:
            inside &= index >= self.first
        return inside

    def seen(self, rows: Rows, length: jax.Array | int) -> jax.Array:
        """[rows, keys]: query n of N sees the last `window` keys m < length - (N - 1 - n)."""
        s, window = self.plan.s, self.plan.window
        if s.n == 1:
            return self.inside[None, :]
        last = (length - (s.n - 1) + rows.query)[:, None]
        seen = self.index[None, :] < jnp.minimum(last, s.m)
        return seen if window is None else seen & (self.index[None, :] >= last - window)

    def entries(self, ranks: int) -> tuple[jax.Array, jax.Array]:
        """Which rows of an array [M ranks, ..] they are, and whether they count."""
        if ranks == 1:
            return self.index, self.inside
        key, rank = grouped(self.plan.c.block_m, power_of_two(ranks))
        inside = self._count(self.begin + key) & (rank < ranks)
        return (self.begin + key) * ranks + rank, inside

    def odd_entries(self, ranks: int) -> tuple[jax.Array, jax.Array]:
        """Those of odd ranks."""
        key, rank = grouped(self.plan.c.block_m, power_of_two(ranks) // 2)
        inside = self._count(self.begin + key) & (2 * rank + 1 < ranks)
        return (self.begin + key) * ranks + 2 * rank + 1, inside

    def features(self, ranks: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where bk or bv [M ranks, size] has its features."""
        entry, inside = self.entries(ranks)
        column = span(tile(size))
        return entry, column, inside[:, None] & (column < size)[None, :]

    def heads(self, rows: Rows, ranks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where ak or av [M ranks, H] has these heads."""
        entry, inside = self.entries(ranks)
        return entry, rows.first_h + rows.column, inside[:, None] & rows.column_inside[None, :]

    def load_a(self, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
        """ak or av as [rows, entries], in float32."""
        if self.plan.pairs:
            x = self._load_pairs(rows, ref, ranks)
        elif rows.tile_h > 32 and self.plan.s.h % 2 == 0:
            x = self._load_groups(rows, ref, ranks)
        else:
            x = load(ref, *self.heads(rows, ranks)).T
        return rows.spread(x.astype(jnp.float32))

    def _load_groups(self, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
        """Of an array [M ranks, H] these heads, as [heads, entries].

        Loaded as [heads / 16, entries, 16], for shared memory holds tiles in the order of their
        axes. There 16 heads of one entry are 32 bytes, and those of the next entry follow. In a
        tile [entries, heads] of 64 heads entries lie 128 bytes apart, all in the same banks, and
        the eight that are read at once to be transposed are read one after the other.
        """
        entry, inside = self.entries(ranks)
        column, column_inside = (x.reshape(-1, 1, 16) for x in (rows.column, rows.column_inside))
        i, j = jnp.broadcast_arrays(entry[None, :, None], rows.first_h + column)
        mask = inside[None, :, None] & column_inside
        x = plgpu.load(ref.at[i, j], mask=mask, other=0.0)
        return x.swapaxes(1, 2).reshape(-1, entry.size)

    def _load_pairs(self, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
        """The same of a flat array [M ranks H], for odd H and an even number of ranks.

        An asynchronous copy takes at least four bytes, two numbers, and begins at an even place.
        Even ranks begin at an even place: their pairs of numbers are pairs of heads. Odd ranks
        begin at an odd place p. Their even heads are the second numbers of the pairs from p - 1 on,
        their odd heads the first numbers of the pairs from p + 1 on.
        """
        column = span(rows.tile_h).reshape(-1, 1, 16)

        def load_pairs(
            entries: tuple[jax.Array, jax.Array], offset: int, stop: jax.Array | int
        ) -> list[jax.Array]:
            """First and second numbers, each [heads / 16, 8, entries]."""
            entry, inside = entries
            place = 2 * ((entry * self.plan.s.h + rows.first_h + offset) >> 1)
            mask = inside[None, :, None] & (column < stop)
            x = plgpu.load(ref.at[place[None, :, None] + column], mask=mask, other=0.0)
            return unstack(x.reshape(*x.shape[:2], 8, 2).swapaxes(1, 2))

        def of_ranks(x: jax.Array) -> list[jax.Array]:
            """Those of even ranks and those of odd ranks, each [heads / 16, 8, entries / 2]."""
            return unstack(x.reshape(*x.shape[:2], -1, 2))

        heads = self.plan.s.h - rows.first_h
        first, second = (of_ranks(x) for x in load_pairs(self.entries(ranks), 0, heads + 1))
        odd_of_odd, _ = load_pairs(self.odd_entries(ranks), 1, heads - 1)
        even_heads = jnp.stack([first[0], second[1]], axis=-1)
        odd_heads = jnp.stack([second[0], odd_of_odd], axis=-1)
        x = jnp.stack([even_heads, odd_heads], axis=-1)  # [heads / 16, 8, entries / 2, 2, 2]
        return x.transpose(0, 4, 1, 2, 3).reshape(rows.tile_h, -1)


def sum_ranks(x: jax.Array, ranks: int) -> jax.Array:
    """[rows, entries] as [rows, keys]"""
    size = power_of_two(ranks)
    return x if size == 1 else x.reshape(len(x), -1, size).sum(axis=2)


def each_rank(x: jax.Array, ranks: int) -> jax.Array:
    """[rows, keys] as [rows, entries]; the transpose of `sum_ranks`."""
    size = power_of_two(ranks)
    if size == 1:
        return x
    return jnp.broadcast_to(x[..., None], (*x.shape, size)).reshape(len(x), -1)


def key_range(
    rows: Rows, length_ref: Ref | None
) -> tuple[jax.Array | int, jax.Array | int, jax.Array | int]:
    """The cache's length as given; of what the rows see, the first key and one past the last."""
    s, c, window = rows.plan.s, rows.plan.c, rows.plan.window
    length = s.m if length_ref is None else length_ref[0]
    stop = length
    if s.n > c.block_n:  # what the last query of these sees
        stop = jnp.minimum(length, length - (s.n - 1) + rows.first_n + c.block_n - 1)
    if not isinstance(stop, int):
        stop = jnp.clip(stop, 0, s.m)
    if window is None:
        return length, 0, stop
    return length, _at_least_0(length - (s.n - 1) + rows.first_n - window), stop


def blocks_of_split(
    plan: Plan, split: jax.Array, first: jax.Array | int, stop: jax.Array | int
) -> tuple[Any, Any]:
    """The blocks of keys of one split: the first, and one past the last."""
    c, begin, end = plan.c, first // plan.c.block_m, pl.cdiv(stop, plan.c.block_m)
    if plan.batch_invariant:
        blocks = split_size(plan.s.m) // c.block_m
        return jnp.maximum(begin, split * blocks), jnp.minimum(end, (split + 1) * blocks)
    if plan.window is None:
        return part(split, c.num_splits, end)
    # A shard that the window does not reach ends before it begins.
    start, stop = part(split, c.num_splits, _at_least_0(end - begin))
    return begin + start, begin + stop


def _at_least_0(x: jax.Array | int) -> jax.Array | int:
    return max(x, 0) if isinstance(x, int) else jnp.maximum(x, 0)


def part(i: jax.Array, parts: int, blocks: jax.Array | int) -> tuple[Any, Any]:
    """The i-th of `parts` even parts of `blocks`: first, and one past the last."""
    return (0, blocks) if parts == 1 else split_evenly(blocks, parts, i)
