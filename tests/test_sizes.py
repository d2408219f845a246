"""What kernels compute of indices, in int32, beside exact integers, up to the largest sizes."""

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_ops
from pallas_ops.core import launch, tiles
from pallas_ops.core.card import H200
from pallas_ops.core.implementations import LONGEST
from pallas_ops.ops.chunk_cumsum_decay import config as chunks
from pallas_ops.ops.logcumsumexp import config as logcumsumexp
from pallas_ops.ops.lrpe_cosine import config as lrpe_config
from pallas_ops.ops.lrpe_cosine import tiles as lrpe
from pallas_ops.ops.tpa_decode import config as tpa_config
from pallas_ops.ops.tpa_decode import keys as tpa_keys
from pallas_ops.ops.tpa_decode import tiles as tpa
from pallas_ops.ops.tpa_decode.choose import choose, split_size
from pallas_ops.scan.tile import Ranges, Tile
from pallas_ops.scan.view import Sizes, View

LARGE = [
    (LONGEST, 1, 1),
    (1, LONGEST, 1),
    (1, 1, LONGEST),
    (1, LONGEST, 64),
    (LONGEST, 5, 3),
    (2**16 + 1, 2**23 + 77, 2**16 + 3),
    (3, 2**30 - 1, 2047),
]
FACTORS: Any = dict(b=1, r=16, d=64, e=64, dtype="bfloat16")  # of tpa_decode


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """With an H200's launches."""
    with launch.interpreted(True):
        assert launch.is_interpreted()
        yield


def programs(grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, ...]]:
    """The first and the last on each axis, with `pl.program_id` of theirs."""
    for ids in itertools.product(*({0, size - 1} for size in grid)):
        assert max(ids) < 2**31
        monkeypatch.setattr(pl, "program_id", lambda axis, ids=ids: jnp.int32(ids[axis]))
        yield ids


def same(got: jax.Array, want: np.ndarray[Any, Any], where: Any = True) -> None:
    """An int32 array and exact integers, where it counts."""
    assert got.dtype == jnp.int32
    shape = np.broadcast_shapes(got.shape, want.shape, np.shape(where))
    where = np.broadcast_to(where, shape)
    np.testing.assert_array_equal(
        np.broadcast_to(got, shape)[where], np.broadcast_to(want, shape)[where]
    )


def views(shape: tuple[int, int, int]) -> Iterator[View]:
    x = jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16"))
    block_n = logcumsumexp.choose_block_n(Sizes.of(shape, 1, 2))
    for reverse, backward in itertools.product((False, True), repeat=2):
        scan = logcumsumexp.Params(axis=1, block_n=block_n, reverse=reverse)
        yield logcumsumexp.plan_of(x, scan, backward=backward).view  # type: ignore[arg-type]
        for chunk_size in (1, 100, 2**30, 2**30 + 5, shape[1]):
            dtypes = "bfloat16", "bfloat16"
            params = chunks.Params(axis=1, chunk_size=chunk_size, reverse=reverse, dtypes=dtypes)
            yield chunks.plan_of(x, None, params).view  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", LARGE)
