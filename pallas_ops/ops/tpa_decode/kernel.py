"""How tpa_decode runs: the launcher first, then the kernel.

A program holds rows (queries x heads) and streams keys. Where `Sizes.is_rank_first`, q is not
formed: q k^T = aq (bq bk^T). The long product has factors on both sides, so it is exact in 16 bits,
and needs a tile of R rows instead of H. The short one has float32 scores beside aq, in two or three
pieces (`Plan.score_pieces`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.core.backend import NoKernelError
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, power_of_two
from pallas_ops.ops.tpa_decode import heads, prompt, softmax
from pallas_ops.ops.tpa_decode.choose import choose
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes
from pallas_ops.ops.tpa_decode.keys import Keys, blocks_of_split, key_range
from pallas_ops.ops.tpa_decode.matmul import dot, sum_of_products
from pallas_ops.ops.tpa_decode.merge import merge
from pallas_ops.ops.tpa_decode.tiles import Plan, Rows, load, per_batch, per_split
from pallas_ops.ops.tpa_decode.words import deinterleave, pack

# ak and av where they were loaded ahead, and the states.
Carry = tuple[Any, Any, list[softmax.State]]


def forward(*operands: jax.Array | None, p: Params) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H]."""
    o = Operands(*operands)
    s = Sizes.of(o, p)
    _check_features(s)
    if prompt.takes(s, p):
        return prompt.attend(o, p)
    c = p.config or choose(s, card.current(), batch_invariant=p.batch_invariant)
    plan, rows, splits = Plan(s, c, p), s.n * s.h, c.num_splits
    if s.pages is not None:  # one cache for the whole batch
        o = o.with_cache(lambda x: x.reshape(1, -1, *x.shape[2:]))
    if s.quantised:
        o = o._replace(bk=pack(o.bk), bv=pack(o.bv))
    arrays = plan.flattened(o)[:8]  # up to the page table
    dtype = jnp.dtype(p.out_dtype if splits == 1 or s.rounds_weights else jnp.float32)
    results = [
        jax.ShapeDtypeStruct((s.b, splits, rows, s.e), dtype),
        jax.ShapeDtypeStruct((s.b, splits, rows), jnp.float32),
    ]
    out, lse = launch(
        partial(_forward_kernel, plan=plan),
        *arrays,
        name="tpa_decode",
        grid=(plan.row_blocks, splits, s.b),
        in_specs=[*map(per_batch, arrays)],
        out_specs=[*map(per_split, results)],
        out_shape=results,
        num_warps=c.num_warps,
        # A page is copied after its place was read from the table: Triton halves the stages for it.
        num_stages=c.num_stages if s.pages is None else 2 * c.num_stages - 1,
    )
    if splits > 1:
        # Batch-invariant: blocks of 64 however many splits there are, so sums have one order.
        out, lse = merge(out, lse, p.out_dtype, 64 if p.batch_invariant else power_of_two(splits))
    return out.reshape(s.b, s.n, s.h, s.e), lse.reshape(s.b, s.n, s.h)


def _check_features(s: Sizes) -> None:
    """Refuses an odd number of features of eight bits, and float8 on cards without it."""
    is_odd = s.d % s.features_per_word or s.e % s.features_per_word
    if is_odd or (s.quantised == "float8_e4m3fn" and card.current().capability < 89):
        raise NoKernelError(
            f"tpa_decode has no kernel for {s.quantised} of D={s.d}, E={s.e} on {card.current()}: "
            "both must be even, and float8 needs sm_89"
        )


