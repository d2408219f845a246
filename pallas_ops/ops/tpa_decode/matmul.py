"""Products of tiles on the tensor cores; float32 tiles are taken apart instead of rounded."""

import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.tiles import span

Pieces = Literal[1, 2, 3]


def dot(
    a: jax.Array, b: jax.Array, acc: jax.Array | None = None, *, pieces: Pieces = 2
) -> jax.Array:
    """acc + a @ b, summed in float32; with two or three pieces no operand is rounded to 16 bits.

    Products of two bfloat16 or two float16 numbers are exact in float32. A float32 tile that
    meets a bfloat16 one is taken as the sum of `pieces` bfloat16 tiles: one is within 2**-9 of it;
    two within 2**-16, enough for what is rounded to bfloat16 in the end; three hold all of its
    bits. One that meets a float16 tile, which becomes the sum of two, has three of them: float16
    pieces may overflow (`scaled_dot` has them). Of their six products, all but the least are enough
    for what is rounded to float16 (within 2**-21). Two float32 tiles run as three TF32 products
    (within 2**-21 too). With one piece a float32 tile that meets a float16 one is rounded to
    float16, and two of float32 run as one TF32 product.
    """
    if pieces == 1 and jnp.float16 in (a.dtype, b.dtype):
        a, b = a.astype(jnp.float16), b.astype(jnp.float16)
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return product(a, b, acc)
    if a.dtype != jnp.float32 or b.dtype != jnp.float32:
        has_float16 = jnp.float16 in (a.dtype, b.dtype)
        tiles = (_bfloat16_pieces(x, 3 if has_float16 else pieces) for x in (a, b))
        products = list(itertools.product(*tiles))
        if has_float16 and pieces == 2:
            products.pop()  # of the last pieces: the least
        for x, y in reversed(products):  # small ones first: the tensor cores truncate sums
            acc = product(x, y, acc)
        assert acc is not None
        return acc
    tf32 = lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    # No CPU has the TF32 algorithms.
    precision = lax.Precision.HIGHEST if launch.is_interpreted() else tf32[pieces > 1]
    return product(a, b, acc, precision)


def dot_in_slots(a: jax.Array, b: jax.Array, *, pieces: Pieces, size: int) -> jax.Array:
    """a @ b of a float32 tile and a bfloat16 one; every number to be summed over is there twice.

    Along that axis of both tiles `size` numbers are followed by a copy of them. In the float32 tile
    the numbers become their first pieces, and the copies their second ones, so that one product
    adds up both. A third piece takes a product of its own.
    """
    is_left = a.dtype == jnp.float32
    x, axis = (a, 1) if is_left else (b, 0)
    first, second, *third = _bfloat16_pieces(x, pieces)
    tiles = [*(_in_slots(y, 0, axis, size) for y in third), _in_slots(first, second, axis, size)]
    return _sum_of_pairs(tiles, [b]) if is_left else _sum_of_pairs([a], tiles)


def scaled_dot(a: jax.Array, b: jax.Array, *, size: int | None = None) -> jax.Array:
    """a @ b of a float32 tile and a float16 one, to 23 bits; with `size` as `dot_in_slots`.

    Each float32 row of a, or column of b, is multiplied by a power of two that brings its largest
    number into [2**14, 2**15). So it is the sum of two float16 ones, but for 2**-39 of the largest.
    """
    is_left = a.dtype == jnp.float32
    x, axis = (a, 1) if is_left else (b, 0)
    bits = lax.bitcast_convert_type(jnp.abs(x).max(axis=axis, keepdims=True), jnp.uint32)
    exponent = jnp.maximum(bits & jnp.uint32(0x7F800000), jnp.uint32(15 << 23))
    down = lax.bitcast_convert_type(jnp.uint32(268 << 23) - exponent, jnp.float32)  # 2**(14 - e)
    up = lax.bitcast_convert_type(exponent - jnp.uint32(14 << 23), jnp.float32)
    first, second = float16_pieces(x * down)
    tiles = [second, first] if size is None else [_in_slots(first, second, axis, size)]
    return up * (_sum_of_pairs(tiles, [b]) if is_left else _sum_of_pairs([a], tiles))


def float16_pieces(x: jax.Array, rest_scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """x, at most 65,504, as a float16 tile, and what is left of it, times a scale, as another."""
    first = x.astype(jnp.float16)
    return first, ((x - first.astype(jnp.float32)) * rest_scale).astype(jnp.float16)


def sum_of_products(xs: list[jax.Array], ys: list[jax.Array], pieces: Pieces) -> jax.Array:
    """xs[0] @ ys[0] + xs[1] @ ys[1] + ..."""
    acc = dot(xs[0], ys[0], pieces=pieces)
    for x, y in zip(xs[1:], ys[1:], strict=True):
        acc = dot(x, y, acc, pieces=pieces)
    return acc


def product(
    a: jax.Array, b: jax.Array, acc: jax.Array | None = None, precision: Any = None
) -> jax.Array:
    """acc + a @ b of two tiles of one dtype, summed in float32."""
    out = jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
    return out if acc is None else acc + out  # one instruction: the tensor cores add


def _sum_of_pairs(xs: list[jax.Array], ys: list[jax.Array]) -> jax.Array:
    acc = None
    for x, y in itertools.product(xs, ys):
        acc = product(x, y, acc)
    assert acc is not None
    return acc


def _in_slots(first: jax.Array, second: jax.Array | int, axis: int, size: int) -> jax.Array:
    is_first = jnp.expand_dims(span(first.shape[axis]) & size == 0, 1 - axis)
    return jnp.where(is_first, first, second)


def _bfloat16_pieces(x: jax.Array, pieces: int) -> list[jax.Array]:
    """The upper half of each number's bits, that of the rest, ..., and the last rest, rounded."""
    if x.dtype == jnp.bfloat16:
        return [x]
    if x.dtype == jnp.float16:  # of 11 bits, which two pieces hold
        x, pieces = x.astype(jnp.float32), 2
    highs = []
    for _ in range(pieces - 1):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        highs.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*highs, x.astype(jnp.bfloat16)]
