"""Activations and their derivatives: a table of the elementwise ones, and the two softmaxes.

Kernels apply them to a tile [tokens, features] in float32, with the approximations of `fastmath`.
A softmax over the sequence reads values that all tokens share (`Softmax`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import LOG2E, exp2, reciprocal
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, Softmax


class Activation(NamedTuple):
    """One elementwise activation."""

    reference: Callable[[jax.Array], jax.Array]  # the definition, in any dtype
    tile: Callable[[jax.Array], jax.Array]  # the same for a tile in a kernel
    pullback: Callable[[Any, jax.Array], jax.Array]  # (x, da) -> dx, for a tile


def activate(act: str, x: jax.Array, softmax: Softmax) -> jax.Array:
    """act(x) of a tile; only the softmax over the sequence reads `softmax`."""
    if act == SOFTMAX_SEQUENCE:
        return exp2((x - softmax.pivot) * LOG2E) * softmax.share
    if act == SOFTMAX_FEATURES:
        e = exp2((x - x.max(axis=1, keepdims=True)) * LOG2E)
        return e * reciprocal(e.sum(axis=1, keepdims=True))
    return ACTIVATIONS[act].tile(x)


def pull(act: str, x: Any, da: jax.Array, softmax: Softmax) -> jax.Array:
    """dx from da, the gradient of act(x); "none" does not read x."""
    if act in ACTIVATIONS:
        return ACTIVATIONS[act].pullback(x, da)
    a = activate(act, x, softmax)
    mean = softmax.mean if act == SOFTMAX_SEQUENCE else (a * da).sum(axis=1, keepdims=True)
    return a * (da - mean)


def _sigmoid(x: jax.Array) -> jax.Array:
    return reciprocal(1 + exp2(x * -LOG2E))


def _pull_sigmoid(x: jax.Array, da: jax.Array) -> jax.Array:
    s = _sigmoid(x)
    return da * s * (1 - s)


def _pull_silu(x: jax.Array, da: jax.Array) -> jax.Array:
    s = _sigmoid(x)
    return s * da * (1 + x * (1 - s))


ACTIVATIONS = {
    "none": Activation(lambda x: x, lambda x: x, lambda _, da: da),
    "relu": Activation(
        jax.nn.relu,
        lambda x: jnp.where(x < 0, 0.0, x),  # keeps NaN
        lambda x, da: jnp.where(x > 0, da, 0.0),
    ),
    "sigmoid": Activation(jax.nn.sigmoid, _sigmoid, _pull_sigmoid),
    "silu": Activation(jax.nn.silu, lambda x: x * _sigmoid(x), _pull_silu),
}
