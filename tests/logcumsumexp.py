"""What logcumsumexp means, one number at a time, and the calls that its tests share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import pallas_ops
from tests.support import random_array, to_float64

Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]


def loop(
    x: Any, initial: Any, do: Any, dfinal: Any, *, axis: int, reverse: bool = False
) -> tuple[Float64, Float64, Float64, Float64]:
    """Output, final state and the gradients of x and of the state, in float64.

    States have length 1 on the axis. What is -inf passes no gradient on.
    """
    x, initial, do, dfinal = (
        np.moveaxis(np.asarray(y).astype(np.float64), axis, 0) for y in (x, initial, do, dfinal)
    )
    x, do = (y[::-1] if reverse else y for y in (x, do))
    y = np.concatenate([initial, x])
    out, dy = np.empty(y.shape), np.zeros(y.shape)
    with np.errstate(invalid="ignore"):
        for column in np.ndindex(y.shape[1:]):
            at = (slice(None), *column)
            out[at] = np.logaddexp.accumulate(y[at])
        grads = np.concatenate([np.zeros(initial.shape), do])
        grads[-1:] += dfinal
        for i in range(1, len(y)):
            weight = np.exp(y[: i + 1] - out[i])
            dy[: i + 1] += np.where(out[i] == -np.inf, 0, grads[i] * weight)
    results = (out[1:], dy[1:])
    out_, dx = (z[::-1] if reverse else z for z in results)
    out, dx, final, dinitial = (np.moveaxis(z, 0, axis) for z in (out_, dx, out[-1:], dy[:1]))
    return out, final, dx, dinitial


@functools.cache
def both(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Of x and initial state: output and final state, compiled."""

    def call(x: jax.Array, initial: jax.Array | None = None) -> Any:
        return pallas_ops.logcumsumexp_with_state(
            x, initial_state=initial, implementation=implementation, **kwargs
        )

    return jax.jit(call)


@functools.cache
def pulled(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Of x, initial state and cotangents: output, final state and gradients, compiled."""

    def call(x: Any, initial: Any, *cotangents: Any) -> Any:
        out, pull = jax.vjp(both(implementation, **kwargs), x, initial)
        return *out, *pull(cotangents)

    return jax.jit(call)


def arguments(rng: Rng, shape: tuple[int, ...], axis: int, dtype: Any = jnp.float32) -> Any:
    """x, initial state and cotangents."""
    state = tuple(1 if i == axis % len(shape) else size for i, size in enumerate(shape))
    x, do = (random_array(rng, shape, dtype) for _ in range(2))
    initial, dfinal = (random_array(rng, state) for _ in range(2))
    return x, initial, do, dfinal


def assert_exact(got: Any, want: Any, do: Any, axis: int) -> None:
    """To float32 rounding: outputs of max(1, |o|), gradients of sum |do|."""
    scale = np.abs(np.asarray(do)).astype(np.float64).sum(axis=axis, keepdims=True) + 1
    with np.errstate(invalid="ignore"):
        sizes = [np.maximum(1, np.abs(np.where(np.isfinite(y), y, 0))) for y in want[:2]]
    for name, g, w, size, limit in zip(
        ("out", "final", "dx", "dinitial"),
        map(to_float64, got),
        want,
        (*sizes, scale, scale),
        (2e-6, 2e-6, 1e-5, 1e-5),
        strict=True,
    ):
        special = ~(np.isfinite(g) & np.isfinite(w))
        np.testing.assert_array_equal(g[special], w[special], f"{name}: NaN or infinite")
        error = np.abs(np.where(special, 0, g) - np.where(special, 0, w)) / size
        assert (error <= limit).all(), f"{name}: {error.max():.2g}"
