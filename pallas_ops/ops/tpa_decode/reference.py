"""What tpa_decode means, in jax.numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients
from jax.sharding import NamedSharding, PartitionSpec

from pallas_ops.core.dtypes import wide
from pallas_ops.core.partition import is_explicit
from pallas_ops.core.shards import Names, gather

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
    r: int | None,
    rk: int,
    rv: int,
    scale: Scale | None = None,
    scale_q: Scale | None = None,
    scale_k: Scale | None = None,
    scale_v: Scale | None = None,
) -> tuple[Scale, Scale]:
    """scale * scale_q * scale_k, and scale_v; by default D**-0.5 / (R Rk), and 1 / Rv.

    A query without factors has no R, and counts as it is.
    """
    scale = _size(d) ** -0.5 if scale is None else scale
    scale_q = (1.0 if r is None else 1 / _size(r)) if scale_q is None else scale_q
    scale_k = 1 / _size(rk) if scale_k is None else scale_k
    scale_v = 1 / _size(rv) if scale_v is None else scale_v
    return scale * scale_q * scale_k, scale_v


def _size(x: Any) -> Any:
    """At least 1; an array where it is symbolic (jax.export)."""
    return max(x, 1) if isinstance(x, int) else jnp.asarray(x, jnp.float32)


def as_int32(x: jax.Array) -> jax.Array:
    """Integers of any dtype; those that int32 has not are taken for the nearest ones."""
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    info = jnp.iinfo(x.dtype)
    if info.min < least or info.max > most:
        x = jnp.clip(x, max(info.min, least), most)
    return x.astype(jnp.int32)


def local_lengths(
    lengths: jax.Array | None, n: int, m: int, window: int | None, axis_name: Names | None
) -> jax.Array | None:
    """Lengths counted from the start of this shard's part of the cache (may be > M).

    None where all keys exist and nothing is counted from the last one.
    """
    from_last = n != 1 or window is not None
    if axis_name is None:
        return jnp.clip(lengths, 0, m) if from_last and lengths is not None else lengths
    total = m * lax.axis_size(axis_name)
    start = m * lax.axis_index(axis_name)
    if lengths is not None:
        return jnp.maximum(jnp.minimum(lengths, total) - start, 0)
    return total - start if from_last else None


def by_query(lengths: jax.Array | None, n: int, m: int, window: int | None) -> jax.Array | None:
    """Which keys each query sees, [B or 1, N, M]; None for all of them."""
    if lengths is None and n == 1 and window is None:
        return None
    lengths = jnp.asarray(m if lengths is None else lengths, jnp.int32).reshape(-1, 1)
    stop = lengths - (n - 1 - jnp.arange(n, dtype=jnp.int32))[None]
    return _between(None if window is None else stop - window, stop, m)


def by_any(lengths: jax.Array | None, n: int, m: int, window: int | None) -> jax.Array | None:
    """Which keys some query sees, [B or 1, M]; None for all of them."""
    if lengths is None and window is None:
        return None
    stop = jnp.asarray(m if lengths is None else lengths, jnp.int32).reshape(-1)
    return _between(None if window is None else stop - (n - 1) - window, stop, m)


def _between(first: jax.Array | None, stop: jax.Array, m: int) -> jax.Array:
    """Which of M keys are from `first` to before `stop`; a new last axis."""
    key = jnp.arange(m, dtype=jnp.int32).reshape(*(1,) * stop.ndim, m)
    seen = key < stop[..., None]
    return seen if first is None else seen & (key >= first[..., None])


def from_pages(table: jax.Array, *factors: jax.Array) -> tuple[jax.Array, ...]:
    """Pools [P, page size, ...] as each row's [B, M, ...]; a page out of range is the nearest."""
    b, pages = table.shape
    table = jnp.maximum(table, 0)  # negative indices would count from the end

    def of_rows(x: jax.Array) -> jax.Array:
        sharding, pool = jax.typeof(table).sharding, jax.typeof(x).sharding
        spec = PartitionSpec(sharding.spec[0], None, None, *pool.spec[2:])
        to = NamedSharding(pool.mesh, spec) if is_explicit(x) else None
        # The gradients of a page that many rows share add up in float32.
        full = x.astype(jnp.float32) if x.dtype.itemsize == 2 else x
        return full.at[table].get(mode="clip", out_sharding=to).astype(x.dtype)

    rows = map(of_rows, factors)
    return tuple(x.reshape(b, pages * x.shape[2], *x.shape[3:]) for x in rows)


