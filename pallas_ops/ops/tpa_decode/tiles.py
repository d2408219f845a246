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
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, tile
from pallas_ops.ops.tpa_decode.matmul import dot


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: TpaDecodeConfig
    score_scale: float
    value_scale: float

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


def sizes(aq: jax.Array, ak: jax.Array, av: jax.Array, bq: jax.Array, bv: jax.Array) -> Sizes:
    b, n, h, r = aq.shape
    _, m, rk, _ = ak.shape
    d, e, rv = bq.shape[-1], bv.shape[-1], av.shape[2]
    wide_queries = aq.dtype != ak.dtype
    dtype = ak.dtype.name
    return Sizes(
        b=b, n=n, m=m, h=h, r=r, d=d, e=e, rk=rk, rv=rv, dtype=dtype, wide_queries=wide_queries
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

    def load_aq(self, ref: Ref) -> jax.Array:
        """[rows, queries x ranks]"""
        return load(ref, self.index, self.rank, self.own)

    def load_bq(self, ref: Ref) -> jax.Array:
        """[queries x ranks, D]"""
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
    """One step's keys, `limit` the first that does not exist."""

    def __init__(self, rows: Rows, step: jax.Array, limit: jax.Array | int) -> None:
        block_m = rows.plan.c.block_m
        self.rows = rows
        self.index = step * block_m + span(block_m)
        self.inside = self.index < limit
        if isinstance(limit, int) and limit % block_m == 0:  # the compiler cannot tell
            self.inside = jnp.full(self.index.shape, True)

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
        """[rows, keys]: the causal tail, query n of N sees keys m < length - (N - 1 - n)"""
        s = self.rows.plan.s
        if s.n == 1:
            return self.inside[None, :]
        last = jnp.minimum(length - (s.n - 1) + self.rows.query, s.m)
        return self.index[None, :] < last[:, None]


def key_range(plan: Plan, length_ref: Ref | None) -> tuple[jax.Array | int, jax.Array | int]:
    """The cache's length as given, and the first key that does not exist."""
    if length_ref is None:
        return plan.s.m, plan.s.m
    length = length_ref[0]
    return length, jnp.clip(length, 0, plan.s.m)


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
