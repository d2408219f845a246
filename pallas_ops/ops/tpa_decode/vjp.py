"""How tpa_decode differentiates.

Saved: the factors, and the small out and lse, named so that `jax.checkpoint` can keep them. out is
float32, unless `precision="default"` with several queries or a float32 cache. The backward pass
recomputes the probabilities from lse, one tile at a time.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_ops.core import partition
from pallas_ops.core.dispatch import Op
from pallas_ops.core.partition import reshard_like
from pallas_ops.core.shards import Names
from pallas_ops.ops.tpa_decode import backward, kernel, reference
from pallas_ops.ops.tpa_decode.config import Operands, Params

RESIDUALS = "pallas_ops.tpa_decode"

# k, v and r are the ranks of keys, values and queries.
FACTORS = "b n h r", "b m k h", "b m v h", "b n r d", "b m k d", "b m v e"
RESULTS = "b n h e", "b n h"
UNSHARDED = "n", "r", "k", "v", "d"


def _forward_of_shard(
    run: Any, mesh_axes: Names, *operands: jax.Array | None, p: Params
) -> tuple[jax.Array, jax.Array]:
    o = reference.with_lengths(Operands(*operands), p.window, mesh_axes)
    # Merged before they are rounded.
    out, lse = run(FORWARD, *o, p=dataclasses.replace(p, out_dtype="float32"))
    out, lse = reference.merge_shards(out, lse, mesh_axes)
    return out.astype(p.out_dtype), lse


def _backward_of_shard(run: Any, mesh_axes: Names, *operands: jax.Array | None, p: Params) -> Any:
    o = reference.with_lengths(Operands(*operands), p.window, mesh_axes)
    return run(backward_op(o.bq is not None), *o, p=p)


FORWARD = Op(
    name="tpa_decode",
    kernel=kernel.forward,
    reference=reference.forward,
    operands=Operands(*FACTORS, "b"),
    results=RESULTS,
    unsharded=UNSHARDED,
    shards=("m", _forward_of_shard),
)

PAGED = dataclasses.replace(
    FORWARD,
    name="tpa_decode_paged",
    operands=Operands(*(x.replace("b m", "p s") for x in FACTORS))._replace(
        lengths="b", page_table="b t"
    ),
    unsharded=(*UNSHARDED, "p", "s", "t"),
    shards=None,
)


@functools.cache
def backward_op(has_bq: bool) -> Op:
    """The gradients of those factors that there are."""
    summed = dict(zip(FACTORS, ("e m", "e", "e", "h e m", "h e", "h"), strict=True))
    if not has_bq:
        del summed["b n r d"]
    return Op(
        name="tpa_decode_backward",
        kernel=backward.backward,
        reference=reference.backward,
        operands=Operands(*FACTORS, "b", None, *RESULTS, *RESULTS),
        results=tuple(summed),
        unsharded=UNSHARDED,
        summed=tuple(summed.values()),
        added_once=((Operands._fields.index("dlse"), "e"),),  # else each shard of e would add it
        shards=("m", _backward_of_shard),
    )


def attention(p: Params, o: Operands) -> Any:
    """out [B, N, H, E] and lse [B, N, H]; through a page table with the reference's gradient."""
    if o.page_table is not None:
        return _call(PAGED, p, o)
    return _call(FORWARD, p, o) if p.implementation == "xla" else _attention(p, o)


def _call(op: Op, p: Params, o: Operands) -> Any:
    return partition.call(op, *o, implementation=p.implementation, p=p)


_attention = jax.custom_vjp(partial(_call, FORWARD), nondiff_argnums=(0,))


def _of_gradient(p: Params, o: Operands) -> Params:
    """The Params of a call that is differentiated: exact for "high", and for one query in 16 bits.

    The backward pass has no form for "high". With one query, rounding q would make it slower.
    """
    is_exact = p.precision == "high" or (o.aq.shape[1] == 1 and o.ak.dtype.itemsize == 2)
    return dataclasses.replace(p, precision="highest") if is_exact else p


def _forward(p: Params, o: Operands):  # type: ignore[no-untyped-def]
    p = _of_gradient(p, o)
    saved_dtype = p.out_dtype if p.precision == "default" else "float32"
    # Second derivatives also differentiate the saved lse, so here it is a result.
    results = _attention(dataclasses.replace(p, out_dtype=saved_dtype, has_lse=True), o)
    out, lse = (checkpoint_name(x, RESIDUALS) for x in results)
    return (out.astype(p.out_dtype), lse), (o, out, lse)


def _backward(p: Params, saved: Any, cotangents: Any):  # type: ignore[no-untyped-def]
    o, out, lse = saved
    p = _of_gradient(p, o)
    dout, dlse = cotangents
    results = dict(out=out, lse=lse, dout=dout, dlse=dlse if p.has_lse else None)
    grads = _call(backward_op(o.bq is not None), p, reference.dequantised(o)._replace(**results))
    daq, dak, dav, *dbq, dbk, dbv = grads
    if o.bk.dtype != o.ak.dtype:
        dbk = dbv = None
    factors = daq, dak, dav, dbq[0] if dbq else None, dbk, dbv
    return (Operands(*map(reshard_like, factors, o)),)


_attention.defvjp(_forward, _backward)
