"""The definition of lrpe_cosine and md_lrpe_cosine in jax.numpy: the formula, and its gradients.

An output has an axis of cos and sin: [B, .., 2, D].
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients

from pallas_ops.core.partition import reshard_like
from pallas_ops.core.tiles import wide
from pallas_ops.ops.lrpe_cosine import angles
from pallas_ops.ops.lrpe_cosine.activation import ACTIVATIONS
from pallas_ops.ops.lrpe_cosine.config import Operands, Params

Layout = Literal["BNHD", "BHND"]
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]


def token_positions(p: Params, n: int, offset: Any, first: jax.Array | int = 0) -> jax.Array:
    """The positions of n tokens [(B,) N, K], the first of which is number `first`."""
    token = first + jax.lax.iota(jnp.int32, n)
    if offset is not None and p.per_batch:
        token, offset = token[None], offset[:, None]
    return jnp.stack(angles.indices(token, p.shape, p.num_prefix_tokens, offset), axis=-1)


def without_prefix(positions: jax.Array, num_prefix_tokens: jax.Array | int) -> jax.Array:
    """Positions [..., N, K], with those of the prefix tokens set to 0."""
    if isinstance(num_prefix_tokens, int) and num_prefix_tokens == 0:
        return positions
    token = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 2)
    prefix = reshard_like(token < num_prefix_tokens, positions)
    return jnp.where(prefix, jnp.zeros_like(positions), positions)


def _angles(p: Params, o: Operands) -> jax.Array:
    """phi / (2 pi) [(B,) N, H, D], or [(B,) N, 1, D] if all heads share theta.

    Feature d turns by the position on axis d // E times theta[h, d % E].
    """
    d, positions = o.sized.shape[-1], o.positions
    if positions is None:
        positions = token_positions(p, o.sized.shape[p.tokens_axis], o.offset)
    positions = positions.astype(o.theta.dtype)
    if p.num_axes > 1:
        positions = jnp.repeat(positions, o.theta.shape[1], axis=-1)[..., :d]
    positions, theta = positions[..., None, :], angles.per_feature(o.theta, p.num_axes, d)
    shape = jnp.broadcast_shapes(positions.shape, theta.shape)
    return angles.turns(jnp.broadcast_to(positions, shape), jnp.broadcast_to(theta, shape))


def _activated(p: Params, x: jax.Array, o: Operands) -> jax.Array:
    """act(x), by a softmax's pivot and share if they are given."""
    if o.pivot is not None:
        pivot, share = (jnp.expand_dims(y, p.tokens_axis) for y in (o.pivot, o.share))
        return jnp.exp(x - pivot) * share
    if p.act not in ACTIVATIONS:
        return jax.nn.softmax(x, axis=p.tokens_axis if p.over_sequence else 3)
    return ACTIVATIONS[p.act].reference(x)


def _rotated(p: Params, o: Operands, x: jax.Array, turn: jax.Array) -> jax.Array:
    """The output for x, from angles [(B,) N, H, D]."""
    a = _activated(p, x.astype(turn.dtype), o)
    turn = jnp.swapaxes(turn, -3, -2) if p.heads_first else turn
    sin, cos = angles.exact_sincos(turn if turn.ndim == a.ndim else turn[None])
    return jnp.stack([a * cos, a * sin], axis=3).astype(x.dtype)


def forward(o: Operands, *, p: Params, save: bool = False) -> tuple[jax.Array, ...]:
    """The output. With `save`, also the residuals that the kernel would save."""
    turn = _angles(p, o)
    out, saved = _rotated(p, o, o.x, turn), list[jax.Array]()
    if save and p.over_sequence:
        if o.pivot is None:
            pivot, total = softmax(o, p=p)
            o = o._replace(pivot=pivot, share=1 / total)
        saved = [o.pivot, o.share]
    if save and p.caches_angles:
        saved.append(turn)
    return out, *saved


def softmax(o: Operands, *, p: Params) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of the sequence's softmax [B, H, D]."""
    axis, x = p.tokens_axis, o.x.astype(wide(o.x.dtype))
    pivot = stop_gradient(x.max(axis=axis, initial=jnp.finfo(x.dtype).min))
    return pivot, jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def mean(o: Operands, *, p: Params) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D]."""
    return (_pulled(p, o, o.x).sum(axis=p.tokens_axis),)


def backward(o: Operands, *, p: Params) -> tuple[jax.Array]:
    """dx. `o.x` is there if there is an activation, `o.mean` if another launch computed it."""
    x = jnp.zeros_like(o.dout[:, :, :, 0]) if o.x is None else o.x
    dx = _pulled(p, o, x)
    if o.pivot is not None:  # until here dx is a * da
        mean = dx.sum(axis=p.tokens_axis) if o.mean is None else o.mean
        dx -= _activated(p, x.astype(dx.dtype), o) * jnp.expand_dims(mean, p.tokens_axis)
    return (dx.astype(x.dtype),)


def gradients(o: Operands, *, p: Params, with_x: bool = True) -> tuple[jax.Array, ...]:
    """dx, if asked for, and the gradient of theta."""

    def run(theta: jax.Array) -> jax.Array:
        return _rotated(p, o, o.x, _angles(p, o._replace(theta=theta)))

    (dtheta,) = jax.vjp(run, o.theta)[1](o.dout)
    return (*backward(o, p=p), dtheta) if with_x else (dtheta,)


saving, theta = partial(forward, save=True), partial(gradients, with_x=False)


def _pulled(p: Params, o: Operands, x: jax.Array) -> jax.Array:
    """dx, in at least float32, with a softmax's pivot and share taken for constants."""
    turn = _angles(p, o) if o.cached is None else o.cached
    pull = jax.vjp(lambda x: _rotated(p, o, x, turn), x.astype(turn.dtype))[1]
    (dx,) = pull(o.dout.astype(turn.dtype))
    return dx
