"""Small words of kernels and their launchers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

Ref = Any


def power_of_two(size: int) -> int:
    """The least that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def whole(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """All of an array, for every program."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def span(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """a & b, where None is true everywhere."""
    return a if b is None else b if a is None else a & b
