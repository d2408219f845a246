"""What tpa_decode means, in jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.dtypes import wide


def _einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Exact products of the inputs as they are, summed in float32."""
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=wide(x.dtype))


def tpa_decode(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array,
    bk: jax.Array,
    bv: jax.Array,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """The output of `tpa_decode_with_lse`."""
    return tpa_decode_with_lse(
        aq,
        ak,
        av,
        bq,
        bk,
        bv,
        lengths=lengths,
        scale=scale,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        axis_name=axis_name,
    )[0]


def tpa_decode_with_lse(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array,
    bk: jax.Array,
    bv: jax.Array,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v and its log-sum-exp; see `pallas_ops.tpa_decode`."""
    ak, av, bk, bv = with_ranks(ak, av, bk, bv)
    score_scale, value_scale = scales(
        bq.shape[3], bq.shape[2], ak.shape[2], av.shape[2], scale, scale_q, scale_k, scale_v
    )
    lengths = local_lengths(lengths, aq.shape[1], ak.shape[1], axis_name)
    out, lse = attend(
        aq, ak, av, bq, bk, bv, lengths, score_scale=score_scale, value_scale=value_scale
    )
    if axis_name is not None:
        out, lse = merge_shards(out, lse, axis_name)
    return out.astype(aq.dtype), lse


def with_ranks(*factors: jax.Array) -> tuple[jax.Array, ...]:
    """[B, M, x] as [B, M, 1, x]: one key or value rank."""
    return tuple(f[:, :, None] if f.ndim == 3 else f for f in factors)


def scales(
    d: int,
    r: int,
    rk: int,
    rv: int,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
) -> tuple[float, float]:
    """scale * scale_q * scale_k, and scale_v; by default D**-0.5 / (R Rk), and 1 / Rv."""
    scale = max(d, 1) ** -0.5 if scale is None else scale
    scale_q = 1 / max(r, 1) if scale_q is None else scale_q
    scale_k = 1 / max(rk, 1) if scale_k is None else scale_k
    scale_v = 1 / max(rv, 1) if scale_v is None else scale_v
    return scale * scale_q * scale_k, scale_v


def local_lengths(
    lengths: jax.Array | None, n: int, m: int, axis_name: str | None
) -> jax.Array | None:
    """Lengths counted from the start of this shard's part of the cache (may be < 0 or > M)."""
    if axis_name is None:
        return lengths if lengths is None or n == 1 else jnp.minimum(lengths, m)
    total = m * lax.axis_size(axis_name)
    start = m * lax.axis_index(axis_name)
    if lengths is not None:
        return jnp.minimum(lengths, total) - start
    return None if n == 1 else total - start


def visible(lengths: jax.Array | None, n: int, m: int) -> jax.Array | None:
    """Which keys a query sees, broadcastable to [B, N, 1, M]; None for all of them."""
    if lengths is None and n == 1:
        return None
    lengths = jnp.asarray(m if lengths is None else lengths, jnp.int32)
    last = lengths.reshape(-1, 1) - (n - 1 - jnp.arange(n, dtype=jnp.int32))[None]
    return jnp.arange(m, dtype=jnp.int32)[None, None, None] < last[:, :, None, None]


def existing(lengths: jax.Array | None, *factors: jax.Array) -> tuple[jax.Array, ...]:
    """Factors [B, M, rank, x], zero where no key exists, for there they may hold NaN."""
    if lengths is None:
        return factors
    key = jnp.arange(factors[0].shape[1], dtype=jnp.int32)[None, :, None, None]
    exists = key < lengths.reshape(-1, 1, 1, 1)
    return tuple(jnp.where(exists, x, jnp.zeros_like(x)) for x in factors)


def attend(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array,
    bk: jax.Array,
    bv: jax.Array,
    lengths: jax.Array | None,
    *,
    score_scale: float,
    value_scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp in float32; ak, av, bk, bv have a rank axis."""
    ak, av, bk, bv = existing(lengths, ak, av, bk, bv)
    seen = visible(lengths, aq.shape[1], ak.shape[1])
    inner = _einsum("bnrd,bmkd->bnrkm", bq, bk)
    dtype = inner.dtype
    score = _einsum("bnhr,bnrkm->bnhkm", aq.astype(dtype), inner)
    score = score_scale * _einsum("bnhkm,bmkh->bnhm", score, ak.astype(dtype))
    if seen is not None:
        score = jnp.where(seen, score, -jnp.inf)
    p, lse = softmax(score)
    weight = value_scale * _einsum("bnhm,bmkh->bnhkm", p, av.astype(dtype))
    return _einsum("bnhkm,bmke->bnhe", weight, bv.astype(dtype)), lse


def softmax(score: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis and its log-sum-exp; a row of -inf (or none) gives 0 and -inf."""
    top = jnp.max(score, axis=-1, initial=-jnp.inf)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p = jnp.exp(score - top[..., None])
    total = jnp.sum(p, axis=-1)
    nonzero = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(nonzero) + top)
    return p / nonzero[..., None], lse


def merge_shards(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, one a device of `axis_name`."""
    top = lax.pmax(lax.stop_gradient(lse), axis_name)
    top = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(lse - top)
    total = lax.psum(weight, axis_name)
    nonzero = jnp.where(total == 0, 1, total)
    merged = lax.psum(out * weight[..., None], axis_name) / nonzero[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, jnp.log(nonzero) + top)


def tpa_decode_naive(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array,
    bk: jax.Array,
    bv: jax.Array,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
) -> jax.Array:
    """The same, by materialising q, k and v in the input dtype and attending to them."""
    ak, av, bk, bv = with_ranks(ak, av, bk, bv)
    score_scale, value_scale = scales(
        bq.shape[3], bq.shape[2], ak.shape[2], av.shape[2], scale, scale_q, scale_k, scale_v
    )
    lengths = local_lengths(lengths, aq.shape[1], ak.shape[1], None)
    ak, av, bk, bv = existing(lengths, ak, av, bk, bv)
    seen = visible(lengths, aq.shape[1], ak.shape[1])
    q = _einsum("bnhr,bnrd->bnhd", aq, bq).astype(aq.dtype)
    k = _einsum("bmkh,bmkd->bmhd", ak, bk).astype(aq.dtype)
    v = _einsum("bmkh,bmke->bmhe", av, bv).astype(aq.dtype)
    score = score_scale * _einsum("bnhd,bmhd->bnhm", q, k)
    if seen is not None:
        score = jnp.where(seen, score, -jnp.inf)
    p, _ = softmax(score)
    out = value_scale * _einsum("bnhm,bmhe->bnhe", p, v.astype(p.dtype))
    return out.astype(aq.dtype)
