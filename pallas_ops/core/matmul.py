"""Products of tiles, as exact as float32, on the tensor cores."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32, nothing of either operand lost.

    Products of two bfloat16 or two float16 tiles are exact in float32. A float32 tile that meets
    a bfloat16 one is split into the sum of two bfloat16 tiles (16 of its 24 bits, as many as a
    product of three later roundings keeps). Any other pair runs as three TF32 products.
    """
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return _product(a, b)
    if b.dtype == jnp.bfloat16:
        high, low = _halves(a)
        return _product(high, b) + _product(low, b)
    if a.dtype == jnp.bfloat16:
        high, low = _halves(b)
        return _product(a, high) + _product(a, low)
    precision = (
        lax.Precision.HIGHEST
        if launch.is_interpreted()  # no CPU has the TF32 algorithms
        else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
