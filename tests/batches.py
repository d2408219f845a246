"""What `jax.vmap` means, one batch element after the other, and operands of the ops to map over."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import TestedOp
from tests.support import on_device

Axes = Sequence[int | None]  # in_axes


def loop(fn: Callable[..., Any], in_axes: Axes) -> Callable[..., Any]:
    """What `jax.vmap(fn, in_axes)` means."""

    def looped(*xs: Any) -> Any:
        # JAX compiles a program for each shape that it takes apart or stacks; NumPy does not.
        traced = any(isinstance(x, jax.core.Tracer) for x in xs)
        arrays: Any = jnp if traced else np
        xs = xs if traced else tuple(map(np.asarray, xs))
        pairs = list(zip(xs, in_axes, strict=True))
        size = next(x.shape[a] for x, a in pairs if a is not None)
        parts = [
            fn(*(x if a is None else arrays.take(x, i, a) for x, a in pairs)) for i in range(size)
        ]
        return jax.tree.map(lambda *ys: arrays.stack(ys), *parts)

    return looped


def batched(rng: np.random.Generator, op: TestedOp, *levels: Axes) -> tuple[jax.Array, ...]:
    """Operands to map over by in_axes `levels[0]`, then by `levels[1]`, and so on."""

    def argument(i: int, axes: list[int]) -> jax.Array:
        if not axes:
            return op.argument(rng, i)
        return on_device(np.stack([argument(i, axes[1:]) for _ in range(2)], axes[0]))

    return tuple(
        argument(i, [axis for axes in levels if (axis := axes[i]) is not None])
        for i in range(len(op.operands))
    )
