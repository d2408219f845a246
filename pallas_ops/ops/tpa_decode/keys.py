"""The keys of a program of tpa_decode: which ones it takes, and what it loads of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, power_of_two, span, split_evenly, stack, unstack
from pallas_ops.ops.tpa_decode.choose import split_size
from pallas_ops.ops.tpa_decode.config import tile
from pallas_ops.ops.tpa_decode.tiles import Plan, Rows, grouped, load
from pallas_ops.ops.tpa_decode.words import widen


class Keys:
    """One step's keys, of which those from `first` to before `stop` count, or all do.

    An entry is one rank of one key. Tiles hold a power of two of ranks a key. In place of a key
    that does not count, the nearest one that does is loaded (there must be one), or none (`masked`,
    as for stores). With `octets` entries come as eight keys of one rank, the same eight of the next
    one, ...: a thread that has row r of a tensor core's result has row r + 8 as well, so it has all
    of two ranks (`of_ranks`).
    With a page table [pages], key m is at place m % size of page table[m // size]. `pages` are
    those of this block, if they were looked up before.
    """

    def __init__(
        self,
        plan: Plan,
        step: jax.Array,
        stop: jax.Array | int,
        first: jax.Array | int = 0,
        table_ref: Ref | None = None,
        pages: list[jax.Array] | None = None,
        *,
        masked: bool = False,
        all_count: bool = False,
        octets: bool = False,
    ) -> None:
        self.octets = octets
        self.plan, self.stop, self.table_ref, self.pages = plan, stop, table_ref, pages
        self.first = None if isinstance(first, int) and first == 0 else first
        self.begin, self.masked = step * plan.c.block_m, masked
        whole = isinstance(stop, int) and stop % plan.c.block_m == 0 and self.first is None
        self.all_count = all_count or whole
        self.index = self.begin + span(plan.c.block_m)
        self.inside = self._count(self.index)

    def _count(self, index: jax.Array) -> jax.Array:
        if self.all_count:
            return jnp.full(index.shape, True)  # the compiler cannot tell
        inside = index < self.stop
        return inside if self.first is None else inside & (index >= self.first)

    def seen(self, rows: Rows, length: jax.Array | int, *, keys_first: bool = False) -> jax.Array:
        """[rows, keys] or [keys, rows]: which query sees which key.

        Query n of N sees the last `window` keys m < length - (N - 1 - n).
        """
        s, window = self.plan.s, self.plan.p.window
        if s.n == 1:
            return jnp.expand_dims(self.inside, int(keys_first))
        key = jnp.expand_dims(self.index, int(keys_first))
        last = jnp.expand_dims(length - (s.n - 1) + rows.query, int(not keys_first))
        seen = key < jnp.minimum(last, s.m)
        return seen if window is None else seen & (key >= last - window)

    def entries(self, ranks: int, *, odd: bool = False) -> tuple[jax.Array, jax.Array]:
        """Which rows of an array [M ranks, ..] they are (or those of odd ranks); which exist."""
        size = power_of_two(ranks) >> odd
        key, rank = grouped(self.plan.c.block_m, size)
        if self.octets:
            octet, place = grouped(self.plan.c.block_m * size // 8, 8)
            key, rank = octet // size * 8 + place, octet % size
        key = self.index if ranks == 1 else key + self.begin
        rank = 2 * rank + 1 if odd else rank
        exists = self._count(key) if self.masked else jnp.full(key.shape, True)
        if not self.masked and not self.all_count:
            key = jnp.minimum(key, self.stop - 1)
            key = key if self.first is None else jnp.maximum(key, self.first)
        return self._place(key) * ranks + rank, exists & (rank < ranks)

    def _place(self, key: jax.Array) -> jax.Array:
        """Where keys are in the cache. A page out of range is taken for the nearest one."""
        if self.table_ref is None:
            return key
        assert self.plan.s.pages is not None
        number, size = self.plan.s.pages
        if self.pages is not None:
            first, *others = self.pages
            begin = lax.div(self.begin, size) * size
            start = first * size - begin
            for j, page in enumerate(others, 1):
                start = jnp.where(key < begin + j * size, start, (page - j) * size - begin)
            return key + start
        if size % self.plan.c.block_m == 0:  # a block is within one page
            page = self.table_ref[lax.div(self.begin, size)]
            return key + (jnp.clip(page, 0, number - 1) * size - lax.div(self.begin, size) * size)
        page = plgpu.load(self.table_ref.at[lax.div(key, size)])
        return jnp.clip(page, 0, number - 1) * size + lax.rem(key, size)

    def features(self, ranks: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where bk or bv [M ranks, size] has its features."""
        entry, inside = self.entries(ranks)
        column = span(tile(size))
        return entry, column, inside[:, None] & (column < size)[None, :]

    def load_b(self, ref: Ref, ranks: int, size: int) -> list[jax.Array]:
        """The parts of bk or bv, each [entries, size / parts], in the dtype of the head factors."""
        s = self.plan.s
        x = load(ref, *self.features(ranks, size // s.parts))
        return [x] if s.quantised is None else [y.astype(s.dtype) for y in widen(x, s.quantised)]

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
            x = x.swapaxes(1, 2).reshape(-1, x.shape[1])
        else:
            x = load(ref, *self.heads(rows, ranks)).T
        return rows.spread(x.astype(jnp.float32), 0)

    def load_ranks_of_a(self, rows: Rows, ref: Ref, ranks: int) -> list[jax.Array]:
        """Of octets, each rank of ak or av as [keys / 8, 8, rows], in float32."""
        if self.plan.pairs:
            xs = self._load_two_ranks(rows, ref)
        else:
            x = self._load_groups(rows, ref, ranks)
            xs = of_ranks(x.swapaxes(0, 1).reshape(x.shape[1], -1), ranks)
        return [rows.spread(x.astype(jnp.float32), 2) for x in xs]

    def _load_groups(self, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
        """Of an array [M ranks, H] these heads, as [heads / 16, entries, 16].

        Shared memory holds tiles in the order of their axes. So 16 heads of one entry are 32 bytes,
        and those of the next entry follow. In a tile [entries, heads] of 64 heads entries would lie
        128 bytes apart, all in the same banks, and the eight that a matrix load takes at once would
        be read one after the other. Such a tile would also be copied as that of the features, which
        has its shape: by eight numbers a thread, though rows of heads allow but two at a time.
        """
        entry, inside = self.entries(ranks)
        column, column_inside = (x.reshape(-1, 1, 16) for x in (rows.column, rows.column_inside))
        i, j = jnp.broadcast_arrays(entry[None, :, None], rows.first_h + column)
        mask = inside[None, :, None] & column_inside
        return plgpu.load(ref.at[i, j], mask=mask, other=0.0)

    def _load_pairs(self, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
        """Of a flat array [M ranks H] these heads, as [heads, entries]."""

        def of_ranks(x: jax.Array) -> list[jax.Array]:
            """Those of even ranks and those of odd ranks, each [heads / 16, 8, entries / 2]."""
            x = x.swapaxes(1, 2)
            return unstack(x.reshape(*x.shape[:2], -1, 2))

        first, second, odd_of_odd = self._pairs(rows, ref, ranks)
        even, odd = of_ranks(first), of_ranks(second)
        even_heads = jnp.stack([even[0], odd[1]], axis=-1)
        odd_heads = jnp.stack([odd[0], odd_of_odd.swapaxes(1, 2)], axis=-1)
        x = jnp.stack([even_heads, odd_heads], axis=-1)  # [heads / 16, 8, entries / 2, 2, 2]
        return x.transpose(0, 4, 1, 2, 3).reshape(rows.tile_h, -1)

    def _load_two_ranks(self, rows: Rows, ref: Ref) -> list[jax.Array]:
        """Of a flat array [M 2 H] these heads of each rank, as [keys / 8, 8, heads]; in octets."""
        first, second, odd_of_odd = self._pairs(rows, ref, 2)
        even, odd = (lax.split(x.reshape(-1, 16, 8), (8, 8), 1) for x in (first, second))
        ranks = (even[0], odd[0]), (odd[1], odd_of_odd.reshape(-1, 8, 8))

        def joined(even: jax.Array, odd: jax.Array) -> jax.Array:
            x = jnp.stack([even, odd], axis=-1)  # [heads / 16 keys / 8, 8, 8, 2]
            if rows.tile_h == 16:  # no axis of size 1, as in `of_ranks`
                x = x.swapaxes(2, 3)
            else:
                x = x.reshape(rows.tile_h // 16, -1, 8, 8, 2).transpose(1, 2, 0, 4, 3)
            return x.reshape(-1, 8, rows.tile_h)

        return [joined(*x) for x in ranks]

    def _pairs(self, rows: Rows, ref: Ref, ranks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of a flat array [M ranks H], for odd H and an even number of ranks, pairs of numbers.

        An asynchronous copy takes at least four bytes, two numbers, and begins at an even place.
        Even ranks begin at an even place: their pairs of numbers are pairs of heads. Odd ranks
        begin at an odd place p. Their even heads are the second numbers of the pairs from p - 1 on,
        their odd heads the first numbers of the pairs from p + 1 on.

        Returns:
          The first and the second numbers of all ranks, those of odd ranks from p - 1 on, and the
          first ones of odd ranks from p + 1 on. Each is [heads / 16, entries, 8].
        """
        column = span(rows.tile_h).reshape(-1, 1, 16)
        heads = self.plan.s.h - rows.first_h

        def load_pairs(*, odd: bool) -> list[jax.Array]:
            entry, inside = self.entries(ranks, odd=odd)
            stop = heads - 1 if odd else heads + 1
            place = 2 * ((entry * self.plan.s.h + rows.first_h + int(odd)) >> 1)
            mask = inside[None, :, None] & (column < stop)
            x = plgpu.load(ref.at[place[None, :, None] + column], mask=mask, other=0.0)
            return unstack(x.reshape(*x.shape[:2], 8, 2))

        first, second = load_pairs(odd=False)
        return first, second, load_pairs(odd=True)[0]


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


def of_ranks(x: jax.Array, ranks: int) -> list[jax.Array]:
    """[entries, rows] in octets as [keys / 8, 8, rows] of each rank.

    No axis here ever has size 1: Triton would give such a tile another layout, by way of shared
    memory.
    """
    size = power_of_two(ranks)
    return list(lax.split(x.reshape(-1, 8 * size, x.shape[1]), (8,) * size, 1))


def join_ranks(xs: list[jax.Array]) -> jax.Array:
    """The inverse of `of_ranks`."""
    return stack(xs).transpose(0, 3, 1, 2).reshape(-1, xs[0].shape[2])


def look_up(plan: Plan, step: Any, table_ref: Ref, limit: Any) -> list[jax.Array]:
    """The pages of a block; those behind the last key that counts are not read."""
    assert plan.s.pages is not None
    number, size = plan.s.pages
    first = lax.div(step * plan.c.block_m, size)
    numbers = [first + j for j in range(plan.pages_a_block)]
    pages = [plgpu.load(table_ref.at[i], mask=i * size < limit, other=0) for i in numbers]
    return [jnp.clip(page, 0, number - 1) for page in pages]


def key_range(
    rows: Rows, length_ref: Ref | None
) -> tuple[jax.Array | int, jax.Array | int, jax.Array | int]:
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
    plan: Plan, split: jax.Array, first: jax.Array | int, stop: jax.Array | int
) -> tuple[Any, Any]:
    """The blocks of keys of one split: the first, and one past the last."""
    c, begin, end = plan.c, first // plan.c.block_m, pl.cdiv(stop, plan.c.block_m)
    if plan.p.batch_invariant:
        blocks = split_size(plan.s.m) // c.block_m
        return jnp.maximum(begin, split * blocks), jnp.minimum(end, (split + 1) * blocks)
    if plan.p.window is None:
        return part(split, c.num_splits, end)
    # A shard that the window does not reach ends before it begins.
    start, stop = part(split, c.num_splits, _at_least_0(end - begin))
    return begin + start, begin + stop


def _at_least_0(x: jax.Array | int) -> jax.Array | int:
    return max(x, 0) if isinstance(x, int) else jnp.maximum(x, 0)


def part(i: jax.Array, parts: int, blocks: jax.Array | int) -> tuple[Any, Any]:
    """The i-th of `parts` even parts of `blocks`: first, and one past the last."""
    return (0, blocks) if parts == 1 else split_evenly(blocks, parts, i)
