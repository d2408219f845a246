"""The hardware's approximations on a GPU, jax.numpy where a kernel is interpreted."""

import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import launch, phase

Operand = jax.Array | float

LOG2E = math.log2(math.e)

# Added to a number and subtracted again, these leave a whole one: the nearest, up to 2**22; or one
# of the nearest three, up to 1.49 * 2**23, where of a negative one the first leaves fractions.
ROUNDER, LARGE_ROUNDER = 1.5 * 2**23, 1.25 * 2**24


def settled(x: jax.Array) -> jax.Array:
    """x of 32 bits, as it is, computed where this stands.

    Else Triton may read what a pipelined loop loads in the branch of a `lax.cond` that alone needs
    it, which is behind the next load into the same place; and LLVM computes a branch's addresses
    ahead of the loop, in registers that the other branch then has not.
    """
    return x if launch.is_interpreted() else _ptx("mov.b32", x)


def larger(x: jax.Array, y: float) -> jax.Array:
    """The maximum, without NaN, which a GPU's drops."""
    return jnp.fmax(x, y) if launch.is_interpreted() else jnp.maximum(x, y)


def frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-46 of it."""
    if launch.is_interpreted():
        return phase.frequency(theta)
    inverse = float(np.float32(phase.INVERSE_TURN))
    high = _ptx("mul.rn.f32", theta, inverse)
    rest = multiply_add(theta, inverse, -high)
    return high, multiply_add(theta, phase.INVERSE_TURN - inverse, rest)


def remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, within 2**-22.

    In [-1, 1], in [-2, 2] for positions near 2**24. Products may be up to 1.49 * 2**23 turns, more
    than a position of 2**24 and a theta of 4 make.
    """
    if launch.is_interpreted():
        return phase.remainder(position, high, low)
    less = LARGE_ROUNDER - multiply_add(position, high, LARGE_ROUNDER)
    return multiply_add(position, low, multiply_add(position, high, less))


def sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn, within 2**-20 for |turn| <= 1, in 5 instructions."""
    if launch.is_interpreted():
        return phase.sincos(turn)
    angle = turn * (2 * math.pi)
    return _ptx("sin.approx.ftz.f32", angle), _ptx("cos.approx.ftz.f32", angle)


def precise_sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same within 2**-23, for |turn| < 2**20, in 19 instructions: for results in float32.

    Polynomials for an eighth of a turn either way of the nearest quarter.
    """
    nearest, quarter = _nearest_quarter(turn)
    rest = multiply_add(nearest, -0.25, turn)
    square = rest * rest
    sin = rest * _polynomial(square, 6.28318522, -41.34162769, 81.58806999, -75.23773393)
    cos = _polynomial(square, 1.0, -19.73916706, 64.92317705, -83.66307432)
    odd = (quarter & 1) == 1
    sign = lax.shift_left(quarter, jnp.int32(30))
    return (
        _flip(jnp.where(odd, cos, sin), sign),
        _flip(jnp.where(odd, sin, cos), sign + jnp.int32(2**30)),
    )


def _nearest_quarter(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """4 * turn rounded, and an integer of the same lowest bits."""
    if launch.is_interpreted():  # XLA would simplify what follows
        nearest = jnp.round(turn * 4)
        return nearest, nearest.astype(jnp.int32)
    shifted = multiply_add(turn, 4.0, ROUNDER)
    return shifted - ROUNDER, lax.bitcast_convert_type(shifted, jnp.int32)


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    """The lowest power's coefficient comes first."""
    *others, before_last, last = coefficients
    result = multiply_add(x, last, before_last)
    for coefficient in reversed(others):
        result = multiply_add(x, result, coefficient)
    return result


def _flip(x: jax.Array, sign: jax.Array) -> jax.Array:
    """x, negated where the highest bit of `sign` is set."""
    bits = lax.bitcast_convert_type(x, jnp.int32) ^ (sign & jnp.int32(-(2**31)))
    return lax.bitcast_convert_type(bits, jnp.float32)


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
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, arrays[0].dtype)],
    )
    return result


def _literal(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"
