"""How tpa_decode runs: the launcher first, then the kernel bodies.

A program holds rows (queries x heads) and streams keys. Scores are taken rank first:
q k^T = aq (bq bk^T). The long product has the input dtype on both sides, so it is exact, and needs
a tile of R rows instead of H; the short product with aq keeps all of float32 (see `matmul`),
for the log-sum-exp is not rounded to 16 bits. Beyond the length scores are hidden, and so need not
be what they are made of.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.core.backend import NoKernelError, plgpu
from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, span
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, choose, tile
from pallas_ops.ops.tpa_decode.keys import Keys, blocks_of_split, each_rank, key_range, sum_ranks
from pallas_ops.ops.tpa_decode.matmul import dot
from pallas_ops.ops.tpa_decode.tiles import (
    Plan,
    Rows,
    flat,
    load,
    per_batch,
    sizes,
    store,
)

LOWEST = float(jnp.finfo(jnp.float32).min)

State = tuple[jax.Array, jax.Array, jax.Array]  # maximum, sum and accumulator of some rows


def forward(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array | None,
    bk: jax.Array,
    bv: jax.Array,
    lengths: jax.Array | None,
    page_table: jax.Array | None = None,
    *,
    score_scale: float,
    value_scale: float,
    window: int | None,
    batch_invariant: bool,
    out_dtype: str,
    config: TpaDecodeConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H] of factors with a rank axis.

    With a page table the cache's factors have [pages, page size] in place of [B, M].
    """
    s = sizes(aq, ak, av, bq, bk, bv, page_table)
    _check_card(s)
    c = config or choose(s, card.current(), batch_invariant=batch_invariant)
    pages = None if page_table is None else (ak.shape[0], ak.shape[1])
    plan = Plan(s, c, score_scale, value_scale, window, batch_invariant, pages)
    rows, splits = s.n * s.h, c.num_splits
    if pages is not None:  # one cache for the whole batch
        ak, av, bk, bv = (x.reshape(1, -1, *x.shape[2:]) for x in (ak, av, bk, bv))
    ak, av = (x.reshape(len(x), -1) if plan.pairs else flat(x, 3) for x in (ak, av))
    features = (None if x is None else flat(x, 3) for x in (bq, bk, bv))
    lengths = None if lengths is None else lengths[:, None]
    operands = flat(aq, 3), ak, av, *features, lengths, page_table
    dtype = jnp.dtype(out_dtype if splits == 1 else jnp.float32)
    out, lse = launch(
        partial(_forward_kernel, plan=plan),
        *operands,
        name="tpa_decode",
        grid=(plan.row_blocks, splits, s.b),
        in_specs=[None if x is None else per_batch(x) for x in operands],
        out_specs=[
            pl.BlockSpec((None, None, rows, s.e), lambda _, i, b: (b, i, 0, 0)),
            pl.BlockSpec((None, None, rows), lambda _, i, b: (b, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((s.b, splits, rows, s.e), dtype),
            jax.ShapeDtypeStruct((s.b, splits, rows), jnp.float32),
        ],
        num_warps=c.num_warps,
        # Pages are looked up one stage before they are copied.
        num_stages=c.num_stages + (pages is not None),
    )
    if splits > 1:
        # Blocks of one size add up in one order, however many splits the cache's size makes.
        out, lse = _merge(out, lse, out_dtype, 32 if batch_invariant else tile(splits))
    return out.reshape(s.b, s.n, s.h, s.e), lse.reshape(s.b, s.n, s.h)


def _check_card(s: Sizes) -> None:
    if s.quantised and s.quantised.startswith("float8") and card.current().capability < 89:
        raise NoKernelError(
            f"tpa_decode has no kernel for {s.quantised} on {card.current()}; accepted: "
            "implementation=None or 'xla', which run jax.numpy"
        )


def _merge(
    out: jax.Array, lse: jax.Array, out_dtype: str, block: int
) -> tuple[jax.Array, jax.Array]:
    """Partial results out [B, S, rows, E] and lse [B, S, rows], merged over S."""
    b, splits, rows, e = out.shape
    merged, total = launch(
        partial(_merge_kernel, splits=splits, block=block, e=e),
        out,
        lse,
        name="tpa_decode_merge",
        grid=(rows, b),
        in_specs=[
            pl.BlockSpec((None, splits, None, e), lambda i, b: (b, 0, i, 0)),
            pl.BlockSpec((None, splits, None), lambda i, b: (b, 0, i)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, e), lambda i, b: (b, i, 0)),
            pl.BlockSpec((None, 1), lambda i, b: (b, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, rows, e), jnp.dtype(out_dtype)),
            jax.ShapeDtypeStruct((b, rows), jnp.float32),
        ],
        num_warps=max(1, min(8, block * tile(e) // 512)),
    )
    return merged, total


def _forward_kernel(
    aq_ref: Ref,  # [N H, R], or [N H, D] without bq
    ak_ref: Ref,  # [M Rk, H], or [M Rk H] for pairs of heads; so is av_ref
    av_ref: Ref,  # [M Rv, H]
    bq_ref: Ref | None,  # [N R, D]
    bk_ref: Ref,  # [M Rk, D]
    bv_ref: Ref,  # [M Rv, E]
    length_ref: Ref | None,  # [1]
    table_ref: Ref | None,  # [pages of the row]; ak to bv then have all rows' pages
    out_ref: Ref,  # [N H, E]
    lse_ref: Ref,  # [N H]
    *,
    plan: Plan,
) -> None:
    s = plan.s
    tiles = Rows.of_program(plan, pl.program_id(0) if plan.row_blocks > 1 else 0)
    aqs, bq = [rows.load_aq(aq_ref) for rows in tiles], tiles[0].load_bq(bq_ref)
    length, first_key, limit = key_range(tiles[0], length_ref)
    start, stop = blocks_of_split(plan, pl.program_id(1), first_key, limit)
    scale = plan.score_scale * LOG2E

    def step(i: jax.Array, states: list[State]) -> list[State]:
        keys = Keys(plan, i, limit, first_key, table_ref)
        stored = keys if plan.pages else Keys(plan, i, s.m)
        bk = stored.load_b(bk_ref, s.rk, s.d)
        inner = bk.T if bq is None else scale * dot(bq, bk.T, pieces=3)
        bv = keys.load_b(bv_ref, s.rv, s.e)

        def of(rows: Rows, aq: jax.Array, state: State) -> State:
            top, total, acc = state
            score = dot(aq, inner, pieces=3) * stored.load_a(rows, ak_ref, s.rk)
            score = sum_ranks(score, s.rk)
            if bq is None:
                score *= scale
            score = jnp.where(keys.seen(rows, length), score, -jnp.inf)
            new_top = jnp.maximum(top, score.max(axis=1))
            p = exp2(score - new_top[:, None])
            fade = exp2(top - new_top)
            weight = each_rank(p, s.rv) * keys.load_a(rows, av_ref, s.rv)
            acc = dot(weight, bv, acc * fade[:, None], pieces=plan.pieces)
            if len(tiles) > 1:
                # Triton lets a product run on into the next step, and keeps what it reads until
                # then, unless a tile of fewer heads reads bv as well. It waits for what is used.
                acc += 0.0
            return new_top, total * fade + p.sum(axis=1), acc

        return [of(*x) for x in zip(tiles, aqs, states, strict=True)]

    def empty(num_rows: int) -> State:
        top = jnp.full((num_rows,), LOWEST, jnp.float32)
        return top, jnp.zeros_like(top), jnp.zeros((num_rows, s.tile_e), jnp.float32)

    states = [empty(rows.index.shape[0]) for rows in tiles]
    states = lax.fori_loop(start, stop, step, states)
    for rows, (top, total, acc) in zip(tiles, states, strict=True):
        none = total == 0
        nonzero = jnp.where(none, 1.0, total)
        lse = jnp.where(none, -jnp.inf, (top + jnp.log2(nonzero)) / LOG2E)
        store(out_ref, acc * (plan.value_scale / nonzero)[:, None], *rows.whole(s.e))
        plgpu.store(lse_ref.at[rows.index], lse, mask=rows.inside)


def _merge_kernel(
    out_ref: Ref,  # [S, E]
    lse_ref: Ref,  # [S]
    merged_ref: Ref,  # [E]
    total_ref: Ref,  # [1]
    *,
    splits: int,
    block: int,
    e: int,
) -> None:
    j = span(tile(e))

    def of_block(first: jax.Array | int) -> tuple[jax.Array, ...]:
        i = first + span(block)
        lse = plgpu.load(lse_ref.at[i], mask=i < splits, other=-jnp.inf) * LOG2E
        top = jnp.maximum(lse.max(), LOWEST)
        weight = jnp.exp2(lse - top)
        out = load(out_ref, i, j, (i < splits)[:, None] & (j < e)[None, :])
        return top, weight.sum(), (out * weight[:, None]).sum(axis=0)

    def step(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Splits without keys change no bit."""
        tops, totals, accs = zip(carry, of_block(k * block), strict=True)
        top = jnp.maximum(*tops)
        first, second = (jnp.exp2(x - top) for x in tops)
        return top, *(x * first + y * second for x, y in (totals, accs))

    top, total, acc = of_block(0)
    if splits > block:
        top, total, acc = lax.fori_loop(1, pl.cdiv(splits, block), step, (top, total, acc))
    empty = total == 0
    nonzero = jnp.where(empty, 1.0, total)
    plgpu.store(merged_ref.at[j], (acc * (1 / nonzero)).astype(merged_ref.dtype), mask=j < e)
    total_ref[0] = jnp.where(empty, -jnp.inf, (top + jnp.log2(nonzero)) / LOG2E)
