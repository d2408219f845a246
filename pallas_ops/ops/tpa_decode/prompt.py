"""Many queries at JAX's default precision: cuDNN's attention to keys and values that are formed.

From some hundred queries on the products take the time, and cuDNN is twice as fast at them as a
Triton kernel. It has no mask for queries that are the last of the keys. So the keys come in two
parts: the last N, whose mask is the usual causal one, and all before these.
"""

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card, launch
from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.tiles import Ref, power_of_two, span
from pallas_ops.ops.tpa_decode import reference
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes, tile
from pallas_ops.ops.tpa_decode.tiles import per_batch

# Queries times padded heads times ranks. With fewer, forming keys and values takes longer than
# reading the factors again and again.
LEAST_ROWS = 12_288

try:  # `jax.nn.dot_product_attention` rounds the log-sum-exp to 16 bits.
    cudnn: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
except ImportError:
    cudnn = None


def takes(s: Sizes, p: Params) -> bool:
    """Whether cuDNN has the form of this call, and is the faster way."""
    return s.n * tile(s.h) * s.most_ranks >= LEAST_ROWS and has_form(s, p)


def has_form(s: Sizes, p: Params) -> bool:
    """Whether cuDNN has the form of this call."""
    if s.precision != "default" or s.dtype == "float32" or s.n > s.m:
        return False
    if p.window is not None or p.batch_invariant or p.config is not None:
        return False
    fits = s.d == s.e and s.d % 8 == 0 and s.d <= 128 and s.m * s.h * s.d < 2**31
    return fits and is_here()


def is_here() -> bool:
    """Whether cuDNN is where the code is to run, in a version that knows the card."""
    if cudnn is None or not card.is_here() or launch.is_interpreted():
        return False
    try:
        version = cudnn.check_cudnn_version()
    except RuntimeError:
        return False
    return card.current().capability != 103 or version >= 91_100


def parts_of_keys(n: int, m: int) -> list[tuple[slice, bool]]:
    """The last n keys, under a causal mask, and all before them."""
    return [(slice(m - n, m), True), (slice(0, m - n), False)][: 1 + (n < m)]


def attend(o: Operands, p: Params) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H]."""
    o = reference.dequantised(reference.from_pages(o))
    n, (q, scale, _) = o.aq.shape[1], scaled_query(o.aq, o.bq, p)
    q = q.astype(o.ak.dtype)
    of_keys = partial(_attend, scale=scale, value_scale=p.value_scale)
    if o.lengths is None:
        parts = [of_keys(q, o, keys, is_causal=causal) for keys, causal in parts_of_keys(n, o.m)]
        out, lse = _merged(parts)
        return out.astype(p.out_dtype), lse
    # The last N keys begin at token `start`; the first `num_blind` queries see no key.
    start, num_blind = jnp.maximum(o.lengths - n, 0), jnp.maximum(n - o.lengths, 0)
    query = jnp.arange(n, dtype=jnp.int32)[None, :]
    place = jnp.minimum(start[:, None] + query, o.m - 1)
    last = o.with_cache(lambda x: jnp.take_along_axis(x, place[..., None, None], axis=1))
    count = jnp.clip(o.m - start, 0, jnp.minimum(n, jnp.maximum(o.lengths, 0)))
    q = _rolled(q, num_blind)
    of_last = of_keys(q, last, slice(0, n), count, is_causal=True)
    parts = [of_last, of_keys(q, o, slice(0, o.m), jnp.minimum(start, o.m))]
    out, lse = (_rolled(x, -num_blind) for x in _merged(parts))
    sees = (query >= num_blind[:, None])[..., None]
    out = jnp.where(sees[..., None], out, 0.0)
    return out.astype(p.out_dtype), jnp.where(sees, lse, -jnp.inf)


def scaled_query(aq: jax.Array, bq: jax.Array | None, p: Params) -> tuple[jax.Array, float, float]:
    """(c * q in float32, scale of its products with keys, c); the caller rounds c * q to 16 bits.

    c holds the scale and log2(e) where q is formed from factors; else c is 1.
    """
    if bq is None:
        return reference.query(aq, None), p.score_scale, 1.0
    scale = p.score_scale * LOG2E
    return reference.query(aq, bq, scale), 1 / LOG2E, scale


def _rolled(x: jax.Array, shift: jax.Array) -> jax.Array:
    """[B, N, ...] with query n + shift[b] at place n."""
    index = (jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] + shift[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def _attend(
    q: jax.Array,
    o: Operands,
    keys: slice,
    lengths: jax.Array | None = None,
    *,
    scale: float,
    value_scale: float,
    is_causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention to these keys, of which the first `lengths` exist."""
    k, v = form_keys(o, lengths, keys, value_scale)
    sizes = () if lengths is None else (jnp.full_like(lengths, q.shape[1]), lengths)
    # NO_MASK, PADDING, CAUSAL, PADDING_CAUSAL
    mask = cudnn.MaskType(2 * is_causal + (lengths is not None))
    attention = partial(cudnn.dot_product_attention, return_residual=True)
    out, lse = attention(q, k, v, None, None, *sizes, scale=scale, mask_type=mask)
    lse = lse.swapaxes(1, 2)
    if lengths is not None:
        lse = jnp.where((lengths > 0)[:, None, None], lse, -jnp.inf)
    return out.astype(jnp.float32), lse


