"""Products of tiles on the tensor cores, without rounding what is in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch


def dot(a: jax.Array, b: jax.Array, acc: jax.Array | None = None) -> jax.Array:
    """acc + a @ b, summed in float32, with no operand rounded to 16 bits.

    Products of two bfloat16 or two float16 numbers are exact in float32. A float32 tile that
    meets a bfloat16 one is taken as the sum of two bfloat16 tiles, which is within 2**-17 of it.
    Any other pair runs as three TF32 products (within 2**-21), for float16 cannot hold the range.
    """
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return _product(a, b, acc)
    if b.dtype == jnp.bfloat16:
        high, low = _halves(a)
        return _product(low, b, _product(high, b, acc))
    if a.dtype == jnp.bfloat16:
        high, low = _halves(b)
        return _product(a, low, _product(a, high, acc))
    precision = (
        lax.Precision.HIGHEST
        if launch.is_interpreted()  # no CPU has the TF32 algorithms
        else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )
    return _product(a.astype(jnp.float32), b.astype(jnp.float32), acc, precision)


def _product(a: jax.Array, b: jax.Array, acc: jax.Array | None, precision: Any = None) -> jax.Array:
    product = jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product  # one instruction: the tensor cores add


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper half of each number's bits, and the rest, rounded."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
