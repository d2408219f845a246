"""Angles in turns (phi / (2 pi)), accurate at any position, and their sines and cosines.

A float32 product of a position near 2**24 and a frequency is off by half a turn and more. Here
whole turns are taken off before anything is rounded. The reference and interpreted kernels, which
cannot ask for a fused multiply-add, use `exact_frequency` and `exact_remainder`: a position times a
frequency is a sum of products that float32 holds exactly. A compiler that fuses a product with a
sum changes nothing there. Compiled kernels use the hardware's instructions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.fastmath import multiply_add, ptx

INVERSE_TURN = 1 / (2 * math.pi)
PIECES = 2607 / 2**14, 2435 / 2**26, 3529 / 2**39  # three numbers of 12 bits: most of INVERSE_TURN
# A float32 that has one of these added and subtracted again is a whole number. With ROUNDER it is
# the nearest one, for numbers up to 2**22; beyond, negative numbers keep fractions. With
# LARGE_ROUNDER it is one of the nearest three, for numbers up to 1.49 * 2**23.
ROUNDER, LARGE_ROUNDER = 1.5 * 2**23, 1.25 * 2**24


def indices(
    token: jax.Array, shape: tuple[int, ...], num_prefix_tokens: int, offset: jax.Array | None
) -> list[jax.Array]:
    """The row-major index of each token in the grid: one array per axis, 0 for prefix tokens.

    The offset is added to the index along the first axis.
    """
    rest, found = token - num_prefix_tokens, list[jax.Array]()
    for size in reversed(shape[1:]):
        count = jnp.int32(size or 1)  # a grid without points may have prefix tokens
        found.insert(0, lax.rem(rest, count))
        rest = lax.div(rest, count)
    found.insert(0, rest if offset is None else rest + offset)
    if num_prefix_tokens == 0:
        return found
    return [jnp.where(token < num_prefix_tokens, 0, index) for index in found]


def per_feature(theta: jax.Array, num_axes: int, d: int) -> jax.Array:
    """theta [H, E] with one column per feature [H, D]: feature d has column d % E.

    With one axis, one column serves all features, and features beyond E > 1 get 0.
    """
    heads, width = theta.shape
    if num_axes > 1:
        return jnp.tile(theta, (1, num_axes))[:, :d]
    if width == 1:
        return jnp.broadcast_to(theta, (heads, d))
    return jnp.pad(theta, ((0, 0), (0, d - width)))


@jax.custom_jvp
def turns(position: jax.Array, theta: jax.Array) -> jax.Array:
    """position * theta / (2 pi) less a whole number, in [-0.5, 0.5], for the reference.

    In float32 the error is below 2**-21 for |position| <= 2**24 and |theta| <= 4, both taken as
    exact.
    """
    if position.dtype == jnp.float64:
        return _fraction(position * (theta * INVERSE_TURN))
    return exact_remainder(position, *exact_frequency(theta))


@turns.defjvp
def _turns_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (position, theta), (dposition, dtheta) = primals, tangents
    return turns(position, theta), (dposition * theta + position * dtheta) * INVERSE_TURN


def exact_frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-45 of it."""
    (first, second, third), rest = PIECES, INVERSE_TURN - sum(PIECES)
    high, low = _halves(theta)
    middle, error = _two_sum(high * second, low * first)
    total, carry = _two_sum(high * first, middle)
    return total, carry + (error + (high * third + low * second) + (theta * rest + low * third))


def exact_remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, in [-0.5, 0.5]."""
    p, q = _halves(position)
    f, g = _halves(high)
    return _fraction(
        _fraction(p * f) + _fraction(q * f) + _fraction(p * g) + (q * g + position * low)
    )


def exact_sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn."""
    angle = turn * (2 * math.pi)
    return jnp.sin(angle), jnp.cos(angle)


def frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-46 of it, in a kernel."""
    if launch.is_interpreted():
        return exact_frequency(theta)
    inverse = float(np.float32(INVERSE_TURN))
    high = ptx("mul.rn.f32", theta, inverse)
    rest = multiply_add(theta, inverse, -high)
    return high, multiply_add(theta, INVERSE_TURN - inverse, rest)


def remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, within 2**-22, in a kernel.

    The result is in [-1, 1], and in [-2, 2] for positions near 2**24. The product may be up to
    1.49 * 2**23 turns. A position of 2**24 and a theta of 4 stay below that.
    """
    if launch.is_interpreted():
        return exact_remainder(position, high, low)
    less = LARGE_ROUNDER - multiply_add(position, high, LARGE_ROUNDER)
    return multiply_add(position, low, multiply_add(position, high, less))


def sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn, within 2**-20 for |turn| <= 1 (4e-6 for 2), in 5 instructions."""
    if launch.is_interpreted():
        return exact_sincos(turn)
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


def _fraction(x: jax.Array) -> jax.Array:
    return x - jnp.round(x)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers of 12 bits whose sum is x; float32 holds products of such numbers exactly."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def _two_sum(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x + y rounded, and the rounding error (Knuth's TwoSum)."""
    total = x + y
    rounded_y = total - x
    return total, (x - (total - rounded_y)) + (y - rounded_y)
