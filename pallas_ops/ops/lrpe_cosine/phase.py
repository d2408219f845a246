"""Angles in turns, accurate at any position, in jax.numpy without a fused multiply-add.

A float32 product of a position near 2**24 and a frequency is off by half a turn and more. Here a
position times a frequency is a sum of products that float32 holds exactly, and whole turns are
taken off each of them. A compiler that fuses a product with a sum changes nothing, because the
products are exact.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

INVERSE_TURN = 1 / (2 * math.pi)


@jax.custom_jvp
def turns(position: jax.Array, theta: jax.Array) -> jax.Array:
    """position * theta / (2 pi) less a whole number, in [-0.5, 0.5].

    In float32 the error is below 2**-21 for |position| <= 2**24 and |theta| <= 4, both taken as
    exact.
    """
    if position.dtype == jnp.float64:
        return _fraction(position * (theta * INVERSE_TURN))
    return remainder(position, *frequency(theta))


@turns.defjvp
def _turns_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (position, theta), (dposition, dtheta) = primals, tangents
    return turns(position, theta), (dposition * theta + position * dtheta) * INVERSE_TURN


def frequency(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """theta / (2 pi) as the sum of two float32, within 2**-45 of it."""
    first, second, third, rest = _pieces(INVERSE_TURN)
    high, low = _halves(theta)
    middle, error = _two_sum(high * second, low * first)
    total, carry = _two_sum(high * first, middle)
    return total, carry + (error + (high * third + low * second) + (theta * rest + low * third))


def remainder(position: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """position * (high + low) less a whole number, in [-0.5, 0.5]."""
    p, q = _halves(position)
    f, g = _halves(high)
    return _fraction(
        _fraction(p * f) + _fraction(q * f) + _fraction(p * g) + (q * g + position * low)
    )


def sincos(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sin and cos of 2 pi turn."""
    angle = turn * (2 * math.pi)
    return jnp.sin(angle), jnp.cos(angle)


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


def _pieces(value: float) -> tuple[float, ...]:
    """Three numbers of 12 bits and a rest, whose sum is `value`."""
    pieces = []
    for _ in range(3):
        unit = 2.0 ** (math.frexp(value)[1] - 12)
        pieces.append(math.floor(value / unit) * unit)
        value -= pieces[-1]
    return *pieces, value
