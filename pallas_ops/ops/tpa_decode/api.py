"""The public face of tpa_decode."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_ops.core import checks, forward_mode, vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.dtypes import wide
from pallas_ops.core.shards import AxisName
from pallas_ops.ops.tpa_decode import reference, vjp
from pallas_ops.ops.tpa_decode.cache import QUANTISED
from pallas_ops.ops.tpa_decode.config import TpaDecodeConfig

Struct = jax.ShapeDtypeStruct
Factors = tuple[jax.Array | None, ...]
FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")
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
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> jax.Array:
    """Decodes with Tensor Product Attention, straight from the cached factors.

    With q = scale_q sum_r aq_r bq_r, k = scale_k sum_r ak_r bk_r, v = scale_v sum_r av_r bv_r
    (sums of outer products of a head factor a and a feature factor b):

        out = softmax(scale * q k^T) v

    and neither k nor v is ever materialised. Query n of N is token length - N + n of the cache: it
    sees keys m < length - (N - 1 - n).

    Computed in float32 and returned in the dtype of aq; nothing on the way has a 16-bit dtype. In
    tensor-core products a float32 side keeps 16 significant bits or more, and 21 where
    scores are made for the log-sum-exp. Gradients whose tiles do not fit the card (more than 256
    queries times heads, wide float32 factors) are computed by the reference's derivative.

    Args:
      aq: query head factors [B, N, H, R]; bfloat16, float16, float32 (float64 runs the reference).
        If R = H, nothing tells them apart: [B, N, R, H] is taken as it stands, and wrong.
      ak: key head factors [B, M, H], or [B, M, Rk, H] with a key rank.
      av: value head factors [B, M, H], or [B, M, Rv, H].
      bq: query feature factors [B, N, R, D]. None: queries have no factors, and aq is q itself,
        [B, N, H, D].
      bk: key feature factors [B, M, D], or [B, M, Rk, D].
      bv: value feature factors [B, M, E], or [B, M, Rv, E]. All six have one dtype, or aq and bq
        are float32 and the others bfloat16 or float16, or bk and bv are both int8 or both
        float8_e4m3fn (see `quantize_tpa_factors`).
      lengths: integers [B] or [], may be traced (`key_value_seq_lengths`): keys m >= lengths[b] do
        not exist, whatever the cache holds there (NaN included). Length 0 gives 0, as does a
        negative one; one above M means M. Default: all M keys exist.
      page_table: integers [B, pages], may be traced: the cache is a pool that the rows share. ak,
        av, bk and bv have [P, page_size] in place of [B, M]; token m of row b is at m % page_size
        of page page_table[b, m // page_size]. A page out of range is taken for the nearest one.
        `lengths` are then required; the table's entries behind them are not read.
      window: a query sees the last `window` of the keys that it would see otherwise. What no query
        sees is not read. Default: no bound.
      scale: default D**-0.5; scale_q: default 1 / R (1 if bq is None); scale_k: default 1 / Rk;
        scale_v: default 1 / Rv. Finite numbers, or floating arrays of shape [] (which may be
        traced and are differentiable; one of the scores makes the queries float32).
      batch_invariant: a row of the batch gets the same bits in every batch, whatever the lengths of
        the other rows are. The keys are then divided into parts of 512, and not by what fills the
        card, which costs speed (1.1 to 1.3 times the default's time on an H200).
      axis_name: inside `jax.shard_map`, the mesh axis (or a tuple of them, the major first) over
        which M is sharded, in order; partial results are merged by their log-sum-exp in one
        exchange, and `lengths` count over all shards.
      implementation: None (the Triton kernel where the code is lowered for an NVIDIA GPU, jax.numpy
        elsewhere), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices of the forward kernel; None chooses by shape. "xla" takes none.

    Returns:
      [B, N, H, E] in the dtype of aq. Differentiable in all factors that are not quantised, and in
      scales that are arrays. Through a page table the gradient is the reference's.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: Tensor Product Attention Is All You Need, https://arxiv.org/abs/2501.06425; the
    kernels parallel_b, parallel_bh and parallel_bn of xopes, to which it adds lengths, ranks of k
    and v, several queries, float32 partial results, the log-sum-exp and the gradient.
    """
    return _run(
        *prepare(
            (aq, ak, av, bq, bk, bv),
            lengths,
            page_table,
            (scale, scale_q, scale_k, scale_v),
            window,
            batch_invariant,
            axis_name,
            implementation,
            config,
        )
    )[0]


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
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: TpaDecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`tpa_decode`, and the log-sum-exp of the scaled scores: float32 [B, N, H], -inf at length 0.

    Attention over disjoint sets of keys merges by it: with weights exp(lse_i - max lse), the
    weighted mean of the outputs is the attention over all the keys.
    """
    return _run(
        *prepare(
            (aq, ak, av, bq, bk, bv),
            lengths,
            page_table,
            (scale, scale_q, scale_k, scale_v),
            window,
            batch_invariant,
            axis_name,
            implementation,
            config,
        )
    )


class Scales(NamedTuple):
    """Of the scores and of the values, where they are arrays."""

    query: jax.Array | None
    value: jax.Array | None


def prepare(
    factors: Sequence[ArrayLike | None],
    lengths: ArrayLike | Sequence[int] | None,
    page_table: ArrayLike | None,
    scales: Sequence[ArrayLike | None],
    window: SupportsIndex | None = None,
    batch_invariant: bool | np.bool_ = False,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = "xla",
    config: TpaDecodeConfig | None = None,
) -> tuple[vjp.Params, tuple[str, ...] | None, Factors, jax.Array | None, jax.Array | None, Scales]:
    """What `evaluate` takes, or a refusal."""
    names = checks.axis_name(axis_name)
    arrays: Any = tuple(
        None if x is None and name == "bq" else checks.array(name, x)
        for name, x in zip(FACTORS, factors, strict=True)
    )
    lengths = checks.optional_array("lengths", lengths)
    table = checks.optional_array("page_table", page_table)
    dtype = wide(arrays[0].dtype)
    given = [checks.scale(*pair, dtype) for pair in zip(SCALES, scales, strict=True)]
    signatures = map(checks.signature, (*arrays, lengths, table))
    facts: Any = (*signatures, window, batch_invariant, names, implementation, config)
    sizes, static = _check(*facts)
    query, value = reference.scales(*sizes, *given)
    params = vjp.Params(
        score_scale=1.0 if isinstance(query, jax.Array) else query,
        value_scale=1.0 if isinstance(value, jax.Array) else value,
        config=config,
        **static,
    )
    arrays_of = (x if isinstance(x, jax.Array) else None for x in (query, value))
    return params, names, arrays, lengths, table, Scales(*arrays_of)


@checks.cached
def _check(
    aq: Struct,
    ak: Struct,
    av: Struct,
    bq: Struct | None,
    bk: Struct,
    bv: Struct,
    lengths: Struct | None,
    page_table: Struct | None,
    window: SupportsIndex | None,
    batch_invariant: bool | np.bool_,
    axis_name: tuple[str, ...] | None,
    implementation: Implementation | None,
    config: TpaDecodeConfig | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """D, R, Rk, Rv and static arguments, or a refusal; of what can be hashed, so it runs once."""
    checks.implementation(implementation, config, TpaDecodeConfig)
    arrays = dict(aq=aq, ak=ak, av=av, bk=bk, bv=bv) | ({} if bq is None else dict(bq=bq))
    sizes = {"Rk": 1, "Rv": 1} | _sizes(arrays, lengths, page_table)
    _check_dtypes(arrays)
    if window is not None:
        window = min(checks.integer("window", window, least=1), checks.LONGEST)
        if axis_name is None and isinstance(sizes["M"], int) and window >= sizes["M"]:
            window = None
    if page_table is not None and axis_name is not None:
        raise ValueError("page_table and axis_name are both given; accepted: one of them")
    batch_invariant = checks.flag("batch_invariant", batch_invariant)
    if batch_invariant and config is not None:
        raise ValueError("config and batch_invariant are both given; accepted: one of them")
    if config is not None and config.block_m < 16 and 1 in (sizes["Rk"], sizes["Rv"]):
        raise ValueError(f"config.block_m is {config.block_m}; accepted: 16 or more for one rank")
    rows = {f"N * {x}": sizes["N"] * sizes[x] for x in "HR" if x in sizes}
    rows |= {f"M * {x}": sizes["M"] * sizes[x] for x in ("Rk", "Rv")}
    if page_table is not None:
        keys = sizes["P"] * sizes["page_size"]
        rows |= {f"P * page_size * {x}": keys * sizes[x] for x in ("Rk", "Rv")}
    implementation = checks.kernel_or_reference(implementation, aq.dtype, sizes | rows)
    static = dict(implementation=implementation, window=window, batch_invariant=batch_invariant)
    return tuple(sizes.get(letter) for letter in ("D", "R", "Rk", "Rv")), static


def _sizes(
    arrays: dict[str, Struct], lengths: Struct | None, page_table: Struct | None
) -> dict[str, int]:
    """By letter. aq comes last: of its axes the others tell which are the heads."""
    axes, query = checks.Axes(), "B N H D"
    cache = "B M" if page_table is None else "P page_size"
    if "bq" in arrays:
        query = "B N H R"
        axes.check("bq", arrays["bq"], "B N R D")
    for letter, width in (("k", "D"), ("v", "E")):
        a, b = arrays[f"a{letter}"], arrays[f"b{letter}"]
        forms = (cache, f"{cache} R{letter}")
        axes.check(f"a{letter}", a, *(f"{form} H" for form in forms))
        axes.check(f"b{letter}", b, f"{forms[len(a.shape) - 3]} {width}")
    axes.check("aq", arrays["aq"], query)
    if lengths is not None:
        checks.integers("lengths", lengths)
        axes.check("lengths", lengths, "", "B")
    if page_table is not None:
        checks.integers("page_table", page_table)
        axes.check("page_table", page_table, "B pages")
        if lengths is None:
            raise ValueError("lengths is None; accepted: integers [B] or [], for there are pages")
        axes.learn("page_table", M=axes.sizes["pages"] * axes.sizes["page_size"])
    return axes.sizes


def _check_dtypes(arrays: dict[str, Struct]) -> None:
    """One of the queries, and one of the cache, which may be narrower."""
    for name, x in arrays.items():
        if name not in ("bk", "bv") or x.dtype not in QUANTISED:
            checks.floating(name, x)
    checks.same_dtype("ak", "av", arrays=arrays)
    checks.same_dtype("bk", "bv", arrays=arrays)
    if arrays["bk"].dtype not in QUANTISED:
        checks.same_dtype("ak", "bk", arrays=arrays)
    checks.same_dtype("aq", *(name for name in arrays if name == "bq"), arrays=arrays)
    query, cache = arrays["aq"].dtype, arrays["ak"].dtype
    if query != cache and not (query == jnp.float32 and cache.itemsize == 2):
        raise TypeError(
            f"aq.dtype is '{query}'; accepted: that of the cache, {cache}, or float32 beside a "
            "cache of 16 bits"
        )


@jax.custom_jvp
def no_gradient(x: jax.Array) -> jax.Array:
    """A quantised factor: a TypeError where it is differentiated."""
    return x


@no_gradient.defjvp
def _(primals: Any, _: Any) -> Any:
    raise TypeError(
        f"tpa_decode is differentiated in a factor of dtype {primals[0].dtype}; accepted: in "
        "factors that are not quantised"
    )


def evaluate(
    params: vjp.Params,
    axis_name: tuple[str, ...] | None,
    factors: tuple[jax.Array | None, ...],
    lengths: jax.Array | None,
    page_table: jax.Array | None,
    scales: Scales,
    attention: Callable[..., Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp."""
    aq, ak, av, bq, bk, bv = cast(Any, factors)
    dtype, full = aq.dtype, jnp.dtype(wide(aq.dtype))
    if scales.query is not None:
        aq = aq.astype(full) * scales.query.astype(full)
        bq = None if bq is None else bq.astype(full)
    ak, av, bk, bv = reference.with_ranks(ak, av, bk, bv)
    if bk.dtype != ak.dtype:
        bk, bv = no_gradient(bk), no_gradient(bv)
    if lengths is not None:  # below 0 and 0 mean the same
        lengths = reference.as_int32(lengths)
    n, m = aq.shape[1], ak.shape[1]
    if page_table is not None:
        m *= page_table.shape[1]
    lengths = reference.local_lengths(lengths, n, m, params.window, axis_name)
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, aq.shape[:1])
    tables = () if page_table is None else (reference.as_int32(page_table),)
    operands: Any = vary.unify(aq, ak, av, bq, bk, bv, lengths, *tables)
    if params.implementation != "xla":
        attention = vjp.paged_attention if tables else vjp.attention
        operands = forward_mode.refuse("tpa_decode", *operands)
    attention = attention or vjp.reference
    further = axis_name is not None or scales.value is not None
    out, lse = attention(params, (full if further else dtype).name, *operands)
    if axis_name is not None:
        out, lse = reference.merge_shards(out, lse, axis_name)
    if scales.value is not None:
        out = out * scales.value.astype(full)
    return out.astype(dtype), lse


_run: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(
    evaluate, static_argnums=(0, 1), inline=True
)