def existing(seen: jax.Array | None, *factors: jax.Array) -> tuple[jax.Array, ...]:
    """Factors [B, M, rank, x], zero where nobody sees a key, for there they may hold NaN."""
    if seen is None:
        return factors
    return tuple(jnp.where(seen[:, :, None, None], x, jnp.zeros_like(x)) for x in factors)


def dequantised(like: jax.Array, b: jax.Array) -> jax.Array:
    """Feature factors in the dtype of the head factors, which holds all that 8 bits can be."""
    return b.astype(like.dtype) if b.dtype.itemsize == 1 else b


def attend(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array | None,
    bk: jax.Array,
    bv: jax.Array,
    lengths: jax.Array | None,
    *,
    score_scale: float,
    value_scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp in float32; ak, av, bk, bv have a rank axis."""
    n, m = aq.shape[1], ak.shape[1]
    bk, bv = dequantised(ak, bk), dequantised(av, bv)
    ak, av, bk, bv = existing(by_any(lengths, n, m, window), ak, av, bk, bv)
    seen = by_query(lengths, n, m, window)
    if bq is None:
        score = _einsum("bnhd,bmkd->bnhkm", aq, bk)
    else:
        inner = _einsum("bnrd,bmkd->bnrkm", bq, bk)
        score = _einsum("bnhr,bnrkm->bnhkm", aq, inner)
    score = score_scale * _einsum("bnhkm,bmkh->bnhm", score, ak)
    if seen is not None:
        score = jnp.where(seen[:, :, None], score, -jnp.inf)
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


def merge_shards(out: jax.Array, lse: jax.Array, axis_name: Names) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, one a device of `axis_name`.

    One exchange: every device gets all partial results, and adds them up in one order.
    """
    parts = gather(jnp.concatenate([out, lse[..., None].astype(out.dtype)], axis=-1), axis_name)
    return merge(parts[..., :-1], parts[..., -1])


def merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, along the first axis."""
    weight, total = softmax(jnp.moveaxis(lse, 0, -1))
    return (out * jnp.moveaxis(weight, -1, 0)[..., None]).sum(axis=0), total


def by_row(run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run` on one row of the batch at a time: what XLA makes of it does not know the batch."""

    def one(row: Any) -> Any:
        return jax.tree.map(lambda y: y[0], run(*jax.tree.map(lambda x: x[None], row)))

    return lax.map(one, operands)


def attend_naive(
    aq: jax.Array,
    ak: jax.Array,
    av: jax.Array,
    bq: jax.Array | None,
    bk: jax.Array,
    bv: jax.Array,
    lengths: jax.Array | None,
    *,
    score_scale: float,
    value_scale: float,
    window: int | None,
) -> jax.Array:
    """The output of `attend`, by materialising q, k and v in their factors' dtypes."""
    n, m = aq.shape[1], ak.shape[1]
    bk, bv = dequantised(ak, bk), dequantised(av, bv)
    ak, av, bk, bv = existing(by_any(lengths, n, m, window), ak, av, bk, bv)
    seen = by_query(lengths, n, m, window)
    q = aq if bq is None else _einsum("bnhr,bnrd->bnhd", aq, bq).astype(aq.dtype)
    k = _einsum("bmkh,bmkd->bmhd", ak, bk).astype(ak.dtype)
    v = _einsum("bmkh,bmke->bmhe", av, bv).astype(av.dtype)
    score = score_scale * _einsum("bnhd,bmhd->bnhm", q, k)
    if seen is not None:
        score = jnp.where(seen[:, :, None], score, -jnp.inf)
    p, _ = softmax(score)
    return value_scale * _einsum("bnhm,bmhe->bnhe", p, v)
