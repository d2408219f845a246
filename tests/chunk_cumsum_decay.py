"""What the tests of chunk_cumsum_decay share: its definition, as a matrix."""

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import pallas_ops
from tests.support import random_array

Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]


def sums(
    x: Any,
    *,
    axis: int = 1,
    chunk_size: int = 128,
    reverse: bool = False,
    shift: str | None = None,
    bounds: Sequence[int] | None = None,
    transposed: bool = False,
) -> Float64:
    """The definition, in float64, as a matrix; transposed, from cotangents to gradients."""
    y = np.moveaxis(np.asarray(x).astype(np.float64), axis, 0)
    matrix = np.zeros((len(y), len(y)), bool)
    for low, high in itertools.pairwise([0, len(y)] if bounds is None else bounds):
        for start in range(low, high, chunk_size):
            stop = min(start + chunk_size, high)
            first, last = (start, stop) if shift == "chunk" else (low, high)
            for i in range(start, stop):
                for j in range(i, stop) if reverse else range(start, i + 1):
                    source = j + (1 if reverse else -1) * (shift is not None)
                    if first <= source < last:
                        matrix[i, source] = True
    rows = matrix.T if transposed else matrix
    return np.moveaxis(np.stack([y[row].sum(axis=0) for row in rows]), 0, axis)


@functools.cache
def pulled(implementation: Any = None, **kwargs: Any) -> Any:
    """Of x, cotangent and bounds: output and gradient, compiled."""

    def call(x: jax.Array, do: jax.Array, bounds: jax.Array | None = None) -> Any:
        fn = partial(pallas_ops.chunk_cumsum_decay, implementation=implementation, **kwargs)
        out, pull = jax.vjp(partial(fn, cu_seqlens=bounds), x)
        return out, *pull(do)

    return jax.jit(call)


def truth(x: Any, do: Any, **kwargs: Any) -> tuple[Float64, Float64]:
    return sums(x, **kwargs), sums(do, transposed=True, **kwargs)


def arguments(rng: Rng, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return random_array(rng, shape, dtype), random_array(rng, shape, dtype)
