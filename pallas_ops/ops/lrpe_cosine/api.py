"""The public face of lrpe_cosine and md_lrpe_cosine."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core import vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.dtypes import wide
from pallas_ops.ops.lrpe_cosine import reference, refusals, vjp
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig
from pallas_ops.ops.lrpe_cosine.reference import Act, Layout


def lrpe_cosine(
    x: jax.Array,
    theta: jax.Array,
    *,
    offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    act: Act = "none",
    axis: int | None = None,
    layout: Layout = "BNHD",
    implementation: Implementation | None = None,
    config: LrpeCosineConfig | None = None,
) -> jax.Array:
    """Turns each feature into a pair, by an angle that grows with the position.

        a = act(x),  phi[n, h, d] = (offset + n) * theta[h, d]
        out = concat(a cos(phi), a sin(phi)) along the features

    so that inner products of queries and keys thus turned depend on the distance of their
    positions, as cos((m - n) theta) does.

    Computed in float32 and returned in the dtype of x. For positions up to 2**24 and |theta| <= 4,
    cos and sin are within 1e-5 of their float64 values, where a float32 product of position and
    theta has lost the phase.

    Args:
      x: [B, N, H, D], or [B, H, N, D] with layout="BHND", or [B, N, D]; bfloat16, float16, float32
        (float64 runs the reference).
      theta: [H, E], or [1, E] for all heads alike, or [H, 1] for all features alike; floating,
        taken as its float32 value. Features from E > 1 on get angle 0.
      offset: the position of the first token: an integer, or an integer array of shape [] or [B],
        which may be traced. A new one compiles nothing.
      positions: [N] or [B, N], integers or real numbers (taken as float32), in place of offset + n.
      act: "none", "relu", "sigmoid", "silu", or "softmax" along `axis`.
      axis: of the softmax: that of the features or that of the sequence.
      layout: "BNHD" or "BHND"; neither is transposed.
      implementation: None (the Triton kernel where the code is lowered for an NVIDIA GPU, jax.numpy
        elsewhere), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices; None chooses by shape. "xla" takes none.

    Returns:
      x's shape with 2D features, in the dtype of x. Differentiable in x, theta and real positions.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: Linearized Relative Positional Encoding, https://arxiv.org/abs/2307.09270; the kernels
    lrpe_cosine of xopes, to which it adds theta's gradient, traced offsets, positions, layouts,
    partial width as documented, and the exact phase.
    """
    x, theta = _array(x), _array(theta)
    first = refusals.offset(offset, x.shape, given=positions is not None)
    if positions is not None:
        positions = _array(positions)
        refusals.positions(positions, "N", "B N")
        positions = positions[..., None]
    return _rotate(x, theta, first, positions, None, 0, act, axis, layout, implementation, config)


def md_lrpe_cosine(
    x: jax.Array,
    theta: jax.Array,
    *,
    shape: Sequence[int] | None,
    num_prefix_tokens: int = 0,
    positions: jax.Array | None = None,
    act: Act = "none",
    axis: int | None = None,
    layout: Layout = "BNHD",
    implementation: Implementation | None = None,
    config: LrpeCosineConfig | None = None,
) -> jax.Array:
    """`lrpe_cosine` on a grid of any number of dimensions.

    With N = num_prefix_tokens + prod(shape), and (s_1, .., s_K) the row-major index of a token:

        phi[s, h, d] = s_{d // E + 1} * theta[h, d % E]

    The first E features turn by the first index, the next E by the second, and so on. Prefix
    tokens (a class token, say) get angle 0: concat(act(x), 0).

    Args:
      x, act, axis, layout, implementation, config: as for `lrpe_cosine`.
      theta: [H, E] or [1, E] with K * E >= D; for K = 1 also what `lrpe_cosine` takes.
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
    x, theta = _array(x), _array(theta)
    points = refusals.grid(shape, num_prefix_tokens, given=positions is not None)
    if positions is not None:
        positions = _array(positions)
        refusals.positions(positions, "N K", "B N K")
    return _rotate(
        x,
        theta,
        None,
        positions,
        points,
        num_prefix_tokens,
        act,
        axis,
        layout,
        implementation,
        config,
    )


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _rotate(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *statics: Any,
) -> jax.Array:
    signatures: list[Any] = [_signature(y) for y in (x, theta, offset, positions)]
    params = refusals.params(*signatures, *statics)
    return _run(x, theta, offset, positions, params=params)  # type: ignore[no-any-return]


def _signature(x: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.jit, static_argnames=("params",), inline=True)
def _run(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    params: vjp.Params,
) -> jax.Array:
    theta = theta.astype(wide(x.dtype))
    if positions is not None:
        positions = reference.without_prefix(positions, params.num_prefix_tokens)
        positions = positions.astype(theta.dtype)
    full = x if x.ndim == 4 else x[:, :, None]
    operands: Any = vary.unify(full, theta, offset, positions)
    run = vjp.reference if params.implementation == "xla" else vjp.rotate
    return run(params, *operands).reshape(*x.shape[:-1], 2 * x.shape[-1])
