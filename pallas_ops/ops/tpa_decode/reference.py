"""What tpa_decode means, in jax.numpy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients

from pallas_ops.core.dtypes import wide

Scale = float | jax.Array


def _einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Exact products of the inputs as they are, summed in float32."""
    if x.dtype != y.dtype:
        x, y = x.astype(wide(x.dtype)), y.astype(wide(y.dtype))
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=wide(x.dtype))


def with_ranks(*factors: jax.Array) -> tuple[jax.Array, ...]:
    """[B, M, x] as [B, M, 1, x]: one key or value rank."""
    return tuple(f[:, :, None] if f.ndim == 3 else f for f in factors)


def scales(
    d: int,
    r: int,
    rk: int,
    rv: int,
    scale: Scale | None = None,
    scale_q: Scale | None = None,
    scale_k: Scale | None = None,
    scale_v: Scale | None = None,
) -> tuple[Scale, Scale]:
    """scale * scale_q * scale_k, and scale_v; by default D**-0.5 / (R Rk), and 1 / Rv."""
    scale = _size(d) ** -0.5 if scale is None else scale
    scale_q = 1 / _size(r) if scale_q is None else scale_q
    scale_k = 1 / _size(rk) if scale_k is None else scale_k
    scale_v = 1 / _size(rv) if scale_v is None else scale_v
    return scale * scale_q * scale_k, scale_v


def _size(x: Any) -> Any:
    """At least 1; an array where it is symbolic (jax.export)."""
    return max(x, 1) if isinstance(x, int) else jnp.asarray(x, jnp.float32)


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
    score = _einsum("bnhr,bnrkm->bnhkm", aq, inner)
    score = score_scale * _einsum("bnhkm,bmkh->bnhm", score, ak)
    if seen is not None:
        score = jnp.where(seen, score, -jnp.inf)
    p, lse = softmax(score)
    weight = value_scale * _einsum("bnhm,bmkh->bnhkm", p, av)
    return _einsum("bnhkm,bmke->bnhe", weight, bv), lse


def softmax(score: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis and its log-sum-exp; a row of -inf (or none) gives 0 and -inf."""
    top = jnp.max(score, axis=-1, initial=-jnp.inf)
    top = stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p = jnp.exp(score - top[..., None])
    total = jnp.sum(p, axis=-1)
    nonzero = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(nonzero) + top)
    return p / nonzero[..., None], lse


def merge_shards(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, one a device of `axis_name`."""
    top = lax.pmax(stop_gradient(lse), axis_name)
    top = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(lse - top)
    total = lax.psum(weight, axis_name)
    nonzero = jnp.where(total == 0, 1, total)
    merged = lax.psum(out * weight[..., None], axis_name) / nonzero[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, jnp.log(nonzero) + top)


def attend_naive(
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
) -> jax.Array:
    """The output of `attend`, by materialising q, k and v in their factors' dtypes."""
    ak, av, bk, bv = existing(lengths, ak, av, bk, bv)
    seen = visible(lengths, aq.shape[1], ak.shape[1])
    q = _einsum("bnhr,bnrd->bnhd", aq, bq).astype(aq.dtype)
    k = _einsum("bmkh,bmkd->bmhd", ak, bk).astype(ak.dtype)
    v = _einsum("bmkh,bmke->bmhe", av, bv).astype(av.dtype)
    score = score_scale * _einsum("bnhd,bmhd->bnhm", q, k)
    if seen is not None:
        score = jnp.where(seen, score, -jnp.inf)
    p, _ = softmax(score)
    return value_scale * _einsum("bnhm,bmhe->bnhe", p, v)
