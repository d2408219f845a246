"""The hardware's approximations on a GPU, jax.numpy where a kernel is interpreted."""

import struct

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import launch


def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, within 2 ulp of it; a result below 2**-126 is 0.

    Pallas lowers `jnp.exp2` to the library's, which takes three more instructions for results
    below 2**-126.
    """
    return jnp.exp2(x) if launch.is_interpreted() else _ptx("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: jax.Array) -> jax.Array:
    """The logarithm to base 2 in float32, within 2**-22 for x in [0.5, 2] and 2 ulp elsewhere.

    An x below 2**-126 is taken for 0.
    """
    return jnp.log2(x) if launch.is_interpreted() else _ptx("lg2.approx.ftz.f32 $0, $1;", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """The inverse in float32, within 1 ulp; infinite for an |x| below 2**-126."""
    return 1 / x if launch.is_interpreted() else _ptx("rcp.approx.ftz.f32 $0, $1;", x)


def multiply_add(x: jax.Array, factor: float, y: jax.Array) -> jax.Array:
    """x * factor + y, rounded once; Triton as XLA runs it does not fuse what `*` and `+` say."""
    if launch.is_interpreted():
        return x * factor + y
    bits = struct.unpack("<I", struct.pack("<f", factor))[0]
    y = jnp.broadcast_to(y, x.shape)
    return _ptx(f"fma.rn.f32 $0, $1, 0f{bits:08X}, $2;", x, y)


def _ptx(instruction: str, *xs: jax.Array) -> jax.Array:
    (result,) = plgpu.elementwise_inline_asm(
        instruction,
        args=xs,
        constraints=",".join(["=r", *["r"] * len(xs)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(xs[0].shape, jnp.float32)],
    )
    return result
