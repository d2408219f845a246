"""The public face of tpa_decode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core import checks, vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.dtypes import wide
from pallas_ops.ops.tpa_decode import reference, vjp
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, choose


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
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> jax.Array:
    """Decodes with Tensor Product Attention, straight from the cached factors.

    With q = scale_q sum_r aq_r bq_r, k = scale_k sum_r ak_r bk_r, v = scale_v sum_r av_r bv_r
    (sums of outer products of a head factor a and a feature factor b):

        out = softmax(scale * q k^T) v

    and neither k nor v is ever materialised. Query n of N is token length - N + n of the cache: it
    sees keys m < length - (N - 1 - n).

    Computed in float32 and returned in the dtype of the factors; nothing on the way has a 16-bit
    dtype. In tensor-core products a float32 side keeps 16 significant bits or more, and 21 where
    scores are made for the log-sum-exp. Gradients whose tiles do not fit the card (more than 256
    queries times heads, wide float32 factors) are computed by the reference's derivative.

    Args:
      aq: query head factors [B, N, H, R]; bfloat16, float16, float32 (float64 runs the reference).
      ak: key head factors [B, M, H], or [B, M, Rk, H] with a key rank.
      av: value head factors [B, M, H], or [B, M, Rv, H].
      bq: query feature factors [B, N, R, D].
      bk: key feature factors [B, M, D], or [B, M, Rk, D].
      bv: value feature factors [B, M, E], or [B, M, Rv, E].
      lengths: integers [B], may be traced: keys m >= lengths[b] do not exist, whatever the cache
        holds there (NaN included). Length 0 gives 0. Default: all M keys exist.
      scale: default D**-0.5; scale_q: default 1 / R; scale_k: default 1 / Rk; scale_v: default
        1 / Rv. Python numbers.
      axis_name: inside `jax.shard_map`, the mesh axis over which M is sharded, in order; partial
        results are merged by their log-sum-exp, and `lengths` count over all shards.
      implementation: None (the Triton kernel where the code is lowered for an NVIDIA GPU, jax.numpy
        elsewhere), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices of the forward kernel; None chooses by shape. "xla" takes none.

    Returns:
      [B, N, H, E] in the dtype of the factors. Differentiable in all six.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: Tensor Product Attention Is All You Need, https://arxiv.org/abs/2501.06425; the
    kernels parallel_b, parallel_bh and parallel_bn of xopes, to which it adds lengths, ranks of k
    and v, several queries, float32 partial results, the log-sum-exp and the gradient.
    """
    return _decode(
        (aq, ak, av, bq, bk, bv),
        lengths,
        (scale, scale_q, scale_k, scale_v),
        axis_name,
        implementation,
        config,
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
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`tpa_decode`, and the log-sum-exp of the scaled scores: float32 [B, N, H], -inf at length 0.

    Attention over disjoint sets of keys merges by it: with weights exp(lse_i - max lse), the
    weighted mean of the outputs is the attention over all the keys.
    """
    return _decode(
        (aq, ak, av, bq, bk, bv),
        lengths,
        (scale, scale_q, scale_k, scale_v),
        axis_name,
        implementation,
        config,
    )


def _decode(
    factors: tuple[jax.Array, ...],
    lengths: jax.Array | None,
    scales: tuple[float | None, ...],
    axis_name: str | None,
    implementation: Implementation | None,
    config: TpaDecodeConfig | None,
) -> tuple[jax.Array, jax.Array]:
    factors = tuple(x if isinstance(x, jax.Array) else jnp.asarray(x) for x in factors)
    if lengths is not None and not isinstance(lengths, jax.Array):
        lengths = jnp.asarray(lengths)
    signature = tuple((x.shape, x.dtype) for x in factors)
    length_signature = None if lengths is None else (lengths.shape, lengths.dtype)
    params = _check(signature, length_signature, axis_name, implementation, config, *scales)
    return _run(factors, lengths, axis_name=axis_name, params=params)  # type: ignore[no-any-return]


@checks.cached
def _check(
    factors: tuple[tuple[tuple[int, ...], Any], ...],
    lengths: tuple[tuple[int, ...], Any] | None,
    axis_name: str | None,
    implementation: Implementation | None,
    config: TpaDecodeConfig | None,
    *scales: float | None,
) -> vjp.Params:
    """The static arguments, or a refusal; a function of what can be hashed, so it runs once."""
    checks.implementation(implementation, config, TpaDecodeConfig)
    checks.instance("axis_name", axis_name, str)
    aq, ak, av, bq, bk, bv = (jax.ShapeDtypeStruct(*f) for f in factors)
    sizes: dict[str, int] = {}
    checks.shape("aq", aq, "B N H R", sizes)
    checks.shape("bq", bq, "B N R D", sizes)
    checks.shape("ak", ak, "B M Rk H" if len(ak.shape) == 4 else "B M H", sizes)
    checks.shape("bk", bk, "B M Rk D" if len(ak.shape) == 4 else "B M D", sizes)
    checks.shape("av", av, "B M Rv H" if len(av.shape) == 4 else "B M H", sizes)
    checks.shape("bv", bv, "B M Rv E" if len(av.shape) == 4 else "B M E", sizes)
    if lengths is not None:
        checks.integers("lengths", jax.ShapeDtypeStruct(*lengths))
        checks.shape("lengths", jax.ShapeDtypeStruct(*lengths), "B", sizes)
    checks.same_floating(dict(aq=aq, ak=ak, av=av, bq=bq, bk=bk, bv=bv))
    names = ("scale", "scale_q", "scale_k", "scale_v")
    given = [checks.number_or_none(name, x) for name, x in zip(names, scales, strict=True)]
    score_scale, value_scale = reference.scales(
        sizes["D"], sizes["R"], sizes.get("Rk", 1), sizes.get("Rv", 1), *given
    )
    implementation = checks.kernel_or_reference(implementation, aq.dtype, sizes)
    letters = {letter.lower(): size for letter, size in sizes.items()}
    s = Sizes(**({"rk": 1, "rv": 1} | letters), dtype=jnp.dtype(aq.dtype).name)
    if implementation != "xla" and config is None and choose(s) is None:
        of = f"{s.dtype} of R={s.r}, D={s.d}, E={s.e}, for which shared memory is too small"
        implementation = checks.reference_instead(implementation, of)
    return vjp.Params(
        score_scale=score_scale,
        value_scale=value_scale,
        implementation=implementation,
        config=config,
    )


@functools.partial(jax.jit, static_argnames=("axis_name", "params"), inline=True)
def _run(
    factors: tuple[jax.Array, ...],
    lengths: jax.Array | None,
    *,
    axis_name: str | None,
    params: vjp.Params,
) -> tuple[jax.Array, jax.Array]:
    aq, ak, av, bq, bk, bv = factors
    ak, av, bk, bv = reference.with_ranks(ak, av, bk, bv)
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    lengths = reference.local_lengths(lengths, aq.shape[1], ak.shape[1], axis_name)
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, aq.shape[:1])
    operands = vary.unify(aq, ak, av, bq, bk, bv, lengths)
    out_dtype = aq.dtype if axis_name is None else jnp.dtype(wide(aq.dtype))
    attention = vjp.reference if params.implementation == "xla" else vjp.attention
    out, lse = attention(params, out_dtype.name, *operands)
    if axis_name is not None:
        out, lse = reference.merge_shards(out, lse, axis_name)
    return out.astype(aq.dtype), lse
