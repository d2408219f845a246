"""Activations of a tile [tokens, features], in float32, and their pullbacks.

The sequence's softmax needs what all tokens have in common, a `Column`; the others see one token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import LOG2E, exp2, reciprocal

SOFTMAX_FEATURES, SOFTMAX_SEQUENCE = "softmax_features", "softmax_sequence"


class Column(NamedTuple):
    """What the sequence's softmax knows of a feature: a = exp(x - pivot) * share."""

    pivot: jax.Array
    share: jax.Array
    mean: jax.Array | None = None  # sum of a * da; going backward


def activate(act: str, x: jax.Array, column: Column | None) -> jax.Array:
    if act == SOFTMAX_SEQUENCE:
        assert column is not None
        return exp2((x - column.pivot) * LOG2E) * column.share
    if act == SOFTMAX_FEATURES:
        e = exp2((x - x.max(axis=1, keepdims=True)) * LOG2E)
        return e * reciprocal(e.sum(axis=1, keepdims=True))
    if act == "relu":
        return jnp.where(x < 0, 0.0, x)  # NaN stays
    if act == "sigmoid":
        return _sigmoid(x)
    return x * _sigmoid(x) if act == "silu" else x


def pull(act: str, x: jax.Array | None, da: jax.Array, column: Column | None) -> jax.Array:
    """dx, from da."""
    if x is None or act == "none":
        return da
    if act == SOFTMAX_SEQUENCE:
        assert column is not None
        assert column.mean is not None
        return activate(act, x, column) * (da - column.mean)
    if act == SOFTMAX_FEATURES:
        a = activate(act, x, None)
        return a * (da - (a * da).sum(axis=1, keepdims=True))
    if act == "relu":
        return jnp.where(x > 0, da, 0.0)
    s = _sigmoid(x)
    if act == "sigmoid":
        return da * s * (1 - s)
    return s * da * (1 + x * (1 - s))  # silu


def _sigmoid(x: jax.Array) -> jax.Array:
    return reciprocal(1 + exp2(x * -LOG2E))
