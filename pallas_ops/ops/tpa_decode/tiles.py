"""What a program of tpa_decode sees: its plan, its rows (queries x heads), and their tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import launch
from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, divided, span
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes, TpaDecodeConfig, head_tiles
from pallas_ops.ops.tpa_decode.matmul import Pieces, dot, dot_in_float16, dot_in_slots

Indices = tuple[jax.Array, jax.Array, jax.Array]  # rows, columns and mask of a tile


@dataclasses.dataclass(frozen=True)
class Plan:
    """The statics of a kernel body."""

    s: Sizes
    c: TpaDecodeConfig
    p: Params
    backward: bool = False

    @property
    def tiles(self) -> tuple[int, ...]:
        """The sizes of a program's tiles of heads."""
        return head_tiles(self.c.block_h, backward=self.backward)

    @property
    def gathers(self) -> bool:
        """See `Sizes.gathers`; a block of keys has to be within one page."""
        is_whole = self.s.pages is None or self.s.pages[1] % self.c.block_m == 0
        return is_whole and self.s.gathers(self.c.block_h, backward=self.backward)

    @property
    def heads_of_word(self) -> int:
        """Two, where head factors are gathered as words of 32 bits, of two heads; else one.

        In the tensor cores' layout a thread has rows r and r + 8 of 16. `Rows` gives these two rows
        the two heads of one word. So a thread reads both at once, and holds them in one register.
        Two tiles lack registers otherwise; one tile takes the same time without.
        """
        return 2 if self.gathers and len(self.tiles) > 1 and self.s.h % 2 == 0 else 1

    @property
    def prefetches_heads(self) -> bool:
        return self.s.prefetches_heads(self.c.block_h)

    @property
    def loads_before_scores(self) -> bool:
        """Whether a step loads the next step's head factors before its scores, or after them.

        For one query of up to 56 heads, loads after the scores mostly take fewer registers, and 1
        to 5 % less time. For several queries, or 61 heads and lengths, they take 2 to 7 % more.
        """
        return len(self.tiles) == 1 and (self.s.h > 56 or self.s.n > 1)

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.s.h, self.c.block_h)

    @property
    def output_pieces(self) -> Pieces:
        """Pieces of a float32 operand, where the output or a gradient is made (see `dot`)."""
        return 1 if self.s.rounds_weights else 3 if self.s.wide_queries else 2

    @property
    def score_pieces(self) -> Pieces:
        """The same in forward scores; with three the log-sum-exp keeps 24 bits (21 in TF32)."""
        s = self.s
        if s.precision == "default":
            return 1
        is_high = s.precision == "high" and s.is_plain_bfloat16
        return 2 if is_high or s.is_quantised_bfloat16 else 3

    @property
    def rank_slots(self) -> int:
        """How often a tile holds each rank of aq and bq: twice where there is room, else once.

        The tensor cores multiply at least 16 ranks; published models have 6. See `dot_in_slots`.
        """
        s = self.s
        fits = 2 * s.r <= s.tile_r and (s.has_bq if self.backward else s.is_rank_first)
        return 2 if fits and (s.is_plain_bfloat16 or s.has_float16_weights) else 1

    def dot_of_ranks(self, a: jax.Array, b: jax.Array, pieces: Pieces) -> jax.Array:
        """a @ b, summed over the ranks of aq; a or b is float32. (Without bq: over features.)"""
        if self.rank_slots == 1:
            return dot(a, b, pieces=pieces)
        return dot_in_slots(a, b, pieces=pieces, size=self.s.tile_r // 2)

    def dot(self, a: jax.Array, b: jax.Array, acc: jax.Array | None = None) -> jax.Array:
        """acc + a @ b, for the output or a gradient."""
        return dot(a, b, acc, pieces=self.output_pieces)

    def dot_of_weights(self, a: jax.Array, b: jax.Array, acc: jax.Array) -> jax.Array:
        """The same for weights (p av) and values."""
        return (dot_in_float16 if self.s.has_float16_weights else self.dot)(a, b, acc)

    @property
    def row_blocks(self) -> int:
        return self.head_blocks * pl.cdiv(self.s.n, self.c.block_n)

    def flattened(self, o: Operands) -> Operands:
        """The operands in the shapes of kernels; gathered head factors are flat, [B, M ranks H]."""
        arrays = Operands(*(x if x is None or x.ndim < 3 else flat(x) for x in o))
        if o.lengths is not None:
            arrays = arrays._replace(lengths=o.lengths[:, None])
        if self.gathers:
            ak, av = (x.reshape(len(x), -1) for x in (o.ak, o.av))
            if self.heads_of_word == 2:
                pairs = (x.reshape(len(x), -1, 2) for x in (ak, av))
                ak, av = (lax.bitcast_convert_type(x, jnp.int32) for x in pairs)
            arrays = arrays._replace(ak=ak, av=av)
        return arrays


def flat(x: jax.Array) -> jax.Array:
    """[B, I, J, ...] as [B, I J, ...]"""
    return x.reshape(len(x), -1, *x.shape[3:])


def per_batch(x: Any) -> Any:
    """One batch element of an array; the batch is the last axis of the grid, and 1 is broadcast."""
    if x is None:
        return None
    b, *shape = x.shape
    rest = (0,) * len(shape)
    return pl.BlockSpec((None, *shape), lambda *ids: (ids[-1] if b > 1 else 0, *rest))


def per_split(x: jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """One split's part of an array [B, splits, ...]; the grid ends with splits and batch."""
    rest = (0,) * (x.ndim - 2)
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda *ids: (ids[-1], ids[-2], *rest))


def load(ref: Ref, i: jax.Array, j: jax.Array, mask: jax.Array) -> jax.Array:
    """The tile ref[i, j], 0 outside the mask."""
    return plgpu.load(ref.at[i[:, None], j[None, :]], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Ref, value: jax.Array, i: jax.Array, j: jax.Array, mask: jax.Array) -> None:
    if launch.is_interpreted():  # JAX's interpreter writes masked elements, too, as they were
        i = jnp.where(mask.any(axis=1), i, ref.shape[0])
    plgpu.store(ref.at[i[:, None], j[None, :]], value.astype(ref.dtype), mask=mask)


def grouped(groups: int, size: int) -> tuple[jax.Array, jax.Array]:
    """The group of each of groups * size lanes, and its place in the group; powers of two."""
    lane = span(groups * size)
    return lane >> (size.bit_length() - 1), lane & (size - 1)


def _in_pairs(row: jax.Array) -> jax.Array:
    """The head of each row, where rows r and r + 8 of 16 have heads 2 r and 2 r + 1 of 16."""
    return (row & -16) + 2 * (row & 7) + ((row >> 3) & 1)


class Rows:
    """Rows of one tile: block_n queries x `size` heads; indices and masks of their arrays."""

    def __init__(self, plan: Plan, block: jax.Array | int, offset: int, size: int) -> None:
        s, c = plan.s, plan.c
        first_n = block // plan.head_blocks * c.block_n
        self.first_n = first_n if s.n > c.block_n else 0
        self.first_h = block % plan.head_blocks * c.block_h + offset
        self.plan, self.tile_h = plan, size

        def is_inside(head: jax.Array) -> jax.Array:
            return (head < c.block_h - offset) & (self.first_h + head < s.h)

        query, lane = grouped(c.block_n, size)
        self.column = span(size)
        if plan.heads_of_word == 2:
            lane, self.column = _in_pairs(lane), _in_pairs(self.column)
        self.column_inside = is_inside(self.column)
        self.query = first_n + query
        self.inside = (self.query < s.n) & is_inside(lane)
        self.index = self.query * s.h + self.first_h + lane
        query, lane = grouped(c.block_n, s.tile_r)
        # A query's ranks, and where there are two slots the same ranks again.
        slot, self.rank = divided(lane, s.tile_r // plan.rank_slots)
        self.is_first_slot = slot == 0
        self.rank_query = first_n + query
        self.rank_inside = (self.rank < s.r) & (self.rank_query < s.n)
        # Block diagonal: a row of query n meets only the ranks of query n.
        self.own_ranks = self.query[:, None] == self.rank_query[None, :]
        self.own_ranks &= self.inside[:, None] & self.rank_inside[None, :]

    @classmethod
    def of_program(cls, plan: Plan, block: jax.Array | int) -> list["Rows"]:
        """One `Rows` for each of a program's tiles of heads, which share the tiles of features."""
        sizes = plan.tiles
        return [cls(plan, block, sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    def tile_indices(self, size: int) -> Indices:
        """The indices of this program's tile of an array [N H, size]."""
        column = span(self.plan.s.features(size))
        return self.index, column, self.inside[:, None] & (column < size)[None, :]

    def load_aq(self, ref: Ref, is_finite: jax.Array | None = None) -> jax.Array:
        """[rows, queries x ranks], NaN at ranks that are not finite in bq; without bq [rows, D]"""
        if not self.plan.s.has_bq:
            return load(ref, *self.tile_indices(self.plan.s.d))
        if is_finite is None:
            return load(ref, self.index, self.rank, self.own_ranks)
        mask = self.own_ranks & is_finite[None, :]
        other = jnp.where(self.own_ranks & ~mask, jnp.nan, 0).astype(ref.dtype)
        return plgpu.load(ref.at[self.index[:, None], self.rank[None, :]], mask=mask, other=other)

    def bq_indices(self) -> Indices:
        """The indices of the tile [queries x ranks, D] of bq [N R, D]."""
        d = span(self.plan.s.tile_d)
        mask = self.rank_inside[:, None] & (d < self.plan.s.d)[None, :]
        return self.rank_query * self.plan.s.r + self.rank, d, mask

    def repeat_for_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """A tile whose `axis` is heads as one whose `axis` is rows, the same for every query."""
        n, shape = self.plan.c.block_n, list(x.shape)
        if n == 1:
            return x
        shape.insert(axis, n)
        x = jnp.broadcast_to(jnp.expand_dims(x, axis), shape)
        return x.reshape(*shape[:axis], -1, *shape[axis + 2 :])

    def sum_over_queries(self, x: jax.Array) -> jax.Array:
        """[keys, rows] as [keys, heads], summed; the transpose of `repeat_for_queries`."""
        n = self.plan.c.block_n
        return x if n == 1 else x.reshape(len(x), n, -1).sum(axis=1)
