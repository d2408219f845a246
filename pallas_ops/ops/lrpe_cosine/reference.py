"""What lrpe_cosine and md_lrpe_cosine mean, in jax.numpy."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_ops.core import phase
from pallas_ops.core.dtypes import wide

Layout = Literal["BNHD", "BHND"]
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]

ACTS = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}


def lrpe_cosine(
    x: jax.Array,
    theta: jax.Array,
    *,
    offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    act: Act = "none",
    axis: int | None = None,
    layout: Layout = "BNHD",
) -> jax.Array:
    """concat(act(x) cos(phi), act(x) sin(phi)); see `pallas_ops.lrpe_cosine`."""
    n = x.shape[-2] if layout == "BHND" else x.shape[1]
    if positions is None:
        first = jnp.expand_dims(jnp.asarray(offset, jnp.int32), -1)
        positions = first + jnp.arange(n, dtype=jnp.int32).reshape(*(1,) * (first.ndim - 1), n)
    return rotate(x, theta, positions[..., None], act=act, axis=axis, layout=layout)


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
) -> jax.Array:
    """The same on a grid; see `pallas_ops.md_lrpe_cosine`."""
    if positions is None:
        positions = grid(tuple(shape or ()), num_prefix_tokens)
    else:
        positions = without_prefix(positions, num_prefix_tokens)
    return rotate(x, theta, positions, act=act, axis=axis, layout=layout)


def grid(shape: tuple[int, ...], num_prefix_tokens: int) -> jax.Array:
    """The row-major indices of a grid's points [N, K], behind as many rows of 0 as told."""
    points = jnp.indices(shape, jnp.int32).reshape(len(shape), math.prod(shape)).T
    return jnp.pad(points, ((num_prefix_tokens, 0), (0, 0)))


def without_prefix(positions: jax.Array, num_prefix_tokens: int) -> jax.Array:
    """Positions [..., N, K], of which the first tokens' are 0."""
    token = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 2)
    return jnp.where(token < num_prefix_tokens, jnp.zeros_like(positions), positions)


def rotate(
    x: jax.Array,
    theta: jax.Array,
    positions: jax.Array,
    *,
    act: Act,
    axis: int | None,
    layout: Layout,
) -> jax.Array:
    """The formula, for positions [N, K] or [B, N, K]."""
    dtype = wide(x.dtype)
    turn = turns(theta.astype(dtype), positions.astype(dtype), x.shape[-1])
    turn = turn.squeeze(-2) if x.ndim == 3 else heads_to(turn, layout)
    a = activate(x.astype(dtype), act, axis)
    return jnp.concatenate(turned(a, turn), axis=-1).astype(x.dtype)


def activate(x: jax.Array, act: Act, axis: int | None) -> jax.Array:
    return jax.nn.softmax(x, axis=axis) if act == "softmax" else ACTS[act](x)


def turned(a: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a cos(phi) and a sin(phi), phi being 2 pi turn."""
    sin, cos = phase.sincos(turn if turn.ndim == a.ndim else turn[None])
    return a * cos, a * sin


def heads_to(turn: jax.Array, layout: Layout) -> jax.Array:
    """[.., N, H, D] as the layout has it."""
    return jnp.swapaxes(turn, -3, -2) if layout == "BHND" else turn


def turns(theta: jax.Array, positions: jax.Array, d: int) -> jax.Array:
    """phi / (2 pi) [(B,) N, H, D] of theta [H, E] and positions [(B,) N, K]; of 1 head if H is 1.

    Feature d turns by the position on axis d // E times theta[h, d % E].
    """
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
