"""How the gradient of tpa_decode runs: one pass over the keys, k and v never materialised.

With u_k = aq (bq bk_k^T), s = sum_k u_k ak_k, p = exp(s - lse), t_k = dout bv_k^T,
ds = p (sum_k t_k av_k - dout . out + dlse):
dav_k = p t_k, dbv_k = (p av_k)^T dout, dak_k = ds u_k, and with g_k = ds ak_k, x_k = aq^T g_k:
daq = sum_k g_k (bq bk_k^T)^T, dbq = sum_k x_k bk_k, dbk_k = x_k^T bq (scales left out).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, span
from pallas_ops.ops.tpa_decode import reference
from pallas_ops.ops.tpa_decode.choose import choose_backward
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes, tile
from pallas_ops.ops.tpa_decode.keys import Keys, each_rank, key_range, part, sum_ranks
from pallas_ops.ops.tpa_decode.matmul import dot
from pallas_ops.ops.tpa_decode.tiles import Plan, Rows, flat, flattened, load, per_batch, store


def backward(*operands: jax.Array | None, p: Params) -> tuple[jax.Array, ...]:
    """Gradients of the factors; all rows of a batch in one program, or else the reference's."""
    o = Operands(*operands)
    s = Sizes.of(o)
    config = choose_backward(s, card.current())
    if config is None:
        return reference.backward(*operands, p=p)
    plan = Plan(s, config, p)
    f = flattened(plan, o)
    arrays = f.aq, f.bq, f.lengths, f.ak, f.av, f.bk, f.bv, f.out, f.dout, f.lse, f.dlse
    of_queries, of_keys = [x for x in (o.aq, o.bq) if x is not None], (o.ak, o.av, o.bk, o.bv)
    keyed = [flat(x) for x in of_keys]
    splits = config.num_splits
    partials = [(s.b, splits, *flat(x).shape[1:]) for x in of_queries]
    grads = launch(
        partial(_backward_kernel, plan=plan),
        *arrays,
        name="tpa_decode_backward",
        grid=(splits, s.b),
        in_specs=[None if x is None else per_batch(x) for x in arrays],
        out_specs=[
            *(pl.BlockSpec((None, None, *x[2:]), lambda i, b: (b, i, 0, 0)) for x in partials),
            *(per_batch(x) for x in keyed),
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct(x, jnp.float32) for x in partials),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keyed),
        ],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    dkeyed = [g.reshape(x.shape) for g, x in zip(grads[-4:], of_keys, strict=True)]
    daq, *dbq = (
        g.sum(axis=1).astype(x.dtype).reshape(x.shape)
        for g, x in zip(grads[:-4], of_queries, strict=True)
    )
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
    dlse_ref: Ref,
    daq_ref: Ref,  # as aq_ref, this split's part
    *others: Ref,  # dbq_ref, this split's part, if there is bq_ref, and those of the keys
    plan: Plan,
) -> None:
    *dbq_ref, dak_ref, dav_ref, dbk_ref, dbv_ref = others
    s, c, exact = plan.s, plan.c, partial(dot, pieces=plan.pieces)
    rows = Rows(plan, 0, 0, tile(c.block_h))
    aq, bq = rows.load_aq(aq_ref), rows.load_bq(bq_ref)
    dout, out = (load(x, *rows.whole(s.e)) for x in (dout_ref, out_ref))
    lse, dlse = (
        plgpu.load(x.at[rows.index], mask=rows.inside, other=0.0) for x in (lse_ref, dlse_ref)
    )
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=1) - dlse
    length, first_key, limit = key_range(rows, length_ref)
    start, stop = part(pl.program_id(0), c.num_splits, pl.cdiv(s.m, c.block_m))

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        daq, dbq = carry
        # Blocks without keys that count are stored, too, as zeros; nothing is loaded for them.
        keys = Keys(plan, i, limit, first_key, masked=True)
        stored = Keys(plan, i, s.m, masked=True)
        bk = load(bk_ref, *keys.features(s.rk, s.d))
        inner = bk.T if bq is None else exact(bq, bk.T)
        ak, u = keys.load_a(rows, ak_ref, s.rk), exact(aq, inner)
        score = sum_ranks(u * ak, s.rk)
        p = exp2((score * plan.p.score_scale - lse[:, None]) * LOG2E)
        p = jnp.where(keys.seen(rows, length) & rows.inside[:, None], p, 0.0)
        av = keys.load_a(rows, av_ref, s.rv) * plan.p.value_scale
        t = exact(dout, load(bv_ref, *keys.features(s.rv, s.e)).T)
        p_each = each_rank(p, s.rv)
        store(dav_ref, rows.gather(p_each * t) * plan.p.value_scale, *stored.heads(rows, s.rv))
        store(dbv_ref, exact((p_each * av).T, dout), *stored.features(s.rv, s.e))
        ds = p * (sum_ranks(t * av, s.rv) - delta[:, None]) * plan.p.score_scale
        ds = each_rank(ds, s.rk)
        store(dak_ref, rows.gather(ds * u), *stored.heads(rows, s.rk))
        g = ds * ak
        x = exact(aq.T, g)
        store(dbk_ref, x.T if bq is None else exact(x.T, bq), *stored.features(s.rk, s.d))
        daq = exact(g, inner.T, daq)
        if bq is not None:
            dbq = exact(x, bk, dbq)
        return daq, dbq

    daq = jnp.zeros(aq.shape, jnp.float32)
    dbq = None if bq is None else jnp.zeros(bq.shape, jnp.float32)
    daq, dbq = lax.fori_loop(start, stop, step, (daq, dbq))
    if dbq is None:
        store(daq_ref, daq, *rows.whole(s.d))
        return
    daq = jnp.where(rows.own, daq, 0.0).reshape(-1, c.block_n, s.tile_r).sum(axis=1)
    store(daq_ref, daq, *rows.whole(s.r))
    d = span(s.tile_d)
    mask = rows.rank_inside[:, None] & (d < s.d)[None, :]
    store(dbq_ref[0], dbq, rows.rank_query * s.r + rows.rank, d, mask)
