"""The definition of lrpe_cosine and md_lrpe_cosine in jax.numpy: the formula, and its gradients.

Arrays are x [B, N, H, D] or, with `heads_first`, [B, H, N, D]; theta [H, E] or [1, E]; offset [1]
or [B]; positions [N, K] or [B, N, K]; a softmax's pivot, share and mean [B, H, D]. An output has an
axis of cos and sin: [B, .., 2, D].
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients

from pallas_ops.core.dtypes import wide
from pallas_ops.core.partition import reshard_like
from pallas_ops.ops.lrpe_cosine import angles
from pallas_ops.ops.lrpe_cosine.activation import ACTIVATIONS
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, Params

Layout = Literal["BNHD", "BHND"]
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]


def counted(p: Params, n: int, offset: jax.Array | None, first: jax.Array | int = 0) -> jax.Array:
    """The positions of n tokens [(B,) N, K], the first of which is number `first`.

    They are row-major indices of a grid, 0 for prefix tokens; a line's are moved by the offset.
    """
    token = first + jax.lax.iota(jnp.int32, n)
    rest, indices = token - p.num_prefix_tokens, []
    for size in reversed(p.shape[1:]):
        indices.append(rest % jnp.maximum(size, 1))
        rest = rest // jnp.maximum(size, 1)
    points = jnp.stack([rest, *reversed(indices)], axis=-1)
    points = jnp.where((token < p.num_prefix_tokens)[:, None], 0, points)
    if offset is None:
        return points
    return points[None] + offset[:, None, None] if p.per_batch else points + offset[0]


def without_prefix(positions: jax.Array, num_prefix_tokens: int) -> jax.Array:
    """Positions [..., N, K], with those of the prefix tokens set to 0."""
    if num_prefix_tokens == 0:
        return positions
    token = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 2)
    (prefix,) = reshard_like((token < num_prefix_tokens,), (positions,))
    assert prefix is not None
    return jnp.where(prefix, jnp.zeros_like(positions), positions)


def _angles(
    p: Params, x: jax.Array, theta: jax.Array, offset: Any, positions: jax.Array | None
) -> jax.Array:
    """phi / (2 pi) of x (or of dout) [(B,) N, H, D], of one head if they share theta.

    Feature d turns by the position on axis d // E times theta[h, d % E].
    """
    d, width = x.shape[-1], theta.shape[1]
    if positions is None:
        positions = counted(p, x.shape[p.tokens_axis], offset)
    positions = positions.astype(theta.dtype)
    if p.num_axes > 1:
        positions = jnp.repeat(positions, width, axis=-1)[..., :d]
    positions, theta = positions[..., None, :], angles.per_feature(theta, p.num_axes, d)
    shape = jnp.broadcast_shapes(positions.shape, theta.shape)
    return angles.turns(jnp.broadcast_to(positions, shape), jnp.broadcast_to(theta, shape))


def _activated(p: Params, x: jax.Array, pivot: Any, share: Any) -> jax.Array:
    """act(x), by a softmax's pivot and share if they are given."""
    if pivot is not None:
        pivot, share = (jnp.expand_dims(y, p.tokens_axis) for y in (pivot, share))
        a: jax.Array = jnp.exp(x - pivot) * share
        return a
    if p.act in (SOFTMAX_FEATURES, SOFTMAX_SEQUENCE):
        return jax.nn.softmax(x, axis=3 if p.act == SOFTMAX_FEATURES else p.tokens_axis)
    return ACTIVATIONS[p.act].reference(x)


def _rotated(p: Params, x: jax.Array, turn: jax.Array, pivot: Any, share: Any) -> jax.Array:
    """The output from angles [(B,) N, H, D]."""
    a = _activated(p, x.astype(turn.dtype), pivot, share)
    turn = jnp.swapaxes(turn, -3, -2) if p.heads_first else turn
    sin, cos = angles.exact_sincos(turn if turn.ndim == a.ndim else turn[None])
    return jnp.stack([a * cos, a * sin], axis=3).astype(x.dtype)


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    *,
    save: bool,
    p: Params,
) -> tuple[jax.Array, ...]:
    """The output; to save, the same residuals as the kernel's.

    A softmax's pivot and share are given if they are known.
    """
    turn = _angles(p, x, theta, offset, positions)
    out, saved = _rotated(p, x, turn, pivot, share), list[Any]()
    if save and p.act == SOFTMAX_SEQUENCE:
        if pivot is None:
            pivot, total = softmax(x, p=p)
            share = 1 / total
        saved = [pivot, share]
    if save and p.config is not None and p.config.cache_angles:
        saved.append(turn)
    return out, *saved


def softmax(x: jax.Array, *, p: Params) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of the sequence's softmax [B, H, D]."""
    axis, x = p.tokens_axis, x.astype(wide(x.dtype))
    pivot = stop_gradient(jnp.maximum(x.max(axis=axis), jnp.finfo(x.dtype).min))
    return pivot, jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def mean(x: jax.Array, dout: jax.Array, *others: Any, p: Params) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D]; arguments as for `backward`."""
    return (_pulled(x, dout, *others, p=p).sum(axis=p.tokens_axis),)


def backward(x: jax.Array | None, dout: jax.Array, *others: Any, p: Params) -> tuple[jax.Array]:
    """dx. x is given if there is an activation.

    `others` are theta, offset, positions and cached angles; of a softmax over the sequence its
    pivot and share, and its mean if that is known.
    """
    *_, pivot, share, mean = others
    x = jnp.zeros_like(dout[:, :, :, 0]) if x is None else x
    dx = _pulled(x, dout, *others, p=p)
    if pivot is not None:  # until here dx is a * da
        mean = dx.sum(axis=p.tokens_axis) if mean is None else mean
        a = _activated(p, x.astype(dx.dtype), pivot, share)
        dx -= a * jnp.expand_dims(mean, p.tokens_axis)
    return (dx.astype(x.dtype),)


def gradients(
    x: jax.Array, dout: jax.Array, theta: jax.Array, *others: Any, with_x: bool, p: Params
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and dtheta; arguments as for `backward`. No angles are cached."""
    offset, positions, _, pivot, share, _ = others

    def run(theta: jax.Array) -> jax.Array:
        return _rotated(p, x, _angles(p, x, theta, offset, positions), pivot, share)

    (dtheta,) = jax.vjp(run, theta)[1](dout)
    return (*backward(x, dout, theta, *others, p=p), dtheta) if with_x else (dtheta,)


def _pulled(x: jax.Array, dout: jax.Array, *others: Any, p: Params) -> jax.Array:
    """dx, in at least float32, with a softmax's pivot and share taken for constants."""
    theta, offset, positions, cached, pivot, share, _ = others
    turn = _angles(p, dout, theta, offset, positions) if cached is None else cached
    run = partial(_rotated, p, turn=turn, pivot=pivot, share=share)
    (dx,) = jax.vjp(run, x.astype(turn.dtype))[1](dout.astype(turn.dtype))
    return dx  # type: ignore[no-any-return]
