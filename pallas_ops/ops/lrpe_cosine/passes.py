"""The passes of lrpe_cosine in jax.numpy, for where no kernel runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.ops.lrpe_cosine import reference as meaning
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    save: bool,
    config: LrpeCosineConfig | None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    turn = _turns(x.shape[-1], theta, offset, positions, **static)
    out = _turned(x, turn, **static)
    if not save:
        return (out,)
    saved: list[jax.Array] = []
    if static["act"] == SOFTMAX_SEQUENCE:
        saved += _columns(x.astype(turn.dtype), **static)
    if config is not None and config.cache_angles:
        saved.append(jnp.broadcast_to(turn, (*turn.shape[:-1], x.shape[-1])))
    return out, *saved


def _turns(
    d: int,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    per_batch: bool,
    **_: Any,
) -> jax.Array:
    """All angles [(B,) N, H, D], of one head if they share theta."""
    if positions is None:
        positions = meaning.grid(shape or (), num_prefix_tokens)
        if offset is not None:
            positions = positions[None] + offset[:, None, None]
            positions = positions if per_batch else positions[0]
    return meaning.turns(theta, positions.astype(theta.dtype), d)


def _turned(x: jax.Array, turn: jax.Array, *, act: str, heads_first: bool, **_: Any) -> jax.Array:
    """The output [B, .., 2, D]."""
    axis = 3 if act == SOFTMAX_FEATURES else 2 if heads_first else 1
    name: Any = act.partition("_")[0]
    a = meaning.activate(x.astype(turn.dtype), name, axis)
    turn = meaning.heads_to(turn, "BHND" if heads_first else "BNHD")
    return jnp.stack(meaning.turned(a, turn), axis=3).astype(x.dtype)


def _columns(x: jax.Array, *, heads_first: bool, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of the sequence's softmax [B, H, D]."""
    axis = 2 if heads_first else 1
    pivot = jnp.maximum(x.max(axis=axis), jnp.finfo(x.dtype).min)
    return pivot, 1 / jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def backward(
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    cached: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    del pivot, share, static["config"]
    x = jnp.zeros_like(dout[:, :, :, 0]) if x is None else x
    turn = _turns(x.shape[-1], theta, offset, positions, **static) if cached is None else cached
    (dx,) = jax.vjp(lambda x: _turned(x, turn, **static), x)[1](dout)
    return (dx,)


def gradients(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    *,
    with_x: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    del pivot, share

    def run(theta: jax.Array, x: jax.Array) -> jax.Array:
        return forward(x, theta, offset, positions, save=False, **static)[0]

    if not with_x:
        return jax.vjp(partial(run, x=x), theta)[1](dout)  # type: ignore[no-any-return]
    dtheta, dx = jax.vjp(run, theta, x)[1](dout)
    return dx, dtheta
