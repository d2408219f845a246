"""Small functions that kernels, their launchers and references share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Ref = Any
MOST_PARTS = 2**15
HUGE = float(jnp.finfo(jnp.float32).max)
OF_SYMBOLIC = 512  # positions of a segment of an axis whose size is symbolic (jax.export)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def split_evenly(n: Any, parts: int, part: Any) -> tuple[Any, Any]:
    """Start and stop of part number `part` of n >= 0 items: `part * n // parts`.

    In int32 that product could overflow; nothing here does, with at most `MOST_PARTS` parts. Longer
    and shorter parts alternate: the gradient of lrpe_cosine's softmax over the sequence took 7 %
    more time where all the longer ones came first.
    """
    if parts == 1:
        return 0, n
    size, longer = n // parts, n % parts
    start, stop = (i * size + i * longer // parts for i in (part, part + 1))
    return start, stop


def wide(dtype: Any) -> Any:
    """The dtype to compute in: float64 for float64, else float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def as_int32(x: jax.Array) -> jax.Array:
    """Integers of any dtype; those that int32 has not are taken for the nearest ones."""
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    info = jnp.iinfo(x.dtype)
    if info.min < least or info.max > most:
        x = jnp.clip(x, max(info.min, least), most)
    return x.astype(jnp.int32)


def along(flags: jax.Array, x: jax.Array, axis: int = 0) -> jax.Array:
    """Flags [n] in a shape that broadcasts along an axis of x."""
    return lax.expand_dims(flags, [i for i in range(x.ndim) if i != axis])


def span(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def divided(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Quotients and remainders of x >= 0. (`//` and `%` are more operations, for signs.)"""
    return lax.div(x, size), lax.rem(x, size)


def and_masks(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """a & b, where None is true everywhere."""
    return a if b is None else b if a is None else a & b


def halves(x: jax.Array, axis: int) -> list[jax.Array]:
    """x[0] and x[1] along an axis of two; free in a kernel where a thread has both."""
    x = jnp.moveaxis(x, axis, -1)
    return [half.reshape(x.shape[:-1]) for half in lax.split(x, (1, 1), x.ndim - 1)]


def joined(first: jax.Array, second: jax.Array, *, axis: int) -> jax.Array:
    """The inverse of `halves`."""
    return jnp.moveaxis(jnp.stack([first, second], axis=-1), -1, axis)


def flipped(x: jax.Array) -> jax.Array:
    """x[::-1], of a power of two of entries: each bit of the index is flipped."""
    bits = len(x).bit_length() - 1
    y = x.reshape((2,) * bits + x.shape[1:])
    for bit in range(bits):
        y = joined(*reversed(halves(y, bit)), axis=bit)
    return y.reshape(x.shape)


def unstack(x: jax.Array) -> list[jax.Array]:
    """x[..., k] for each k, of which there are a power of two; free where a thread has them all."""
    *shape, size = x.shape
    if size == 1:
        return [x.reshape(shape)]
    even, odd = (unstack(half) for half in halves(x.reshape(*shape, size // 2, 2), -1))
    return [y for pair in zip(even, odd, strict=True) for y in pair]


def stack(xs: list[jax.Array]) -> jax.Array:
    """The inverse of `unstack`."""
    if len(xs) == 1:
        return xs[0][..., None]
    pairs = joined(stack(xs[::2]), stack(xs[1::2]), axis=-1)
    return pairs.reshape(*pairs.shape[:-2], len(xs))