def _forward_kernel(
    aq_ref: Ref,  # [N H, R], or [N H, D] without bq
    ak_ref: Ref,  # [M Rk, H], flat where heads are gathered (`Plan.flattened`); av_ref likewise
    av_ref: Ref,  # [M Rv, H]
    bq_ref: Ref | None,  # [N R, D]
    bk_ref: Ref,  # [M Rk, D]
    bv_ref: Ref,  # [M Rv, E]
    length_ref: Ref | None,  # [1]
    table_ref: Ref | None,  # [pages of this sequence]; ak, av, bk and bv then are the whole pool
    out_ref: Ref,  # [N H, E]
    lse_ref: Ref,  # [N H]
    *,
    plan: Plan,
) -> None:
    s = plan.s
    tiles = Rows.of_program(plan, pl.program_id(0) if plan.row_blocks > 1 else 0)
    length, first_key, limit = key_range(tiles[0], length_ref)
    start, stop = blocks_of_split(plan, pl.program_id(1), first_key, limit)
    load_ak = partial(_ahead, plan, ak_ref, s.rk, stop, limit)
    load_av = partial(_ahead, plan, av_ref, s.rv, stop, limit)
    first_ak, first_av = load_ak(start), load_av(start)  # on their way while q is formed
    queries, bq, score_scale = _load_queries(plan, tiles, aq_ref, bq_ref)

    def step(i: jax.Array, carry: Carry, *, all_valid: bool = False) -> Carry:
        ak, av, states = carry
        keys = Keys(plan, i, limit, first_key, table_ref, all_valid=all_valid)
        if not plan.prefetches_heads:
            ak, av = heads.source(keys, ak_ref, s.rk), heads.source(keys, av_ref, s.rv)
        if plan.loads_before_scores:
            next_ak, next_av = load_ak(i + 1), load_av(i + 1)
        inner = [x.T for x in keys.load_b(bk_ref, s.rk, s.d)]
        if bq is not None:  # [queries x ranks, entries]
            inner = [score_scale * sum_of_products(bq, inner, 3)]
        bv = keys.load_b(bv_ref, s.rv, s.e)
        scale = score_scale if bq is None else 1.0
        scores = [
            _scores(keys, *x, inner, ak, scale, length) for x in zip(tiles, queries, strict=True)
        ]
        if not plan.loads_before_scores:
            next_ak = load_ak(i + 1)
            if len(tiles) == 1:
                next_av = load_av(i + 1)
        weights = [softmax.weights(keys, *x, av) for x in zip(tiles, scores, states, strict=True)]
        if len(tiles) > 1:  # no registers for two blocks of av: after its last use
            next_av = load_av(i + 1)
        states = [softmax.add_values(plan, *x, bv) for x in zip(states, weights, strict=True)]
        return next_ak, next_av, states

    carry: Carry = first_ak, first_av, [softmax.empty(plan, rows) for rows in tiles]
    if _has_loop_of_whole_blocks(plan, limit):
        whole = jnp.minimum(stop, limit // plan.c.block_m)
        carry = lax.fori_loop(start, whole, partial(step, all_valid=True), carry)
        start = jnp.maximum(start, whole)
    *_, states = lax.fori_loop(start, stop, step, carry)
    for rows, state in zip(tiles, states, strict=True):
        softmax.store(plan, rows, state, out_ref, lse_ref)


def _has_loop_of_whole_blocks(plan: Plan, limit: Any) -> bool:
    """Whether the blocks whose keys are all valid have a loop of their own, before the others.

    Where a block may end early, ptxas makes the asynchronous products (wgmma) of one tile wait for
    one another, which is 8 to 11 % of the time; two tiles that load ahead have no registers for
    masks, which is up to 20 %.
    """
    may_end_early = not isinstance(limit, int) or limit % plan.c.block_m
    has_wide_tile = plan.c.block_n * plan.tiles[0] >= 64
    is_slow = plan.prefetches_heads if len(plan.tiles) > 1 else has_wide_tile and not plan.gathers
    return bool(is_slow and may_end_early and plan.p.window is None)


def _ahead(plan: Plan, ref: Ref, ranks: int, stop: Any, limit: Any, i: Any) -> Any:
    """ak or av of step i, if it is loaded during the step before."""
    if not plan.prefetches_heads:
        return None
    return Keys(plan, i, limit).load_block(ref, ranks, i < stop)


def _scores(
    keys: Keys,
    rows: Rows,
    query: list[jax.Array],
    inner: list[jax.Array],  # bk^T, or bq bk^T
    ak: Any,
    scale: float,
    length: jax.Array | int,
) -> jax.Array:
    plan, s = keys.plan, keys.plan.s
    if s.is_rank_first:
        score = plan.dot_of_ranks(query[0], inner[0], plan.score_pieces)
    else:
        score = sum_of_products(query, inner, plan.score_pieces)
    score = heads.sum_ranks(score * heads.load(keys, rows, ak, s.rk), s.rk)
    return jnp.where(keys.seen(rows, length), score if scale == 1 else score * scale, -jnp.inf)


def _load_queries(
    plan: Plan, tiles: list[Rows], aq_ref: Ref, bq_ref: Ref | None
) -> tuple[list[list[jax.Array]], list[jax.Array] | None, float]:
    """Each tile's rows of aq or of q, bq where q is not formed, and the scale of scores.

    Features are deinterleaved as those of the keys are.
    """
    s, scale = plan.s, plan.p.score_scale * LOG2E
    queries = [rows.load_aq(aq_ref) for rows in tiles]
    bq = None if bq_ref is None else load(bq_ref, *tiles[0].bq_indices())
    if bq is not None and plan.c.block_n > 1:
        # Times the zeros of the block diagonal, NaN would reach other queries. Both are loaded once
        # more: tiles that are computed, not loaded, would be read from shared memory in each step.
        is_finite = jnp.where(jnp.abs(bq) < jnp.inf, 0, 1).max(axis=1) == 0
        i, j, mask = tiles[0].bq_indices()
        bq = load(bq_ref, i, j, mask & is_finite[:, None])
        queries = [rows.load_aq(aq_ref, is_finite) for rows in tiles]
    if bq is not None and not s.is_rank_first:
        queries, bq, scale = [scale * dot(aq, bq, pieces=3) for aq in queries], None, 1.0
    if s.precision == "default":
        queries = [q.astype(s.dtype) for q in queries]
    if bq is None:
        return [deinterleave(q, s.features_per_word) for q in queries], None, scale
    return [[aq] for aq in queries], deinterleave(bq, s.features_per_word), scale
