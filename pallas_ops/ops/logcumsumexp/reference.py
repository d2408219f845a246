"""What logcumsumexp means, in jax.numpy.

`jax.lax.cumlogsumexp` is not a reference: it sums bfloat16 in bfloat16, and its gradient is NaN
behind two leading -inf.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.dtypes import wide


def logcumsumexp(
    x: jax.Array,
    *,
    axis: int = -1,
    reverse: bool = False,
    initial_state: jax.Array | None = None,
    clip: float | None = None,
) -> jax.Array:
    """The output of `logcumsumexp_with_state`."""
    return logcumsumexp_with_state(
        x, axis=axis, reverse=reverse, initial_state=initial_state, clip=clip
    )[0]


def logcumsumexp_with_state(
    x: jax.Array,
    *,
    axis: int = -1,
    reverse: bool = False,
    initial_state: jax.Array | None = None,
    clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log(exp(s) + sum_{j<=i} exp(x_j)) and its last; see `pallas_ops.logcumsumexp`."""
    axis = range(x.ndim)[axis]
    if initial_state is not None:
        initial_state = state(initial_state, x, axis, clip)
    out, final = accumulate(x, initial_state, axis=axis, reverse=reverse, clip=clip)
    return out.astype(x.dtype), jnp.expand_dims(final, axis)


def state(initial: jax.Array, x: jax.Array, axis: int, clip: float | None) -> jax.Array:
    """What was given as a state of x: clipped, in float32 (float64), and without `axis`."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    full = jnp.broadcast_to(initial.astype(wide(x.dtype)), shape)
    return clamp(full.squeeze(axis), clip)


def accumulate(
    x: jax.Array, initial: jax.Array | None, *, axis: int, reverse: bool, clip: float | None
) -> tuple[jax.Array, jax.Array]:
    """Output and final state in float32 (float64); states are without `axis`."""
    out = log_of(*running(x, initial, axis=axis, reverse=reverse, clip=clip))
    final = out[-1]
    out = jnp.flip(out[1:], 0) if reverse else out[1:]
    return jnp.moveaxis(out, 0, axis), final


def running(
    x: jax.Array, initial: jax.Array | None, *, axis: int, reverse: bool, clip: float | None
) -> tuple[jax.Array, jax.Array]:
    """Pivot and sum of all before x and of all up to each position, which is the first axis.

    With m_i the largest of the first i, a constant to differentiation, and
    t_i = sum_{j<=i} exp(x_j - m_i): o_i = m_i + log t_i. No factor exceeds 1 and t_i >= 1, and
    sums are joined as a tree, so this is exact for every range and length.
    """
    dtype = wide(x.dtype)
    y = clamp(jnp.moveaxis(x.astype(dtype), axis, 0), clip)
    y = jnp.flip(y, 0) if reverse else y
    y = lax.pad(y, jnp.array(-jnp.inf, dtype), [(1, 0, 0), *[(0, 0, 0)] * (y.ndim - 1)])
    if initial is not None:
        is_start = jnp.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1)) == 0
        y = jnp.where(is_start, initial.astype(dtype)[None], y)
    pivot = finite(lax.stop_gradient(y))
    joined: tuple[jax.Array, jax.Array] = lax.associative_scan(_join, (pivot, jnp.exp(y - pivot)))
    return joined


def marks(pivot: jax.Array, total: jax.Array, *, axis: int, block_n: int) -> list[jax.Array]:
    """The pairs before each tile and after the last, what a forward pass remembers."""
    n = pivot.shape[0] - 1
    at = jnp.minimum(jnp.arange(-(-n // block_n) + 1) * block_n, n)
    return [jnp.moveaxis(jnp.take(x, at, axis=0), 0, axis) for x in (pivot, total)]


def log_of(pivot: jax.Array, total: jax.Array) -> jax.Array:
    empty = total == 0
    return jnp.where(empty, -jnp.inf, pivot + jnp.log(jnp.where(empty, 1, total)))


def _join(first: Any, second: Any) -> Any:
    """Two log-sum-exps as one."""
    (p, s), (q, t) = first, second
    pivot = jnp.maximum(p, q)
    return pivot, s * jnp.exp(p - pivot) + t * jnp.exp(q - pivot)


def finite(x: jax.Array) -> jax.Array:
    """Infinities as the largest finite numbers; NaN stays."""
    limit = jnp.finfo(x.dtype).max
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))


def clamp(x: jax.Array, clip: float | None) -> jax.Array:
    """x in [-clip, clip], with gradient 0 for what was outside; NaN stays."""
    if clip is None:
        return x
    return jnp.where(x > clip, clip, jnp.where(x < -clip, -clip, x))