def test_scans(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for view in views(shape):
        s = view.s
        for i, j, k in programs(view.grid, monkeypatch):
            ranges = Ranges(view)
            slot = j * view.num_ranges + np.arange(view.num_ranges, dtype=object)[:, None]
            number, row = slot % s.count, k * view.rows + slot // s.count
            there = (slot < view.rows * s.count) & (row < s.b)
            same(ranges.number, number, there)
            same(ranges.row, row, there)
            column = i * view.block_c + np.arange(view.block_c, dtype=object)[None]
            same(ranges.column, column, column < s.c)
            start = number * s.size
            stop = np.minimum(start + s.size, s.n)
            if view.from_end:
                start, stop = s.n - stop, s.n - start
            same(ranges.start, start, there)
            same(ranges.stop, stop, there)
            for t in {0, view.tiles - 1}:
                tile = Tile(ranges, jnp.int32(t * view.block_n), view.block_n, view.num_steps)
                order = np.asarray(tile.order, object) + t * view.block_n
                low, high, own = (y[None, :, None, :] for y in (start, stop, there))
                position = high - 1 - order if view.reverse else low + order
                inside = (position >= low) & (position < high) & own
                same(tile.position, position, inside)
                if tile.mask is not None:
                    mask = np.broadcast_to(tile.mask, inside.shape)
                    np.testing.assert_array_equal(mask & own, inside)


@pytest.mark.parametrize(
    ("b", "n", "h", "d"),
    [(1, LONGEST, 1, 1), (1, 1, LONGEST, 1), (LONGEST, 3, 2, 5), (2, 2**23 + 1, 255, 128)],
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_rotations(
    b: int, n: int, h: int, d: int, heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = lrpe_config.Sizes(b=b, n=n, h=h, d=d)
    walk = lrpe_config.choose_walk(s, "none", H200)
    p = lrpe_config.Params(
        act="none",
        theta="h d",
        shape=(),
        num_axes=1,
        num_prefix_tokens=0,
        heads_first=heads_first,
        per_batch=False,
        axis_name=None,
        implementation=None,
        config=None,
    )
    for c in (lrpe_config.choose(s), walk):
        plan: Any = lrpe_config.Plan(p=p, s=s, c=c, width=d, spread=False, precise=False)
        block = np.arange(c.block_n, dtype=object)[:, None]
        in_rows = dataclasses.replace(c, variant="sequence", num_parts=1)
        for i, _, k in programs(dataclasses.replace(plan, c=in_rows).grid, monkeypatch):
            tile = lrpe.Tile.of_rows(plan)
            row = i * c.block_n + block
            token, head = (row % n, row // n) if heads_first else (row // h, row % h)
            same(tile.row, row, row < plan.rows)
            same(tile.token, token, row < plan.rows)
            same(tile.head, head, row < plan.rows)
            assert int(tile.b) == k
        for number, own in itertools.product({0, plan.blocks_n - 1}, {0, h - 1}):
            tile = lrpe.Tile.of_tokens(plan, 0, jnp.int32(number), jnp.int32(own), jnp.int32(0))
            token = number * c.block_n + block
            row = own * n + token if heads_first else token * h + own
            same(tile.token, token, token < n)
            same(tile.row, row, token < n)


@pytest.mark.parametrize(
    ("n", "m", "h"),
    [
        (1, LONGEST // 2, 32),
        (2**20, 2**20, 78),
        (1, 5, 2**26),
        (LONGEST // 16, 64, 1),
        (1, 2**24, 61),
    ],
)
def test_decoding(n: int, m: int, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = tpa_config.Sizes(**FACTORS, n=n, m=m, h=h, rk=2, rv=2)
    c = choose(s, H200)
    plan = tpa.Plan(s, c, tpa_config.Params())
    for i, split in programs((plan.row_blocks, c.num_splits), monkeypatch):
        first, k = 0, plan.heads_of_word
        for rows in tpa.Rows.of_program(plan, jnp.int32(i)):
            query, lane = (np.asarray(y, object) for y in tpa.grouped(c.block_n, rows.tile_h))
            lane = lane.reshape(-1, 16 // k, k).swapaxes(1, 2).ravel()  # rows r, r + 8: a word
            query, lane = i // plan.head_blocks * c.block_n + query, first + lane
            head = i % plan.head_blocks * c.block_h + lane
            inside = (query < n) & (head < h) & (lane < c.block_h)
            same(rows.index, query * h + head, inside)
            first += rows.tile_h
        rank_query, rank = (np.asarray(y, object) for y in tpa.grouped(c.block_n, s.tile_r))
        rank_query = i // plan.head_blocks * c.block_n + rank_query
        same(rows.rank_query * s.r + rows.rank, rank_query * s.r + rank, rank_query < n)
        blocks = -(-m // c.block_m)
        start, stop = tiles.split_evenly(jnp.int32(blocks), c.num_splits, jnp.int32(split))
        assert [int(start), int(stop)] == [(split + j) * blocks // c.num_splits for j in (0, 1)]
        order = np.asarray(tpa_keys.Keys(plan, jnp.int32(0), m).index, object)
        assert sorted(order) == list(range(c.block_m))
        assert plan.gathers or list(order) == sorted(order)
        keys, begin = tpa_keys.Keys(plan, jnp.int32(int(stop) - 1), m), (int(stop) - 1) * c.block_m
        same(keys.index, begin + order, begin + order < m)
        entry = (2 * order[:, None] + np.arange(2)).reshape(-1)
        inside = (begin + order < m).repeat(2)
        same(keys.entries(2)[0], 2 * begin + entry, inside)
        same(keys.entries(2, of_block=True)[0], entry, inside)


@pytest.mark.parametrize("size", [16, 48, 128, 2**20])
def test_decoding_of_pages(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key of the last page of the largest pool, and what is out of range."""
    count = LONGEST // 2 // size
    s = tpa_config.Sizes(**FACTORS, n=1, m=7 * size, h=47, rk=2, rv=2, pages=(count, size))
    c = choose(s, H200)
    assert not s.gathers(c.block_h)
    plan = tpa.Plan(s, c, tpa_config.Params())
    monkeypatch.setattr("pallas_ops.ops.tpa_decode.keys.plgpu.load", lambda x, **_: x)
    for page in (0, count - 1, count, -1, 2**31 - 1, -(2**31)):
        pages = jnp.full(7, page, jnp.int32)
        table: Any = SimpleNamespace(at=pages) if size % c.block_m else pages
        block = 7 * size // c.block_m - 1
        keys = tpa_keys.Keys(plan, jnp.int32(block), s.m, 0, table)
        entry = block * c.block_m * 2 + np.arange(c.block_m * 2, dtype=object)
        want = entry % (2 * size) + min(max(page, 0), count - 1) * 2 * size
        same(keys.entries(2)[0], want, entry < 2 * s.m)


@pytest.mark.parametrize("m", [LONGEST, 5000])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decoding_of_a_window(
    m: int, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of its keys belongs to one split."""
    s = tpa_config.Sizes(**FACTORS, n=1, m=m, h=32, rk=1, rv=1)
    c = choose(s, H200, batch_invariant=batch_invariant)
    p = tpa_config.Params(window=3000, batch_invariant=batch_invariant)
    plan = tpa.Plan(s, c, p)
    (rows,) = tpa.Rows.of_program(plan, 0)
    for (split,) in programs((c.num_splits,), monkeypatch):
        _, first, stop = tpa_keys.key_range(rows, None)
        assert (first, stop) == (m - 3000, m)
        got = tuple(map(int, tpa_keys.blocks_of_split(plan, jnp.int32(split), first, stop)))
        begin, end = first // c.block_m, -(-m // c.block_m)
        blocks = end - begin
        want = tuple(begin + (split + i) * blocks // c.num_splits for i in (0, 1))
        if batch_invariant:
            size = split_size(m) // c.block_m
            want = max(begin, split * size), min(end, (split + 1) * size)
        assert got == want


def test_what_cannot_be_counted_runs_the_reference() -> None:
    """Queries times heads, or times ranks."""

    def factors(n: int, h: int, r: int) -> list[jax.ShapeDtypeStruct]:
        shapes = (1, n, h, r), (1, 2, h), (1, 2, h), (1, n, r, 4), (1, 2, 4), (1, 2, 4)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def decode(*xs: Any) -> Any:
        return pallas_ops.tpa_decode(*xs, implementation="triton")

    jax.eval_shape(decode, *factors(2**20, 2**10, 4))
    for n, h, r in ((2**20, 2**11, 4), (2**26, 4, 32)):
        with pytest.raises(ValueError, match=f"does not take sizes above {LONGEST}"):
            jax.eval_shape(decode, *factors(n, h, r))
