"""Which launch tpa_decode takes for a call and a card."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jax.experimental import pallas as pl

from pallas_ops.core.backend import NoKernelError
from pallas_ops.core.card import Card
from pallas_ops.core.tiles import MOST_PARTS, power_of_two
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, head_tiles
from pallas_ops.ops.tpa_decode.shared_memory import backward_bytes, forward_bytes, sm_100_bytes


def choose(s: Sizes, card: Card, *, batch_invariant: bool = False) -> TpaDecodeConfig:
    """The forward launch: one program or more on each multiprocessor.

    Raises:
      NoKernelError: where the smallest block (8 or 16 keys) does not fit in shared memory.
    """
    block_h = s.h if s.h <= (96 if s.has_few_features else 64) else 64
    lanes = max(sum(head_tiles(block_h)), s.tile_r * s.is_rank_first)
    block_n = 1
    while block_n < s.n and 2 * block_n * lanes <= 64:
        block_n *= 2
    for rows in (block_h, block_n), (block_h, 1), (min(s.h, 16), 1):
        c = _choose_keys(s, *rows, card, batch_invariant)
        if c is not None:
            return c
    raise no_kernel("tpa_decode", s, card)


def no_kernel(name: str, s: Sizes, card: Card) -> NoKernelError:
    sizes = f"H={s.h}, R={s.r}, Rk={s.rk}, Rv={s.rv}, D={s.d}, E={s.e}"
    return NoKernelError(f"{name} has no kernel for {s.dtype} of {sizes} on {card}")


def _choose_keys(
    s: Sizes, block_h: int, block_n: int, card: Card, batch_invariant: bool
) -> TpaDecodeConfig | None:
    rows = block_n * sum(head_tiles(block_h))
    if card.has_tensor_memory and _overfills_tensor_memory(s, rows):
        return None
    blocks = s.b * pl.cdiv(s.h, block_h) * pl.cdiv(s.n, block_n)

    def keys_of_split(programs: int) -> tuple[int, int]:
        """Splits for so many programs a multiprocessor, and the keys of each."""
        if batch_invariant:
            return pl.cdiv(s.m, split_size(s.m)), split_size(s.m)
        num_splits = max(1, min(programs * card.num_sms // blocks, pl.cdiv(s.m, 32)))
        if 256 < num_splits <= 272:  # tiles of the merge are powers of two
            num_splits = 256
        return num_splits, pl.cdiv(s.m, num_splits)

    num_splits, keys = keys_of_split(1)
    loop = _loop(s, block_h, rows, keys)
    least = max(8, 16 // min(s.tile_rk, s.tile_rv))  # the tensor cores' sixteen entries
    num_warps = loop.num_warps or (4 if rows * s.tile_e <= 64 * 128 else 8)
    most_programs = loop.most_programs
    if s.is_quantised_bfloat16 and s.tile_e // s.features_per_word <= rows < 64:
        # Triton gives each warp 16 rows of a tile that has as many rows as columns.
        num_warps, most_programs = rows // 16, 4
    c = TpaDecodeConfig(
        block_h=block_h,
        block_n=block_n,
        block_m=max(least, min(loop.block_m, 128 // s.most_ranks)),
        num_splits=num_splits,
        num_warps=num_warps,
        num_stages=loop.num_stages,
    )
    # Launches take less than the bound, above all where head factors are loaded into registers.
    taken = float(forward_bytes(s, c, has_wgmma=False))
    taken *= 2 / 3 if s.gathers(block_h) and s.pages is None else 5 / 6
    least_keys = 96 if loop.num_warps else _least_keys(s, c)
    for programs in range(2, most_programs + 1):
        splits, keys = keys_of_split(programs)
        if keys >= least_keys * (programs - 1) and taken <= card.shared_memory // programs:
            c = dataclasses.replace(c, num_splits=splits)
    bytes_of = partial(forward_bytes, has_wgmma=card.capability // 10 == 9)
    return fit(s, c, bytes_of, card, least=least)


def _least_keys(s: Sizes, c: TpaDecodeConfig) -> int:
    """How many keys a program has at least, where two on one multiprocessor take less time."""
    if c.block_h <= 32 or not s.gathers(c.block_h):
        return 96 * c.num_warps
    needs_few = c.block_h > 64 or (c.block_h <= 48 and s.has_bq)
    return 3 * c.block_m if needs_few else 48 * c.num_warps


def _overfills_tensor_memory(s: Sizes, rows: int) -> bool:
    """Whether 64 rows of float16 in bfloat16 pieces take more tensor memory (sm_100) than there is.

    With JAX 0.10.2 they do from 128 features of values on: up to 1,056 columns of 512.
    """
    has_bfloat16_pieces = not (s.rounds_weights or s.has_float16_weights)
    return s.dtype == "float16" and has_bfloat16_pieces and s.tile_e >= 128 and rows >= 64


class _Loop(NamedTuple):
    """A loop over keys: how many are a block, its stages, programs of a multiprocessor, warps."""

    block_m: int
    num_stages: int = 3
    most_programs: int = 1
    num_warps: int | None = None  # None: by the size of the accumulator


def _loop(s: Sizes, block_h: int, rows: int, keys: int) -> _Loop:
    """The loop over so many keys, by the first rule that applies."""
    usual, gathers = 128 if keys >= 2048 else 64 if keys > 32 else 32, s.gathers(block_h)
    if gathers and s.pages:  # a block that is gathered is within one page
        usual = min(usual, max(16, s.pages[1] & -s.pages[1]))
    short = min(64, usual)
    if s.has_few_features and len(head_tiles(block_h)) > 1:
        # In these two cases 32 entries take 3 to 20 % less time, in others up to 25 % more.
        is_rounded_or_paged = s.precision == "default" or s.pages is not None
        has_two_ranks = s.most_ranks == 2 and s.h % 8 > 0
        is_slow = s.h % 2 == 1 or (has_two_ranks and is_rounded_or_paged)
        entries = 32 if is_slow and not s.prefetches_heads(block_h) else 64
        return _Loop(min(entries // s.most_ranks, power_of_two(keys)), most_programs=2)
    if gathers and block_h > 32:
        return _Loop(min(64 // s.most_ranks, usual), most_programs=2)
    if s.has_few_features and s.most_ranks == 1:
        return _Loop(short, most_programs=3 if block_h > 16 else 2)
    if s.n > 1 and rows > 32 and not s.is_rank_first:
        return _Loop(short, most_programs=2)
    if s.is_quantised_bfloat16:
        return _Loop(usual, most_programs=2)
    has_two_ranks = s.most_ranks == 2 and s.has_few_features
    if 16 < block_h < rows == 32 and has_two_ranks and _is_long_for_two_warps(s, block_h, keys):
        return _Loop(32, most_programs=2, num_warps=2)
    is_long = usual == 64 and keys >= 1024 and s.most_ranks == 1
    return _Loop(usual, 4 if is_long else 3, 2 if gathers else 1)


def _is_long_for_two_warps(s: Sizes, block_h: int, keys: int) -> bool:
    """Whether two warps take less time than four: they exchange fewer maxima and weights.

    They take up to 11 % less. With 17 to 24 heads of bfloat16 and 1,024 keys a program they take 1
    to 2 % more, with float16 and 248 keys 20 % more. Calls that were not timed have four.
    """
    if s.has_float16_weights:
        return keys >= 768 and s.pages is None
    is_timed = s.is_plain_bfloat16 and s.quantised is None and s.prefetches_heads(block_h)
    return is_timed and keys >= 192


def split_size(m: int) -> int:
    """The keys of a split where `batch_invariant`: a power of two."""
    return max(512, power_of_two(pl.cdiv(m, MOST_PARTS)))


def choose_backward(s: Sizes, card: Card, at_once: int = 1) -> TpaDecodeConfig | None:
    """The launch of `at_once` backward passes; None where nothing fits."""
    block_n, tiles = power_of_two(s.n), head_tiles(s.h, backward=True)
    rows = block_n * sum(tiles)
    if rows > 256:
        return None
    is_narrow = rows <= 32 or (s.has_few_features and rows <= 96)
    # The tensor cores of sm_90 take 64 entries at once. More, or as many in wider tiles, spill.
    # Tensor memory (sm_100) does not hold 64 entries of many features, or of other dtypes.
    has_wide_results = max(s.d, s.e) > 128 or not s.is_plain_bfloat16
    is_too_large = card.has_tensor_memory and has_wide_results
    entries = 64 if card.capability >= 90 and is_narrow and not is_too_large else 32
    block_m = max(16, entries // s.most_ranks)
    if card.has_tensor_memory and block_m * s.most_ranks > entries:
        return None
    c = TpaDecodeConfig(
        block_h=s.h,
        block_n=block_n,
        block_m=block_m,
        num_warps=4 if block_n * tiles[0] <= 64 else 8,
        num_stages=2 if s.dtype == "float32" else 3,
    )
    taken = backward_bytes(s, c) * 8 // 9  # an estimate below the bound
    if s.has_few_features and taken > card.shared_memory // 2:  # two programs a multiprocessor
        c = dataclasses.replace(c, num_stages=2)
    fitting = fit(s, c, backward_bytes, card, least=16)
    if fitting is None:
        return None
    programs = (2 if s.has_few_features else 1) * card.num_sms // (s.b * at_once)
    if at_once >= 16 and programs >= 8:
        # An odd number. With an even one all splits of all passes may store at addresses that are a
        # power of two apart, which takes 15 to 50 % more time.
        programs -= 1 - programs % 2
    num_splits = max(1, min(programs, pl.cdiv(s.m, fitting.block_m)))
    return dataclasses.replace(fitting, num_splits=num_splits)


def queries_of_pass(s: Sizes, card: Card) -> int:
    """How many queries one backward pass takes; more come in several passes.

    With few features a program has four warps, and two programs share a multiprocessor. Else it has
    up to eight warps. Where not even one query fits, the result is the most: the pass falls back.
    """
    most = max(1, (64 if s.has_few_features else 128) // head_tiles(s.h, backward=True)[0])
    n = min(most, power_of_two(s.n))
    while n and choose_backward(dataclasses.replace(s, n=n), card) is None:
        n //= 2
    return n or most


def fit(
    s: Sizes, c: TpaDecodeConfig, bytes_of: Callable[..., int], card: Card, *, least: int
) -> TpaDecodeConfig | None:
    """`c` where it fits in shared memory, else with block_m halved, then with fewer stages."""
    while bytes_of(s, c) + card.has_tensor_memory * sm_100_bytes(s, c) > card.shared_memory:
        if c.block_m > least:
            c = dataclasses.replace(c, block_m=c.block_m // 2)
        elif c.num_stages > 1:
            c = dataclasses.replace(c, num_stages=c.num_stages - 1)
        else:
            return None
    return c
