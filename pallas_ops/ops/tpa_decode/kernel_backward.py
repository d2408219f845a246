"""How the gradient of tpa_decode runs: one pass over the keys, k and v never materialised.

With u_k = (bk_k bq^T) aq^T for each rank k, s = sum_k u_k ak_k, p = exp(s - lse),
t_k = bv_k dout^T, ds = p (sum_k t_k av_k - dout . out + dlse):
dav_k = p t_k, dbv_k = (p av_k) dout, dak_k = ds u_k, and with g_k = ds ak_k:
dbk_k = (g_k aq) bq, dq = sum_k g_k^T bk_k (scales left out).
Tiles are [keys, rows], so head factors are loaded and stored in memory order, and tiles computed
from them are left operands of products, which the tensor cores take from registers.
"""

from functools import partial, reduce
from operator import add, mul
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.core.backend import fall_back, plgpu
from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, split_evenly
from pallas_ops.ops.tpa_decode import heads, reference
from pallas_ops.ops.tpa_decode.choose import choose_backward, no_kernel
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes
from pallas_ops.ops.tpa_decode.heads import join_ranks, split_ranks
from pallas_ops.ops.tpa_decode.keys import Keys, key_range
from pallas_ops.ops.tpa_decode.merge import sum_splits
from pallas_ops.ops.tpa_decode.tiles import Plan, Rows, flat, load, per_batch, per_split, store


