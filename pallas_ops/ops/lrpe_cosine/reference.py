"""The definition of lrpe_cosine and md_lrpe_cosine in jax.numpy: the formula, and its gradients.

Arrays are x [B, N, H, D] or, with `heads_first`, [B, H, N, D]; theta [H, E] or [1, E]; offset [1]
or [B]; positions [N, K] or [B, N, K]. An output has an axis of cos and sin: [B, .., 2, D].
"""

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients

from pallas_ops.core.dtypes import wide
from pallas_ops.core.partition import reshard_like
from pallas_ops.ops.lrpe_cosine import phase
from pallas_ops.ops.lrpe_cosine.activation import ACTIVATIONS
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, LrpeCosineConfig

Layout = Literal["BNHD", "BHND"]
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]


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
        positions = moved(grid(shape or (), num_prefix_tokens), offset, per_batch=per_batch)
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


def grid(
    shape: tuple[int, ...],
    num_prefix_tokens: int,
    *,
    first: jax.Array | int = 0,
    n: int | None = None,
) -> jax.Array:
    """The row-major indices of a grid's points [N, K], after `num_prefix_tokens` rows of 0.

    Or those of n tokens from `first` on.
    """
    n = num_prefix_tokens + math.prod(shape) if n is None else n
    token = first + jax.lax.iota(jnp.int32, n)
    rest, indices = token - num_prefix_tokens, []
    for size in reversed(shape[1:]):
        indices.append(rest % jnp.maximum(size, 1))
        rest = rest // jnp.maximum(size, 1)
    points = jnp.stack([rest, *reversed(indices)], axis=-1)
    return jnp.where((token < num_prefix_tokens)[:, None], 0, points)


def moved(points: jax.Array, offset: jax.Array | None, *, per_batch: bool) -> jax.Array:
    """Positions [(B,) N, K], each moved by the offset [1] or [B]."""
    if offset is None:
        return points
    return points[None] + offset[:, None, None] if per_batch else points + offset[0]


def without_prefix(positions: jax.Array, num_prefix_tokens: int) -> jax.Array:
    """Positions [..., N, K], with those of the prefix tokens set to 0."""
    if num_prefix_tokens == 0:
        return positions
    token = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 2)
    (prefix,) = reshard_like((token < num_prefix_tokens,), (positions,))
    assert prefix is not None
    return jnp.where(prefix, jnp.zeros_like(positions), positions)


def _turned(
    x: jax.Array,
    turn: jax.Array,
    pivot: jax.Array | None = None,
    share: jax.Array | None = None,
    *,
    act: str,
    heads_first: bool,
    **_: Any,
) -> jax.Array:
    """The output from angles [(B,) N, H, D], with a softmax's pivot and share if they are given."""
    a = x.astype(turn.dtype)
    axis = tokens_axis(heads_first)
    if pivot is not None and share is not None:
        a = jnp.exp(a - jnp.expand_dims(pivot, axis)) * jnp.expand_dims(share, axis)
    elif act in (SOFTMAX_FEATURES, SOFTMAX_SEQUENCE):
        a = jax.nn.softmax(a, axis=3 if act == SOFTMAX_FEATURES else axis)
    else:
        a = ACTIVATIONS[act].reference(a)
    turn = jnp.swapaxes(turn, -3, -2) if heads_first else turn
    sin, cos = phase.sincos(turn if turn.ndim == a.ndim else turn[None])
    return jnp.stack([a * cos, a * sin], axis=3).astype(x.dtype)


def tokens_axis(heads_first: bool) -> int:
    """The axis of tokens in x."""
    return 2 if heads_first else 1


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *columns: jax.Array | None,
    save: bool,
    config: LrpeCosineConfig | None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """The output; to save: the same residuals as the kernel's.

    `columns` are a softmax's pivot and share, if they are known.
    """
    turn = _angles(x.shape[-1], theta, offset, positions, **static)
    saved: list[Any] = []
    if save and static["act"] == SOFTMAX_SEQUENCE:
        pivot, total = softmax(x, **static)
        saved += columns if columns[0] is not None else (pivot, 1 / total)
    if save and config is not None and config.cache_angles:
        saved.append(jnp.broadcast_to(turn, (*turn.shape[:-1], x.shape[-1])))
    return _turned(x, turn, *columns, **static), *saved


def softmax(x: jax.Array, *, heads_first: bool, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of the sequence's softmax [B, H, D]."""
    axis, x = tokens_axis(heads_first), x.astype(wide(x.dtype))
    pivot = stop_gradient(jnp.maximum(x.max(axis=axis), jnp.finfo(x.dtype).min))
    return pivot, jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def mean(x: jax.Array, dout: jax.Array, *others: Any, **static: Any) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D], with a softmax's pivot and share."""
    theta, offset, positions, cached, pivot, share, _ = others
    turn = _angles(x.shape[-1], theta, offset, positions, **static) if cached is None else cached
    x, dout = x.astype(turn.dtype), dout.astype(turn.dtype)
    # Times a, the derivative in its logarithm; a is exp(x - pivot) * share.
    (da,) = jax.vjp(lambda x: _turned(x, turn, pivot, share, **static), x)[1](dout)
    return (da.sum(axis=tokens_axis(static["heads_first"])),)


def backward(
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    cached: jax.Array | None,
    *columns: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    """dx. A softmax's pivot and share are used if its mean is known."""
    x = jnp.zeros_like(dout[:, :, :, 0]) if x is None else x
    turn = _angles(x.shape[-1], theta, offset, positions, **static) if cached is None else cached
    return (_pulled(x, turn, dout, *columns, **static),)


def _pulled(
    x: jax.Array,
    turn: jax.Array,
    dout: jax.Array,
    pivot: jax.Array | None,
    share: jax.Array | None,
    mean: jax.Array | None,
    **static: Any,
) -> jax.Array:
    """dx from angles."""
    if mean is None:
        (dx,) = jax.vjp(partial(_turned, turn=turn, **static), x)[1](dout)
        return dx  # type: ignore[no-any-return]
    full, axis = x.astype(turn.dtype), tokens_axis(static["heads_first"])
    run = lambda x: _turned(x, turn, pivot, share, **static)  # noqa: E731
    (dx,) = jax.vjp(run, full)[1](dout.astype(turn.dtype))
    assert pivot is not None
    assert share is not None
    a = jnp.exp(full - jnp.expand_dims(pivot, axis)) * jnp.expand_dims(share, axis)
    dx -= a * jnp.expand_dims(mean, axis)
    return dx.astype(x.dtype)  # type: ignore[no-any-return]


def gradients(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    _: jax.Array | None,
    *columns: jax.Array | None,
    with_x: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and dtheta. Cached angles are not used; for columns see `backward`."""
    pivot, share, mean = columns
    # Without its mean, the columns of a softmax are those of x.
    known = (pivot, share) if mean is not None or not with_x else ()

    def run(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
        turn = _angles(x.shape[-1], theta, offset, positions, **static)
        return _turned(x, turn, *known, **static), turn

    _, pull, turn = jax.vjp(run, theta, has_aux=True)
    (dtheta,) = pull(dout)
    return (_pulled(x, turn, dout, *columns, **static), dtheta) if with_x else (dtheta,)