def _merged(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Merges attention to disjoint parts of the keys by their log-sum-exps."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    weights, lse = reference.softmax(jnp.stack(lses, axis=-1))
    out = jnp.zeros_like(outs[0])
    for i, x in enumerate(outs):
        weight = weights[..., i, None]
        out += jnp.where(weight > 0, weight * x, 0.0)
    return out, lse


def form_keys(
    o: Operands, lengths: jax.Array | None, keys: slice, value_scale: float
) -> list[jax.Array]:
    """Keys and values [B, keys, H, D], rounded once; 0 from `lengths` on."""
    batch, heads, size, m = o.ak.shape[0], o.ak.shape[-1], o.bk.shape[-1], keys.stop - keys.start
    rows, columns = 4, min(1024, power_of_two(heads * size))
    arrays = None if lengths is None else lengths[:, None], o.ak, o.bk, o.av, o.bv
    result = jax.ShapeDtypeStruct((batch, m, heads * size), o.ak.dtype)
    formed = launch.launch(
        partial(_form, first=keys.start, value_scale=value_scale, rows=rows, columns=columns),
        *arrays,
        name="tpa_decode_form",
        grid=(pl.cdiv(m, rows), pl.cdiv(heads * size, columns), batch),
        in_specs=[*map(per_batch, arrays)],
        out_specs=[per_batch(result)] * 2,
        out_shape=[result] * 2,
        num_warps=4,
    )
    return [x.reshape(batch, m, heads, size) for x in formed]


def _form(
    length_ref: Ref | None,  # [1]
    ak_ref: Ref,  # [M, ranks, H], as av_ref
    bk_ref: Ref,  # [M, ranks, D], as bv_ref
    av_ref: Ref,
    bv_ref: Ref,
    k_ref: Ref,  # [keys, H D], as v_ref
    v_ref: Ref,
    *,
    first: int,
    value_scale: float,
    rows: int,
    columns: int,
) -> None:
    i = (pl.program_id(0) * rows + span(rows))[:, None]
    j = (pl.program_id(1) * columns + span(columns))[None, :]
    inside = (i < k_ref.shape[0]) & (j < k_ref.shape[1])
    exists = inside if length_ref is None else inside & (i < length_ref[0])

    def form(a_ref: Ref, b_ref: Ref, out_ref: Ref, scale: float) -> None:
        ranks, size = b_ref.shape[1:]
        total = jnp.zeros((rows, columns), jnp.float32)
        for k in range(ranks):
            a = plgpu.load(a_ref.at[first + i, k, lax.div(j, size)], mask=exists, other=0.0)
            b = plgpu.load(b_ref.at[first + i, k, lax.rem(j, size)], mask=exists, other=0.0)
            total += a.astype(jnp.float32) * b.astype(jnp.float32)
        plgpu.store(out_ref.at[i, j], (scale * total).astype(out_ref.dtype), mask=inside)

    form(ak_ref, bk_ref, k_ref, 1.0)
    form(av_ref, bv_ref, v_ref, value_scale)
