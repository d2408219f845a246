"""The definition of lrpe_cosine and md_lrpe_cosine in jax.numpy: the formula, and its gradients.

Arrays are x [B, N, H, D] or, with `heads_first`, [B, H, N, D]; theta [H, E] or [1, E]; offset [1]
or [B]; positions [N, K] or [B, N, K]. An output has an axis of cos and sin: [B, .., 2, D].
"""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_ops.core.partition import reshard_like
from pallas_ops.ops.lrpe_cosine import phase
from pallas_ops.ops.lrpe_cosine.activation import ACTIVATIONS
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, LrpeCosineConfig

Layout = Literal["BNHD", "BHND"]
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]


def rotate(x: jax.Array, *where: jax.Array | None, **static: Any) -> jax.Array:
    """act(x) cos(phi) and act(x) sin(phi); `where` is theta, offset and positions."""
    return _turned(x, _angles(x.shape[-1], *where, **static), **static)


def _angles(
    d: int,
    theta: Any,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    per_batch: bool,
    **_: Any,
) -> jax.Array:
    """phi / (2 pi) [(B,) N, H, D], of one head if they share theta.

    Feature d turns by the position on axis d // E times theta[h, d % E].
    """
    if positions is None:
        positions = grid(shape or (), num_prefix_tokens)
        if offset is not None:
            positions = positions[None] + offset[:, None, None]
            positions = positions if per_batch else positions[0]
    positions = positions.astype(theta.dtype)
    width, axes = theta.shape[1], positions.shape[-1]
    if axes == 1:
        positions = positions[..., None]
        theta = theta if width == 1 else jnp.pad(theta, ((0, 0), (0, d - width)))
    else:
        positions = jnp.repeat(positions, width, axis=-1)[..., None, :d]
        theta = jnp.tile(theta, (1, axes))[:, :d]
    theta = theta.reshape((1,) * (positions.ndim - 2) + theta.shape)
    shape = jnp.broadcast_shapes(positions.shape, theta.shape)
    return phase.turns(jnp.broadcast_to(positions, shape), jnp.broadcast_to(theta, shape))


def grid(shape: tuple[int, ...], num_prefix_tokens: int) -> jax.Array:
    """The row-major indices of a grid's points [N, K], after `num_prefix_tokens` rows of 0."""
    indices = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape)))
    points = jnp.stack([index.reshape(math.prod(shape)) for index in indices], axis=-1)
    return jnp.pad(points, ((num_prefix_tokens, 0), (0, 0)))


def without_prefix(positions: jax.Array, num_prefix_tokens: int) -> jax.Array:
    """Positions [..., N, K], with those of the prefix tokens set to 0."""
    if num_prefix_tokens == 0:
        return positions
    token = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 2)
    (prefix,) = reshard_like((token < num_prefix_tokens,), (positions,))
    assert prefix is not None
    return jnp.where(prefix, jnp.zeros_like(positions), positions)


def _turned(x: jax.Array, turn: jax.Array, *, act: str, heads_first: bool, **_: Any) -> jax.Array:
    """The output from angles [(B,) N, H, D]."""
    a = x.astype(turn.dtype)
    if act in (SOFTMAX_FEATURES, SOFTMAX_SEQUENCE):
        a = jax.nn.softmax(a, axis=3 if act == SOFTMAX_FEATURES else _tokens(heads_first))
    else:
        a = ACTIVATIONS[act].reference(a)
    turn = jnp.swapaxes(turn, -3, -2) if heads_first else turn
    sin, cos = phase.sincos(turn if turn.ndim == a.ndim else turn[None])
    return jnp.stack([a * cos, a * sin], axis=3).astype(x.dtype)


def _tokens(heads_first: bool) -> int:
    """The axis of tokens in x."""
    return 2 if heads_first else 1


def forward(
    x: jax.Array,
    *where: jax.Array | None,
    save: bool,
    config: LrpeCosineConfig | None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """The output; to save: the same residuals as the kernel's."""
    turn = _angles(x.shape[-1], *where, **static)
    saved: list[jax.Array] = []
    if save and static["act"] == SOFTMAX_SEQUENCE:
        saved += _columns(x.astype(turn.dtype), **static)
    if save and config is not None and config.cache_angles:
        saved.append(jnp.broadcast_to(turn, (*turn.shape[:-1], x.shape[-1])))
    return _turned(x, turn, **static), *saved


def _columns(x: jax.Array, *, heads_first: bool, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of the sequence's softmax [B, H, D]."""
    axis = _tokens(heads_first)
    pivot = jnp.maximum(x.max(axis=axis), jnp.finfo(x.dtype).min)
    return pivot, 1 / jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def backward(
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    cached: jax.Array | None,
    *_: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    """dx. A softmax's pivot and share are not used."""
    x = jnp.zeros_like(dout[:, :, :, 0]) if x is None else x
    turn = _angles(x.shape[-1], theta, offset, positions, **static) if cached is None else cached
    dx: tuple[jax.Array] = jax.vjp(partial(_turned, turn=turn, **static), x)[1](dout)
    return dx


def gradients(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *_: jax.Array | None,
    with_x: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and dtheta. Cached angles and a softmax's pivot and share are not used."""

    def run(x: jax.Array, theta: jax.Array) -> jax.Array:
        return rotate(x, theta, offset, positions, **static)

    pull = jax.vjp(run, x, theta)[1] if with_x else jax.vjp(partial(run, x), theta)[1]
    found: tuple[jax.Array, ...] = pull(dout)
    return found
