"""What tpa_decode means, in jax.numpy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients
from jax.sharding import NamedSharding, PartitionSpec

from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.partition import gathered, is_explicit
from pallas_ops.core.shards import Names, gather
from pallas_ops.core.tiles import as_int32, wide
from pallas_ops.ops.tpa_decode.config import Operands, Params

Scale = float | jax.Array


def _einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum in full precision, summed in float32 (float64)."""
    if x.dtype != y.dtype:
        x, y = x.astype(wide(x.dtype)), y.astype(wide(y.dtype))
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=wide(x.dtype))


def scales(sizes: Sequence[int], given: Sequence[Scale | None], dtype: Any) -> tuple[Scale, Scale]:
    """scale * scale_q * scale_k, and scale_v; by default D**-0.5 / (R Rk), and 1 / Rv.

    Raises:
      ValueError: if numbers have a product that `dtype` does not hold.
    """

    def size(x: Any) -> Any:
        """At least 1; a symbolic one (jax.export) as an array."""
        return max(x, 1) if isinstance(x, int) else jnp.asarray(x, dtype)

    d, r, rk, rv = map(size, sizes)
    defaults = d**-0.5, 1 / r, 1 / rk, 1 / rv
    pairs = zip(given, defaults, strict=True)
    scale, query, key, value = (default if x is None else x for x, default in pairs)
    product = scale * query * key
    most = float(jnp.finfo(dtype).max) / LOG2E  # kernels multiply it with LOG2E
    if isinstance(product, float) and abs(product) > most:
        raise ValueError(f"scale * scale_q * scale_k is {product:g}; accepted: at most {most:g}")
    return product, value


def with_lengths(o: Operands, window: int | None, axis_name: Names | None) -> Operands:
    """Lengths [B] counted from the start of this shard's part of the cache (may be > M).

    None if every query sees all M keys, or if none were given on one device.
    """
    lengths = None if o.lengths is None else as_int32(o.lengths)
    from_last = o.aq.shape[1] != 1 or window is not None
    if axis_name is not None:
        total = o.m * lax.axis_size(axis_name)
        start = o.m * lax.axis_index(axis_name)
        if lengths is not None:  # below 0 and 0 mean the same
            lengths = jnp.maximum(jnp.minimum(lengths, total) - start, 0)
        elif from_last:
            lengths = total - start
    elif from_last and lengths is not None:
        lengths = jnp.clip(lengths, 0, o.m)
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, o.aq.shape[:1])
    return o._replace(lengths=lengths)


def from_pages(o: Operands) -> Operands:
    """Gathers the pages of each row: [B, M, ...]. A page out of range is taken for the nearest."""
    if o.page_table is None:
        return o
    table = jnp.maximum(o.page_table, 0)  # negative indices would count from the end

    def of_rows(x: jax.Array) -> jax.Array:
        sharding, pool = jax.typeof(table).sharding, jax.typeof(x).sharding
        spec = PartitionSpec(sharding.spec[0], None, None, *pool.spec[2:])
        to = NamedSharding(pool.mesh, spec) if is_explicit(x) else None
        if isinstance(x.shape[0], int) and x.shape[0] == 0:  # a pool of no pages
            x = jnp.zeros((1, *x.shape[1:]), x.dtype)
        # The gradients of a page that many rows share add up in float32.
        full = x.astype(jnp.float32) if x.dtype.itemsize == 2 else x
        rows = full.at[table].get(mode="clip", out_sharding=to).astype(x.dtype)
        return rows.reshape(table.shape[0], o.m, *x.shape[2:])

    return o.with_cache(of_rows)._replace(page_table=None)


def dequantised(o: Operands) -> Operands:
    """Feature factors in the dtype of the head factors, which holds all values of 8 bits."""
    if o.bk.dtype.itemsize != 1:
        return o
    return o._replace(bk=o.bk.astype(o.ak.dtype), bv=o.bv.astype(o.ak.dtype))


def of_seen_keys(p: Params, o: Operands) -> tuple[Operands, jax.Array | None]:
    """The operands, and which keys each query sees, [B or 1, N, M]; None for all of them.

    Factors of keys that no query sees are set to 0, since they may be NaN.
    """
    o = dequantised(o)
    if o.lengths is None and o.aq.shape[1] == 1 and p.window is None:
        return o, None
    seen = are_seen(o.m, stops(o), p.window)
    if o.lengths is not None or p.window is not None:
        by_any = seen.any(axis=1)[:, :, None, None]
        o = o.with_cache(lambda x: jnp.where(by_any, x, jnp.zeros_like(x)))
    return o, seen


def stops(o: Operands) -> jax.Array:
    """One past the last key that each query sees, [B or 1, N]."""
    n: int = o.aq.shape[1]
    lengths = jnp.asarray(o.m if o.lengths is None else o.lengths, jnp.int32).reshape(-1, 1)
    return lengths - (n - 1 - jnp.arange(n, dtype=jnp.int32)[None])