def one_pass(o: Operands, p: Params, at_once: int | None = None) -> tuple[jax.Array, ...]:
    """One pass over the keys: all of the gradient (`at_once` None), or one of `at_once` passes.

    Several passes are added up, so their gradients of ak, av, bk and bv are float32.
    """
    s = Sizes.of(o, p)
    config = choose_backward(s, card.current(), at_once or 1)
    if config is None:
        error = no_kernel("tpa_decode_backward", s, card.current())
        fall_back("tpa_decode_backward", p.implementation, error)
        if at_once is not None:
            o = o.with_cache(lambda x: x.astype(jnp.float32))
        return reference.backward(*o, p=p)
    plan = Plan(s, config, p, backward=True)
    f = plan.flattened(o)
    arrays = f.aq, f.bq, f.lengths, f.ak, f.av, f.bk, f.bv, f.out, f.dout, f.lse, f.dlse
    of_queries, of_keys = [x for x in (o.aq, o.bq) if x is not None], (o.ak, o.av, o.bk, o.bv)
    dtype = o.ak.dtype if at_once is None else jnp.float32
    keyed = [jax.ShapeDtypeStruct(flat(x).shape, dtype) for x in of_keys]
    shapes = [(s.b, config.num_splits, *flat(x).shape[1:]) for x in of_queries]
    partials = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = launch(
        partial(_backward_kernel, plan=plan),
        *arrays,
        name="tpa_decode_backward",
        grid=(config.num_splits, s.b),
        in_specs=[*map(per_batch, arrays)],
        out_specs=[*map(per_split, partials), *map(per_batch, keyed)],
        out_shape=[*partials, *keyed],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    dkeyed = [g.reshape(x.shape) for g, x in zip(grads[-4:], of_keys, strict=True)]
    daq, *dbq = sum_splits(grads[:-4], of_queries)
    return daq, *dkeyed[:2], *dbq, *dkeyed[2:]


def _backward_kernel(
    aq_ref: Ref,  # [N H, R], or [N H, D] without bq
    bq_ref: Ref | None,  # [N R, D]
    length_ref: Ref | None,  # [1]
    ak_ref: Ref,  # [M Rk, H], as av_ref, dak_ref, dav_ref
    av_ref: Ref,
    bk_ref: Ref,  # [M Rk, D], as dbk_ref
    bv_ref: Ref,  # [M Rv, E], as dbv_ref
    out_ref: Ref,  # [N H, E], as dout_ref
    dout_ref: Ref,
    lse_ref: Ref,  # [N H], as dlse_ref
    dlse_ref: Ref | None,
    daq_ref: Ref,  # as aq_ref, this split's part
    *others: Ref,  # [dbq_ref, this split's part,] dak_ref, dav_ref, dbk_ref, dbv_ref
    plan: Plan,
) -> None:
    *dbq_ref, dak_ref, dav_ref, dbk_ref, dbv_ref = others
    s, c = plan.s, plan.c
    tiles = Rows.of_program(plan, 0)
    queries = [_Queries(x, aq_ref, out_ref, dout_ref, lse_ref, dlse_ref) for x in tiles]
    bq = None if bq_ref is None else load(bq_ref, *tiles[0].bq_indices())
    length, first_key, limit = key_range(tiles[0], length_ref)
    start, stop = split_evenly(pl.cdiv(s.m, c.block_m), c.num_splits, pl.program_id(0))

    def step(i: jax.Array, dqs: list[jax.Array]) -> list[jax.Array]:
        # Blocks without valid keys are stored, too, as zeros; nothing is loaded for them.
        keys = Keys(plan, i, limit, first_key)
        stored = Keys(plan, i, s.m)
        ak = heads.source(keys, ak_ref, s.rk, keys.any_valid)
        av = heads.source(keys, av_ref, s.rv, keys.any_valid)
        bk = load(bk_ref, *keys.features(s.rk, s.d))
        bv = load(bv_ref, *keys.features(s.rv, s.e))
        inner = bk if bq is None else plan.dot(bk, bq.T)
        dbv: Any = None
        d_inner: Any = None
        new_dqs = []
        for q, dq in zip(queries, dqs, strict=True):
            weight, ds, u, t, ak_ranks, av_ranks = _scores(q, keys, length, ak, av, inner, bv)
            # In other orders of these lines ptxas spills more: up to 4 % more time.
            dak = q.rows.sum_over_queries(join_ranks([ds * x for x in u])).astype(dak_ref.dtype)
            g = join_ranks([ds * x for x in ak_ranks])
            d_inner = plan.dot(g, q.aq, d_inner)
            new_dqs.append(plan.dot(bk.T, g, dq))
            dav = q.rows.sum_over_queries(join_ranks([weight * x for x in t])).astype(dav_ref.dtype)
            dbv = plan.dot(join_ranks([weight * x for x in av_ranks]), q.dout, dbv)
            store(dav_ref, dav, *stored.heads(q.rows, s.rv))
            store(dak_ref, dak, *stored.heads(q.rows, s.rk))
        store(dbv_ref, dbv, *stored.features(s.rv, s.e))
        dbk = d_inner if bq is None else plan.dot_of_ranks(d_inner, bq, plan.output_pieces)
        store(dbk_ref, dbk, *stored.features(s.rk, s.d))
        return new_dqs

    zeros = [jnp.zeros((s.tile_d, len(x.index)), jnp.float32) for x in tiles]
    dqs = lax.fori_loop(start, stop, step, zeros)
    _store_queries(plan, queries, bq, dqs, daq_ref, *dbq_ref)


class _Queries:
    """What one tile of rows loads before the loop over keys."""

    def __init__(
        self,
        rows: Rows,
        aq_ref: Ref,
        out_ref: Ref,
        dout_ref: Ref,
        lse_ref: Ref,
        dlse_ref: Ref | None,
    ) -> None:
        self.rows, self.aq = rows, rows.load_aq(aq_ref)
        self.dout, out = (load(x, *rows.tile_indices(rows.plan.s.e)) for x in (dout_ref, out_ref))
        self.lse = plgpu.load(lse_ref.at[rows.index], mask=rows.inside, other=0.0)
        self.delta = (self.dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=1)
        if dlse_ref is not None:
            self.delta -= plgpu.load(dlse_ref.at[rows.index], mask=rows.inside, other=0.0)


def _scores(
    q: _Queries,
    keys: Keys,
    length: jax.Array | int,
    ak: Any,  # see `heads.source`
    av: Any,
    inner: jax.Array,  # bk bq^T, or bk without bq
    bv: jax.Array,
) -> tuple[Any, ...]:
    """p times the scale of values, ds, and lists of u, t, ak and av of each rank (see above).

    All are tiles [keys / 8, 8, rows].
    """
    plan, s, rows = keys.plan, keys.plan.s, q.rows
    ak = heads.load_ranks(keys, rows, ak, s.rk)
    av = heads.load_ranks(keys, rows, av, s.rv)
    u = split_ranks(plan.dot_of_ranks(inner, q.aq.T, plan.output_pieces), s.rk)
    t = split_ranks(plan.dot(bv, q.dout.T), s.rv)
    score = reduce(add, map(mul, u, ak)) * plan.p.score_scale
    seen = (keys.seen(rows, length) & rows.inside[None, :]).reshape(score.shape)
    p = jnp.where(seen, exp2((score - q.lse[None, None]) * LOG2E), 0.0)
    ds = reduce(add, map(mul, t, av)) * plan.p.value_scale - q.delta[None, None]
    return p * plan.p.value_scale, ds * p * plan.p.score_scale, u, t, ak, av


def _store_queries(
    plan: Plan,
    queries: list[_Queries],
    bq: jax.Array | None,
    dqs: list[jax.Array],
    daq_ref: Ref,
    dbq_ref: Ref | None = None,
) -> None:
    s, dbq = plan.s, None
    for q, dq in zip(queries, dqs, strict=True):
        if bq is None:
            store(daq_ref, dq.T, *q.rows.tile_indices(s.d))
            continue
        daq = jnp.where(q.rows.own_ranks, plan.dot(bq, dq).T, 0.0)
        daq = daq.reshape(-1, plan.c.block_n, s.tile_r).sum(axis=1)
        store(daq_ref, daq, *q.rows.tile_indices(s.r))
        dbq = plan.dot(dq, q.aq, dbq)
    if dbq is not None:
        i, j, mask = queries[0].rows.bq_indices()
        store(dbq_ref, dbq.T, i, j, mask & queries[0].rows.is_first_slot[:, None])
