"""The public face of tpa_decode."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_ops.core import checks, forward_mode, implementations, shards
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.shards import AxisName
from pallas_ops.core.tiles import as_int32, wide
from pallas_ops.ops.tpa_decode import reference, refusals, vjp
from pallas_ops.ops.tpa_decode.config import Operands, Params, Precision, TpaDecodeConfig

SCALES = ("scale", "scale_q", "scale_k", "scale_v")


def tpa_decode(
    aq: ArrayLike,
    ak: ArrayLike,
    av: ArrayLike,
    bq: ArrayLike | None,
    bk: ArrayLike,
    bv: ArrayLike,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    page_table: ArrayLike | None = None,
    window: SupportsIndex | None = None,
    scale: ArrayLike | None = None,
    scale_q: ArrayLike | None = None,
    scale_k: ArrayLike | None = None,
    scale_v: ArrayLike | None = None,
    precision: Precision | jax.lax.Precision | None = None,
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> jax.Array:
    """Decodes with Tensor Product Attention, straight from the cached factors.

    With q = scale_q sum_r aq_r bq_r, k = scale_k sum_r ak_r bk_r, v = scale_v sum_r av_r bv_r
    (sums of outer products of a head factor a and a feature factor b):

        out = softmax(scale * q k^T) v

    and neither k nor v is materialised, except for many queries (below). Query n of N is token
    length - N + n of the cache: it sees keys m < length - (N - 1 - n).

    Computed in float32 and returned in the dtype of aq; nothing else is rounded to 16 bits, but see
    `precision`, and Returns for quantised factors. Tensor cores keep 16 or more significant bits of
    a float32 operand, and 21 in forward scores. Gradients take a block of queries at a time.
    From 256 queries of one rank on (64 of two) they form keys and values. Where not even one query
    fits the card (more than 256 heads, wide float32 factors) they are the reference's, with a
    warning, or an error if implementation="triton".

    Args:
      aq: query head factors [B, N, H, R]; bfloat16, float16, float32 (float64 runs the reference).
        If R = H, no check can tell [B, N, R, H] from it, whose result is wrong.
      ak: key head factors [B, M, H], or [B, M, Rk, H] with a key rank.
      av: value head factors [B, M, H], or [B, M, Rv, H].
      bq: query feature factors [B, N, R, D]. None: queries have no factors, and aq is q itself,
        [B, N, H, D].
      bk: key feature factors [B, M, D], or [B, M, Rk, D].
      bv: value feature factors [B, M, E], or [B, M, Rv, E]. All six have one dtype, or aq and bq
        are float32 and the others bfloat16 or float16, or bk and bv are both int8 or both
        float8_e4m3fn (see `quantize_tpa_factors`).
      lengths: integers [B] or [], may be traced (`jax.nn.dot_product_attention`'s
        `key_value_seq_lengths`): keys m >= lengths[b] do not count, even if they are NaN. A length
        of 0 or less gives 0; one above M means M. Default: all M keys exist.
      page_table: integers [B, pages], may be traced: the cache is a pool that the rows share. ak,
        av, bk and bv have [P, page_size] in place of [B, M]; token m of row b is at m % page_size
        of page page_table[b, m // page_size]. A page out of range is taken for the nearest one.
        `lengths` are then required; the table's entries beyond them have no effect.
      window: a query sees the last `window` of the keys that it would see otherwise. What no query
        sees is not read. Default: no bound.
      scale: default D**-0.5; scale_q: default 1 / R (1 if bq is None); scale_k: default 1 / Rk;
        scale_v: default 1 / Rv. Finite numbers, or real arrays of shape [], which may be traced
        and are differentiable; an array as scale, scale_q or scale_k makes the queries float32.
      precision: None or "highest" is the above. With "high" the scores of bfloat16 factors keep 16
        bits: they are within 2**-16 of the largest scaled sum of |aq_r bq_rd k_d|. Other dtypes and
        calls that are differentiated keep more. "default" is JAX's default on a GPU: the
        kernels round q, the weights of the values, and the results of the cache's parts to the
        dtype of the cache (float32: products are TF32's). The output's error is then at most twice
        that of rounding q, k and v; log-sum-exps are within 2**-8 of the largest scaled sum of
        |q_d k_d|. With 16 bits, from some hundred queries on, if D = E is a multiple of 8
        up to 128, without `window`, `batch_invariant` and `config`, k and v are formed and cuDNN
        attends to them (at most four times the error of rounding q, k and v). Without `lengths`
        and log-sum-exp cuDNN also computes the gradient. `jax.lax.Precision.HIGHEST`, `.HIGH` and
        `.DEFAULT` mean the same; jax.numpy ignores it.
      batch_invariant: a row of the batch gets the same bits in every batch, whatever the lengths of
        the other rows are; the output (not the log-sum-exp) also in a cache of another size. The
        keys are then divided into parts of 512 (more from 2**24 keys on), and not by what fills the
        card (on an H200 1.05 to 1.3 times the default's time, for one sequence up to 1.8 times).
        jax.numpy promises the same for other batches alone, on a CPU, and without `jax.vmap`:
        elsewhere XLA may compile a batch of one in another way.
      axis_name: inside `jax.shard_map`, the mesh axis (or a tuple of them, the major first) over
        which M is sharded, in order; partial results are merged by their log-sum-exp in one
        exchange, and `lengths` count over all shards.
      implementation: None (the kernel on NVIDIA GPUs; jax.numpy elsewhere or, with a warning, where
        none can run), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices, forward only; None: by shape, dtype and GPU. "xla" takes none.

    Returns:
      [B, N, H, E] in the dtype of aq. Differentiable in all factors that are not quantised, and in
      scales that are arrays. Through a page table the gradient is the reference's. With quantised
      factors and bfloat16, probabilities, the weights of the values and the results of the cache's
      parts are rounded to bfloat16, and scores are within 2**-16 of the largest.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: Tensor Product Attention Is All You Need, https://arxiv.org/abs/2501.06425; the
    kernels parallel_b, parallel_bh and parallel_bn of xopes, to which it adds lengths, ranks of k
    and v, several queries, float32 partial results, the log-sum-exp and the gradient.
    """
    operands = aq, ak, av, bq, bk, bv, lengths, page_table
    scales = scale, scale_q, scale_k, scale_v
    options = window, batch_invariant, axis_name, implementation, config, precision
    params, *rest = prepare(operands, scales, *options)
    return _run(dataclasses.replace(params, has_lse=axis_name is not None), *rest)[0]


def tpa_decode_with_lse(
    aq: ArrayLike,
    ak: ArrayLike,
    av: ArrayLike,
    bq: ArrayLike | None,
    bk: ArrayLike,
    bv: ArrayLike,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    page_table: ArrayLike | None = None,
    window: SupportsIndex | None = None,
    scale: ArrayLike | None = None,
    scale_q: ArrayLike | None = None,
    scale_k: ArrayLike | None = None,
    scale_v: ArrayLike | None = None,
    precision: Precision | jax.lax.Precision | None = None,
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`tpa_decode`, and the log-sum-exp of the scaled scores: float32 [B, N, H], -inf at length 0.

    Attention over disjoint sets of keys merges by it: with weights exp(lse_i - max lse), the
    weighted mean of the outputs is the attention over all the keys.
    """
    operands = aq, ak, av, bq, bk, bv, lengths, page_table
    scales = scale, scale_q, scale_k, scale_v
    options = window, batch_invariant, axis_name, implementation, config, precision
    return _run(*prepare(operands, scales, *options))


# The scales of scores and of values that were given as arrays; numbers are in `Params`.
Scales = tuple[jax.Array | None, jax.Array | None]


def prepare(
    operands: Sequence[Any],
    scales: Sequence[ArrayLike | None],
    window: SupportsIndex | None = None,
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = "xla",
    config: TpaDecodeConfig | None = None,
    precision: Precision | jax.lax.Precision | None = None,
) -> tuple[Params, Operands, Scales]:
    """What `evaluate` takes, or a refusal."""
    names = checks.axis_name(axis_name)
    o = Operands(*map(_array, Operands._fields, operands))
    dtype = wide(o.aq.dtype)
    given = [checks.scale(*pair, dtype) for pair in zip(SCALES, scales, strict=True)]
    options = window, batch_invariant, names, implementation, config, precision
    sizes, params = refusals.static(Operands(*map(checks.signature, o)), *options)
    implementations.length(o.ak.shape[1], jax.lax.axis_size(names or ()))
    both = reference.scales(sizes, given, dtype)
    (score, score_array), (value, value_array) = (
        (1.0, x) if isinstance(x, jax.Array) else (x, None) for x in both
    )
    params = dataclasses.replace(params, score_scale=score, value_scale=value)
    return params, o, (score_array, value_array)


def _array(name: str, x: Any) -> Any:
    optional = name in ("bq", "lengths", "page_table")
    return checks.optional_array(name, x) if optional else checks.array(name, x)


def evaluate(
    params: Params,
    operands: Operands,
    scales: Scales,
    attention: Callable[[Params, Operands], Any] = vjp.attention,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp."""
    # Adds an axis of one rank.
    o = operands.with_cache(lambda x: x[:, :, None] if x.ndim == 3 else x)
    dtype, (score_scale, value_scale) = operands.aq.dtype, scales
    full = jnp.dtype(wide(dtype))
    if score_scale is not None:
        o = o._replace(aq=o.aq.astype(full) * score_scale.astype(full))
        o = o._replace(bq=None if o.bq is None else o.bq.astype(full))
    if o.bk.dtype != o.ak.dtype:
        o = o._replace(bk=refusals.no_gradient(o.bk), bv=refusals.no_gradient(o.bv))
    if o.page_table is not None:
        o = o._replace(page_table=as_int32(o.page_table))
    o = reference.with_lengths(o, params.window, params.axis_name)
    o = Operands(*shards.unify(*o))
    if params.implementation != "xla":
        o = Operands(*forward_mode.refuse("tpa_decode", *o))
    # What is merged or scaled after the attention is not rounded before.
    is_last = params.axis_name is None and value_scale is None
    params = dataclasses.replace(params, out_dtype=(dtype if is_last else full).name)
    out, lse = attention(params, o)
    if params.axis_name is not None:
        out, lse = reference.merge_shards(out, lse, params.axis_name)
    if value_scale is not None:
        out = reference.without_blind_queries(out * value_scale.astype(full), lse)
    return out.astype(dtype), lse


_run: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(evaluate, static_argnums=0, inline=True)
