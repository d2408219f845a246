"""Angles in kernels, by the hardware's approximations.

Interpreted kernels use the functions of `phase` instead.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.fastmath import multiply_add, ptx
from pallas_ops.ops.lrpe_cosine import phase

# A float32 that has one of these added and subtracted again is a whole number. With ROUNDER it is
# the nearest one, for numbers up to 2**22; beyond, negative numbers keep fractions. With
# LARGE_ROUNDER it is one of the nearest three, for numbers up to 1.49 * 2**23.
ROUNDER, LARGE_ROUNDER = 1.5 * 2**23, 1.25 * 2**24


def frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-46 of it."""
    if launch.is_interpreted():
        return phase.frequency(theta)
    inverse = float(np.float32(phase.INVERSE_TURN))
    high = ptx("mul.rn.f32", theta, inverse)
    rest = multiply_add(theta, inverse, -high)
    return high, multiply_add(theta, phase.INVERSE_TURN - inverse, rest)


def remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, within 2**-22.

    The result is in [-1, 1], and in [-2, 2] for positions near 2**24. The product may be up to
    1.49 * 2**23 turns. A position of 2**24 and a theta of 4 stay below that.
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
    return ptx("sin.approx.ftz.f32", angle), ptx("cos.approx.ftz.f32", angle)


def precise_sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn, within 2**-23 for |turn| < 2**20, in 19 instructions.

    Two polynomials approximate them up to an eighth of a turn around the nearest quarter.
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
    """4 * turn rounded, and an integer with the same lowest bits."""
    if launch.is_interpreted():  # XLA would cancel the addition and the subtraction of ROUNDER
        nearest = jnp.round(turn * 4)
        return nearest, nearest.astype(jnp.int32)
    shifted = multiply_add(turn, 4.0, ROUNDER)
    return shifted - ROUNDER, lax.bitcast_convert_type(shifted, jnp.int32)


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    """The polynomial in x whose coefficients are given from the constant one on."""
    *others, before_last, last = coefficients
    result = multiply_add(x, last, before_last)
    for coefficient in reversed(others):
        result = multiply_add(x, result, coefficient)
    return result


def _flip(x: jax.Array, sign: jax.Array) -> jax.Array:
    """x, negated where the highest bit of `sign` is set."""
    bits = lax.bitcast_convert_type(x, jnp.int32) ^ (sign & jnp.int32(-(2**31)))
    return lax.bitcast_convert_type(bits, jnp.float32)
