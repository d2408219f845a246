"""What a program of tpa_decode sees: its rows (queries x heads), its keys, and their tiles."""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, span, split_evenly
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, split_size, tile
from pallas_ops.ops.tpa_decode.matmul import dot


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
    def tile_h(self) -> int:
        return tile(self.c.block_h)

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
    """The rows of one program: block_n queries x tile_h heads, and their side of the scores."""

    def __init__(self, plan: Plan, block: jax.Array | int) -> None:
        s, c = plan.s, plan.c
        first_n = block // plan.head_blocks * c.block_n
        self.first_n = first_n if s.n > c.block_n else 0
        first_h = block % plan.head_blocks * c.block_h
        self.plan = plan
        self.column = span(plan.tile_h)
        self.column_inside = (self.column < c.block_h) & (first_h + self.column < s.h)
        self.first_h = first_h
        query, lane = grouped(c.block_n, plan.tile_h)
        self.query = first_n + query
        self.inside = (self.query < s.n) & (lane < c.block_h) & (first_h + lane < s.h)
        self.index = self.query * s.h + first_h + lane
        query, self.rank = grouped(c.block_n, s.tile_r)
        self.rank_query = first_n + query
        self.rank_inside = (self.rank < s.r) & (self.rank_query < s.n)
        # Block diagonal: a row of query n meets only the ranks of query n.
        self.own = self.query[:, None] == self.rank_query[None, :]
        self.own &= self.inside[:, None] & self.rank_inside[None, :]

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
        """[keys, heads] as [rows, keys], the same for every query."""
        heads, keys, n = x.shape[1], x.shape[0], self.plan.c.block_n
        if n == 1:
            return x.T
        return jnp.broadcast_to(x.T[None], (n, heads, keys)).reshape(n * heads, keys)

    def gather(self, x: jax.Array) -> jax.Array:
        """[rows, keys] summed over queries, as [keys, heads]; the transpose of `spread`."""
        n = self.plan.c.block_n
        return (x if n == 1 else x.reshape(n, -1, x.shape[1]).sum(0)).T


class Keys:
    """One step's keys, of which those from `first` to before `stop` count."""

    def __init__(
        self, rows: Rows, step: jax.Array, stop: jax.Array | int, first: jax.Array | int = 0
    ) -> None:
        block_m = rows.plan.c.block_m
        self.rows = rows
        self.index = step * block_m + span(block_m)
        self.inside = self.index < stop
        if isinstance(stop, int) and stop % block_m == 0:  # the compiler cannot tell
            self.inside = jnp.full(self.index.shape, True)
        if not isinstance(first, int) or first > 0:
            self.inside &= self.index >= first

    def heads(self, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where rank `rank` of ak or av [M, ranks x H] has this program's heads."""
        column = rank * self.rows.plan.s.h + self.rows.first_h + self.rows.column
        return self.index, column, self.inside[:, None] & self.rows.column_inside[None, :]

    def features(self, rank: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where rank `rank` of bk or bv [M, ranks x size] has its features."""
        column = span(tile(size))
        return self.index, rank * size + column, self.inside[:, None] & (column < size)[None, :]

    def load_a(self, ref: Ref, rank: int) -> jax.Array:
        """[keys, heads] in float32"""
        return load(ref, *self.heads(rank)).astype(jnp.float32)

    def seen(self, length: jax.Array | int) -> jax.Array:
        """[rows, keys]: query n of N sees the last `window` keys m < length - (N - 1 - n)."""
        s, window = self.rows.plan.s, self.rows.plan.window
        if s.n == 1:
            return self.inside[None, :]
        last = (length - (s.n - 1) + self.rows.query)[:, None]
        seen = self.index[None, :] < jnp.minimum(last, s.m)
        return seen if window is None else seen & (self.index[None, :] >= last - window)


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


def scores(
    aq: jax.Array, inner: list[jax.Array], ak: list[jax.Array], *, pieces: Literal[2, 3] = 2
) -> tuple[jax.Array, list[jax.Array]]:
    """sum_k (aq inner_k) ak_k [rows, keys], and the summands without ak."""
    products = [dot(aq, x, pieces=pieces) for x in inner]
    return sum_of(p * a for p, a in zip(products, ak, strict=True)), products


def sum_of(xs: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, xs)