def are_seen(m: int, stop: jax.Array, window: int | None) -> jax.Array:
    """Whether each query sees each of m keys: the axes of `stop`, and then the keys."""
    key = jnp.expand_dims(jnp.arange(m, dtype=jnp.int32), range(stop.ndim))
    stop = stop[..., None]
    return key < stop if window is None else (key < stop) & (key >= stop - window)


def forward(*operands: jax.Array | None, p: Params) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H]."""
    o = from_pages(Operands(*operands))

    def of_row(row: Operands) -> Any:
        return jax.tree.map(lambda y: y[0], attend(p, jax.tree.map(lambda x: x[None], row)))

    if p.batch_invariant:
        # One row of the batch at a time, so that XLA's code does not depend on the batch size.
        out, lse = lax.map(of_row, jax.tree.map(lambda x: gathered(x, 0), o))
    else:
        out, lse = attend(p, o)
    return out.astype(p.out_dtype), lse


def backward(*operands: jax.Array | None, p: Params) -> tuple[jax.Array, ...]:
    """Gradients of the factors. The given out and lse may be of more keys (those of all shards)."""
    o = Operands(*operands)

    def run(*factors: Any) -> tuple[jax.Array, jax.Array]:
        return attend(p, Operands(*factors)._replace(lengths=o.lengths))

    (own, own_lse), pullback = jax.vjp(run, *o[:6])
    # out is the sum over shards of exp(own_lse - lse) * own.
    weight = jnp.exp(own_lse - jnp.where(o.lse == -jnp.inf, 0, o.lse))
    dout = o.dout.astype(o.lse.dtype)
    dlse = ((own - o.out.astype(o.lse.dtype)) * dout).sum(axis=-1)
    if o.dlse is not None:
        dlse += o.dlse
    grads = pullback((weight[..., None] * dout, weight * dlse))
    return tuple(g for g in grads if g is not None)


def attend(p: Params, o: Operands) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp in float32."""
    o, seen = of_seen_keys(p, o.with_cache(lambda x: gathered(x, 1)))
    if o.bq is None:
        score = _einsum("bnhd,bmkd->bnhkm", o.aq, o.bk)
    else:
        inner = _einsum("bnrd,bmkd->bnrkm", o.bq, o.bk)
        score = _einsum("bnhr,bnrkm->bnhkm", o.aq, inner)
    score = p.score_scale * _einsum("bnhkm,bmkh->bnhm", score, o.ak)
    weight, lse = softmax(score, seen)
    weight = p.value_scale * _einsum("bnhm,bmkh->bnhkm", weight, o.av)
    out = _einsum("bnhkm,bmke->bnhe", weight, o.bv)
    return out if seen is None else without_blind_queries(out, lse), lse


def without_blind_queries(x: jax.Array, lse: jax.Array) -> jax.Array:
    """x [B, N, H, E], and 0 for queries that see no key: their cotangents may be NaN."""
    return jnp.where(lse[..., None] == -jnp.inf, 0, x)


def naive(p: Params, o: Operands) -> tuple[jax.Array, jax.Array]:
    """`forward`, by materialising q, k and v in their factors' dtypes."""
    o, seen = of_seen_keys(p, from_pages(o))
    q = query(o.aq, o.bq).astype(o.aq.dtype)
    k = _einsum("bmkh,bmkd->bmhd", o.ak, o.bk).astype(o.ak.dtype)
    v = _einsum("bmkh,bmke->bmhe", o.av, o.bv).astype(o.av.dtype)
    weight, lse = softmax(p.score_scale * _einsum("bnhd,bmhd->bnhm", q, k), seen)
    out = p.value_scale * _einsum("bnhm,bmhe->bnhe", weight, v)
    out = out if seen is None else without_blind_queries(out, lse)
    return out.astype(p.out_dtype), lse


def query(aq: jax.Array, bq: jax.Array | None, scale: float = 1.0) -> jax.Array:
    """q [B, N, H, D] in float32."""
    q = aq if bq is None else _einsum("bnhr,bnrd->bnhd", aq, bq)
    return scale * q.astype(wide(q.dtype))


def softmax(score: jax.Array, seen: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis and its log-sum-exp; a row of -inf (or none) gives 0 and -inf."""
    if seen is not None:
        score = jnp.where(seen[:, :, None], score, -jnp.inf)
    top = jnp.max(score, axis=-1, initial=-jnp.inf)
    top = stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p = jnp.exp(score - top[..., None])
    total = jnp.sum(p, axis=-1)
    nonzero = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(nonzero) + top)
    return p / nonzero[..., None], lse


def merge_shards(out: jax.Array, lse: jax.Array, axis_name: Names) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, one a device of `axis_name`.

    One exchange: every device gets all partial results, and adds them up in one order.
    """
    parts = gather(jnp.concatenate([out, lse[..., None].astype(out.dtype)], axis=-1), axis_name)
    weight, total = softmax(jnp.moveaxis(parts[..., -1], 0, -1))
    return (parts[..., :-1] * jnp.moveaxis(weight, -1, 0)[..., None]).sum(axis=0), total
