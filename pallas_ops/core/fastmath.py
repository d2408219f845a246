"""The hardware's approximations on a GPU, jax.numpy where a kernel is interpreted."""

import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import launch, phase

Operand = jax.Array | float

ROUNDER = 1.5 * 2**23  # added and subtracted, it leaves a whole number


def frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-46 of it."""
    if launch.is_interpreted():
        return phase.frequency(theta)
    inverse = float(np.float32(phase.INVERSE_TURN))
    high = _ptx("mul.rn.f32", theta, inverse)
    rest = multiply_add(theta, inverse, -high)
    return high, multiply_add(theta, phase.INVERSE_TURN - inverse, rest)


def remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, the nearest up to 2**22 turns.

    In float32 within 2**-22 for a product below 2**24.
    """
    if launch.is_interpreted():
        return phase.remainder(position, high, low)
    whole = multiply_add(position, high, ROUNDER) - ROUNDER
    return multiply_add(position, low, multiply_add(position, high, -whole))


def sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn, within 2**-20 for |turn| <= 1."""
    if launch.is_interpreted():
        return phase.sincos(turn)
    angle = turn * (2 * math.pi)
    return _ptx("sin.approx.ftz.f32", angle), _ptx("cos.approx.ftz.f32", angle)


def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, within 2 ulp of it; a result below 2**-126 is 0.

    Pallas lowers `jnp.exp2` to the library's, which takes three more instructions for results
    below 2**-126.
    """
    return jnp.exp2(x) if launch.is_interpreted() else _ptx("ex2.approx.ftz.f32", x)


def log2(x: jax.Array) -> jax.Array:
    """The logarithm to base 2 in float32, within 2**-22 for x in [0.5, 2] and 2 ulp elsewhere.

    An x below 2**-126 is taken for 0.
    """
    return jnp.log2(x) if launch.is_interpreted() else _ptx("lg2.approx.ftz.f32", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """The inverse in float32, within 1 ulp; infinite for an |x| below 2**-126."""
    return 1 / x if launch.is_interpreted() else _ptx("rcp.approx.ftz.f32", x)


def multiply_add(x: Operand, y: Operand, z: Operand) -> jax.Array:
    """x * y + z, rounded once; Triton as XLA runs it does not fuse what `*` and `+` say."""
    if launch.is_interpreted():
        return jnp.asarray(x * y + z)
    return _ptx("fma.rn.f32", x, y, z)


def _ptx(instruction: str, *operands: Operand) -> jax.Array:
    """The instruction's result, elementwise; a Python number is a part of the instruction."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    places = iter(range(1, len(arrays) + 1))
    words = [f"${next(places)}" if isinstance(x, jax.Array) else _literal(x) for x in operands]
    (result,) = plgpu.elementwise_inline_asm(
        f"{instruction} $0, {', '.join(words)};",
        args=[jnp.broadcast_to(x, shape) for x in arrays],
        constraints=",".join(["=r", *["r"] * len(arrays)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result


def _literal(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"
