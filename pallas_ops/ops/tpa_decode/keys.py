"""The keys of a program of tpa_decode: which ones it takes, and what it loads of them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, divided, power_of_two, span, split_evenly
from pallas_ops.ops.tpa_decode.choose import split_size
from pallas_ops.ops.tpa_decode.config import tile
from pallas_ops.ops.tpa_decode.tiles import Indices, Plan, Rows, grouped, load
from pallas_ops.ops.tpa_decode.words import widen

Position = jax.Array | int  # of a key, or of a block of keys


class Keys:
    """One step's keys. Those from `first` to before `stop` are valid; with `all_valid` all are.

    An entry is one rank of one key. A tile has a power of two of ranks for each key. For a key that
    is not valid, indices are those of the nearest valid key (there must be one), or masked out
    (`masked`, as for stores). With a page table, key m is at m % size of page table[m // size].

    Backward, entries come in octets: eight keys of one rank, the same eight of the next one, ...
    A thread that has row r of a tensor core's result has row r + 8 as well, so of two ranks it has
    both (`heads.split_ranks`).
    """

    def __init__(
        self,
        plan: Plan,
        step: jax.Array,
        stop: Position,
        first: Position = 0,
        table_ref: Ref | None = None,
        *,
        all_valid: bool = False,
    ) -> None:
        self.plan, self.stop, self.table_ref = plan, stop, table_ref
        self.first = None if isinstance(first, int) and first == 0 else first
        self.begin = step * plan.c.block_m
        whole = isinstance(stop, int) and stop % plan.c.block_m == 0 and self.first is None
        self.all_valid = all_valid or whole
        # With two tiles of heads and no pages, masked loads are 10 % faster than clamped indices.
        self.masked = plan.backward or (len(plan.tiles) > 1 and table_ref is None)
        self.index = self.begin + self._spread(span(plan.c.block_m))
        self.inside = self._are_valid(self.index)
        # Cached, as each tile of heads asks for them.
        self.entries = functools.cache(self._entries)

    def _are_valid(self, index: jax.Array) -> jax.Array:
        if self.all_valid:
            return jnp.full(index.shape, True)
        inside = index < self.stop
        return inside if self.first is None else inside & (index >= self.first)

    @property
    def any_valid(self) -> jax.Array:
        """Whether any key of the block is."""
        end, some = self.begin + self.plan.c.block_m, self.begin < self.stop
        return some if self.first is None else some & (end > self.first)

    def seen(self, rows: Rows, length: Position) -> jax.Array:
        """[rows, keys], backward [keys, rows]: which query sees which key.

        Query n of N sees the last `window` keys m < length - (N - 1 - n).
        """
        s, window, backward = self.plan.s, self.plan.p.window, self.plan.backward
        if s.n == 1:
            return jnp.expand_dims(self.inside, int(backward))
        key = jnp.expand_dims(self.index, int(backward))
        last = jnp.expand_dims(length - (s.n - 1) + rows.query, int(not backward))
        seen = key < jnp.minimum(last, s.m)
        return seen if window is None else seen & (key >= last - window)

    def _spread(self, place: jax.Array) -> jax.Array:
        """Which key of the block each place of a tile has, so that reads have no bank conflicts.

        A warp reads a tile as the tensor cores hold it: at a time eight heads (4 banks of shared
        memory) of four keys, or of four pairs of entries. Keys `step` apart lie an odd multiple of
        4 banks apart, so the four reads have different banks. An example: with 34 heads and two
        ranks a key fills 34 banks, so keys 2 apart lie 68 banks apart, which is 4 modulo 32. In
        words of two heads eight words fill 8 banks, and keys lie multiples of 8 apart. No order
        helps where ranks times H is a multiple of 32; rows of 64 heads are rotated (`load_block`).
        """
        s, block = self.plan.s, self.plan.c.block_m
        if self.plan.backward or not self.plan.gathers or s.most_ranks > 2:
            return place
        width = 8 * self.plan.heads_of_word
        step = min(width // math.gcd(width, s.most_ranks * s.h), block // 4)
        own = 2 // s.most_ranks  # keys of a thread's two entries
        pair, first = divided(place, own)
        group, thread = divided(pair, 4)
        group, key = divided(group * own + first, step)
        return (group * 4 + thread) * step + key

    def _entries(self, ranks: int, *, of_block: bool = False) -> tuple[jax.Array, jax.Array]:
        """The row of each entry in an array [M ranks, ..] (or in the block alone), and a mask."""
        size = power_of_two(ranks)
        key, rank = grouped(self.plan.c.block_m, size)
        if self.plan.backward:
            octet, place = grouped(self.plan.c.block_m * size // 8, 8)
            octet, rank = divided(octet, size)
            key = octet * 8 + place
        key = self.index if ranks == 1 else self._spread(key) + self.begin
        exists = self._are_valid(key) if self.masked else jnp.full(key.shape, True)
        if not self.masked and not self.all_valid:
            key = jnp.minimum(key, self.stop - 1)
            key = key if self.first is None else jnp.maximum(key, self.first)
        exists &= rank < ranks
        if of_block:
            return (key - self.begin) * ranks + jnp.minimum(rank, ranks - 1), exists
        return self._place(key) * ranks + rank, exists

    def load_block(self, ref: Ref, ranks: int, wanted: jax.Array | bool) -> jax.Array:
        """The block's head factors, flat, of an array [M ranks H], or of its words, if wanted."""
        s, block = self.plan.s, self.plan.c.block_m
        h = s.h // self.plan.heads_of_word
        size = block * ranks * h
        number = span(power_of_two(size))
        inside = (number < size) & wanted
        if s.pages is None and s.m % block:
            inside &= number < (s.m - self.begin) * (ranks * h)
        begin = self._place(self.begin) * (ranks * h)
        if s.h == 64:
            # Rows of 128 bytes all begin in the same bank. So each row is rotated by eight heads
            # (4 banks) more than the row before. Written like this, Triton's analysis of addresses
            # finds eight heads side by side, and loads 16 bytes at once.
            octet = lax.div(number, 8)
            source = lax.rem(octet + 7 * lax.div(octet, 8), 8)
            number += 8 * (source - lax.rem(octet, 8))
        return plgpu.load(ref.at[begin + number], mask=inside, other=jnp.zeros((), ref.dtype))

    def _place(self, key: jax.Array) -> jax.Array:
        """The places of keys in the cache. A page out of range is taken for the nearest one."""
        if self.table_ref is None:
            return key
        assert self.plan.s.pages is not None
        number, size = self.plan.s.pages
        if size % self.plan.c.block_m == 0:  # a block is within one page
            page = self.table_ref[lax.div(self.begin, size)]
            return key + (jnp.clip(page, 0, number - 1) * size - lax.div(self.begin, size) * size)
        page = plgpu.load(self.table_ref.at[lax.div(key, size)])
        return jnp.clip(page, 0, number - 1) * size + lax.rem(key, size)

    def features(self, ranks: int, size: int) -> Indices:
        """The indices of the tile of bk or bv [M ranks, size]."""
        entry, inside = self.entries(ranks)
        column = span(tile(size))
        return entry, column, inside[:, None] & (column < size)[None, :]

    def load_b(self, ref: Ref, ranks: int, size: int) -> list[jax.Array]:
        """bk or bv [entries, size] in the dtype of the head factors; of eight bits, two halves."""
        s = self.plan.s
        x = load(ref, *self.features(ranks, size // s.features_per_word))
        return [x] if s.quantised is None else [y.astype(s.dtype) for y in widen(x, s.quantised)]

    def heads(self, rows: Rows, ranks: int) -> Indices:
        """The indices of the tile of ak or av [M ranks, H]."""
        entry, inside = self.entries(ranks)
        return entry, rows.first_h + rows.column, inside[:, None] & rows.column_inside[None, :]


def key_range(rows: Rows, length_ref: Ref | None) -> tuple[Position, Position, Position]:
    """The cache's length as given; of what the rows see, the first key and one past the last."""
    s, c, window = rows.plan.s, rows.plan.c, rows.plan.p.window
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
    plan: Plan, split: jax.Array, first: Position, stop: Position
) -> tuple[Any, Any]:
    """The blocks of keys of one split: the first, and one past the last."""
    c, begin, end = plan.c, first // plan.c.block_m, pl.cdiv(stop, plan.c.block_m)
    if plan.p.batch_invariant:
        blocks = split_size(plan.s.m) // c.block_m
        return jnp.maximum(begin, split * blocks), jnp.minimum(end, (split + 1) * blocks)
    # A shard that the window does not reach ends before it begins.
    start, stop = split_evenly(_at_least_0(end - begin), c.num_splits, split)
    return begin + start, begin + stop


def _at_least_0(x: Position) -> Position:
    return max(x, 0) if isinstance(x, int) else jnp.maximum(x, 0)
