"""The public face of lrpe_cosine and md_lrpe_cosine."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.typing import ArrayLike

from pallas_ops.core import checks, forward_mode, partition, shards
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.shards import AxisName
from pallas_ops.core.tiles import wide
from pallas_ops.ops.lrpe_cosine import reference, refusals, vjp
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig, Params
from pallas_ops.ops.lrpe_cosine.reference import Act, Layout


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
    implementation: Implementation | None = None,
    config: LrpeCosineConfig | None = None,
) -> jax.Array:
    """Turns each feature into a pair, by an angle that grows with the position.

        a = act(x),  phi[n, h, d] = (offset + n) * theta[h, d]
        out = concat(a cos(phi), a sin(phi)) along the features

    Inner products of queries and keys that are turned like this depend on the distance of their
    positions, as cos((m - n) theta) does.

    Computed in float32 and returned in the dtype of x. For positions up to 2**24 and |theta| <= 4,
    cos and sin are within 1e-5 of their float64 values, where a float32 product of position and
    theta has lost the phase.

    Args:
      x: [B, N, H, D], or [B, H, N, D] with layout="BHND", or [B, N, D]; bfloat16, float16, float32
        (float64 runs the reference). With a theta of one head no check tells N from H: an array
        [B, H, N, D] without layout="BHND" is taken for [B, N, H, D].
      theta: [H, E], or [1, E] for all heads alike, or [H, 1] for all features alike; floating,
        taken as float32 (float64 if x is). If E > 1, features d >= E get angle 0.
      offset: the position of the first token: an integer, or an integer array of shape [] or [B],
        from -2**30 to 2**30. A traced offset takes new values without recompiling.
      positions: [N] or [B, N], integers or real numbers (taken as theta is), in place of offset + n
        (`position_ids`).
      act: "none", "relu", "sigmoid", "silu", or "softmax" along `axis`.
      axis: what the softmax runs over: the axis of features or that of the sequence.
      layout: "BNHD" or "BHND"; neither is transposed.
      axis_name: inside `jax.shard_map`, the mesh axis (or a tuple of them, the major first) over
        which N is sharded, in order: tokens, and a softmax over them, are those of the whole
        sequence. Given `positions` are the shard's own.
      implementation: None (the kernel on NVIDIA GPUs; jax.numpy elsewhere or, with a warning, where
        none can run), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices; None: by shape, dtype and GPU. "xla" takes none.

    Returns:
      x's shape with 2D features, in the dtype of x. Differentiable in x, theta and real positions.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: Linearized Relative Positional Encoding, https://arxiv.org/abs/2307.09270; the kernels
    lrpe_cosine of xopes, to which it adds theta's gradient, traced offsets, positions, layouts,
    partial width as documented, and the exact phase.
    """
    options = act, axis, layout, implementation, config
    return _run(*prepare(x, theta, positions, *options, offset=offset, axis_name=axis_name))


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
    implementation: Implementation | None = None,
    config: LrpeCosineConfig | None = None,
) -> jax.Array:
    """`lrpe_cosine` on a grid of any number of dimensions.

    With N = num_prefix_tokens + prod(shape), and (s_1, .., s_K) the row-major index of a token:

        phi[s, h, d] = s_{d // E + 1} * theta[h, d % E]

    The first E features turn by the first index, the next E by the second, and so on. Prefix
    tokens (a class token, say) get angle 0: concat(act(x), 0).

    What is not listed here (x, act, axis, layout, axis_name, implementation, config) is as for
    `lrpe_cosine`. With axis_name, shape and num_prefix_tokens are those of the whole sequence.

    Args:
      theta: [H, E] or [1, E], with K * E >= D if K > 1; for K = 1 as `lrpe_cosine` takes it.
      shape: the grid's, such as (height, width); None only with `positions`.
      num_prefix_tokens: how many tokens precede the grid's.
      positions: [N, K] or [B, N, K], integers or real numbers, in place of the grid's indices;
        those of prefix tokens count as 0.

    Returns:
      x's shape with 2D features, in the dtype of x. Differentiable in x, theta and real positions.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: the kernels md_lrpe_cosine of xopes, to which it adds what `lrpe_cosine` adds.
    """
    options = act, axis, layout, implementation, config
    grid = shape, num_prefix_tokens
    return _run(*prepare(x, theta, positions, *options, axis_name=axis_name, grid=grid))


def prepare(
    x: ArrayLike,
    theta: ArrayLike,
    positions: ArrayLike | Sequence[float] | None,
    *options: Any,
    offset: ArrayLike | Sequence[int] = 0,
    axis_name: AxisName | None = None,
    grid: tuple[Any, SupportsIndex] | None = None,
) -> tuple[Params, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The arguments of `evaluate`, checked.

    `options` are act, axis, layout, implementation (default "xla") and config (default None).
    `grid` is the shape and num_prefix_tokens of `md_lrpe_cosine`.
    """
    x, theta = checks.array("x", x), checks.array("theta", theta)
    given = positions is not None
    first = refusals.offset(offset, x.shape, given=given)
    shape, prefix = (None, 0) if grid is None else refusals.grid(*grid, given=given)
    places = checks.optional_array("positions", positions)
    structs = [checks.signature(array) for array in (x, theta, first, places)]
    names = checks.axis_name(axis_name)
    num_shards = 1 if names is None else jax.lax.axis_size(names)
    facts: Any = grid is not None, shape, prefix, names, num_shards
    if places is not None and grid is None:
        places = places[..., None]
    return refusals.params(*structs, *facts, *options), x, theta, first, places


def evaluate(
    params: Params,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    """The output, cos before sin along the features."""
    theta = partition.gathered(theta.astype(wide(x.dtype)), 1)
    index = None if params.axis_name is None else jax.lax.axis_index(params.axis_name)
    if positions is not None:
        prefix: jax.Array | int = params.num_prefix_tokens
        if index is not None:  # those among this shard's tokens
            prefix = prefix - index * positions.shape[-2]
        positions = reference.without_prefix(positions, prefix).astype(theta.dtype)
    whole = partition.gathered(x, x.ndim - 1)
    four = whole if x.ndim == 4 else whole[:, :, None]
    operands = shards.unify(four, theta, offset, positions, index)[:4]
    if params.implementation == "xla":
        out = vjp.evaluate(params, *operands)
    else:
        out = vjp.rotate(params, *forward_mode.refuse(params.op, *operands))
    out = out.reshape(*x.shape[:-1], 2 * x.shape[-1])
    return out if whole is x else partition.reshard_like(out, x)


_run: Callable[..., jax.Array] = jax.jit(evaluate, static_argnums=0, inline=True)
