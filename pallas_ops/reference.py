"""The ops in jax.numpy: same names, arguments and checks, without `implementation` and `config`.

They are what `implementation="xla"` runs, but run eagerly unless the caller jits them. Those of
`tpa_decode` have no `precision`: they compute in float32, or float64 for float64.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_ops.core.shards import AxisName
from pallas_ops.ops.chunk_cumsum_decay import api as _chunks
from pallas_ops.ops.chunk_cumsum_decay.config import Shift
from pallas_ops.ops.logcumsumexp import api as _logs
from pallas_ops.ops.lrpe_cosine import api as _lrpe
from pallas_ops.ops.lrpe_cosine.reference import Act, Layout
from pallas_ops.ops.tpa_decode import api as _tpa
from pallas_ops.ops.tpa_decode.reference import naive as _naive

__all__ = (
    "chunk_cumsum_decay",
    "logcumsumexp",
    "logcumsumexp_with_state",
    "lrpe_cosine",
    "md_lrpe_cosine",
    "tpa_decode",
    "tpa_decode_naive",
    "tpa_decode_with_lse",
)


def chunk_cumsum_decay(
    x: ArrayLike,
    *,
    axis: SupportsIndex = 1,
    chunk_size: SupportsIndex = 128,
    reverse: bool | np.bool_ = False,
    shift: Shift | None = None,
    scale: ArrayLike | None = None,
    cu_seqlens: ArrayLike | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """`pallas_ops.chunk_cumsum_decay` in jax.numpy."""
    static = axis, chunk_size, reverse, shift
    return _chunks.evaluate(*_chunks.prepare(x, scale, cu_seqlens, dtype, axis_name, *static))


def logcumsumexp(
    x: ArrayLike,
    *,
    axis: SupportsIndex = -1,
    reverse: bool | np.bool_ = False,
    initial_state: ArrayLike | None = None,
    clip: float | np.floating[Any] | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array:
    """`pallas_ops.logcumsumexp` in jax.numpy."""
    return _logs.evaluate(*_logs.prepare(x, initial_state, axis_name, axis, reverse, clip))[0]


def logcumsumexp_with_state(
    x: ArrayLike,
    *,
    axis: SupportsIndex = -1,
    reverse: bool | np.bool_ = False,
    initial_state: ArrayLike | None = None,
    clip: float | np.floating[Any] | None = None,
    axis_name: AxisName | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_ops.logcumsumexp_with_state` in jax.numpy."""
    return _logs.evaluate(*_logs.prepare(x, initial_state, axis_name, axis, reverse, clip))


def lrpe_cosine(
    x: ArrayLike,
    theta: ArrayLike,
    *,
    offset: ArrayLike | Sequence[int] = 0,
    positions: ArrayLike | Sequence[float] | None = None,
    act: Act = "none",
    axis: SupportsIndex | None = None,
    layout: Layout = "BNHD",
    axis_name: AxisName | None = None,
) -> jax.Array:
    """`pallas_ops.lrpe_cosine` in jax.numpy."""
    options = positions, act, axis, layout
    return _lrpe.evaluate(*_lrpe.prepare(x, theta, *options, offset=offset, axis_name=axis_name))


def md_lrpe_cosine(
    x: ArrayLike,
    theta: ArrayLike,
    *,
    shape: Sequence[SupportsIndex] | np.ndarray[Any, Any] | None,
    num_prefix_tokens: SupportsIndex = 0,
    positions: ArrayLike | None = None,
    act: Act = "none",
    axis: SupportsIndex | None = None,
    layout: Layout = "BNHD",
    axis_name: AxisName | None = None,
) -> jax.Array:
    """`pallas_ops.md_lrpe_cosine` in jax.numpy."""
    options, grid = (positions, act, axis, layout), (shape, num_prefix_tokens)
    return _lrpe.evaluate(*_lrpe.prepare(x, theta, *options, axis_name=axis_name, grid=grid))


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
) -> jax.Array:
    """`pallas_ops.tpa_decode` in jax.numpy."""
    operands = aq, ak, av, bq, bk, bv, lengths, page_table
    scales = scale, scale_q, scale_k, scale_v
    return _tpa.evaluate(*_tpa.prepare(operands, scales, window, batch_invariant, axis_name))[0]


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
) -> tuple[jax.Array, jax.Array]:
    """`pallas_ops.tpa_decode_with_lse` in jax.numpy."""
    operands = aq, ak, av, bq, bk, bv, lengths, page_table
    scales = scale, scale_q, scale_k, scale_v
    return _tpa.evaluate(*_tpa.prepare(operands, scales, window, batch_invariant, axis_name))


def tpa_decode_naive(
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
) -> jax.Array:
    """`tpa_decode` by materialising q, k and v in their factors' dtypes and attending to them."""
    operands = aq, ak, av, bq, bk, bv, lengths, page_table
    scales = scale, scale_q, scale_k, scale_v
    return _tpa.evaluate(*_tpa.prepare(operands, scales, window), attention=_naive)[0]
