"""Products of tiles on the tensor cores; float32 tiles are taken apart instead of rounded."""

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
    meets a bfloat16 one is taken as the sum of `pieces` bfloat16 tiles: one is within 2**-8 of it;
    two within 2**-16, enough for what is rounded to bfloat16 in the end; three hold all of its
    bits. Beside a float16 tile, which is split in two itself, it becomes three: float16 pieces
    could overflow. Of their six products, all but the least are enough for what is rounded to
    float16 (within 2**-21). Two float32 tiles run as three TF32 products (within 2**-21 too). With
    one piece a float32 tile that meets a float16 one is rounded to float16, and two of float32 run
    as one TF32 product.
    """
    if pieces == 1 and jnp.float16 in (a.dtype, b.dtype):
        a, b = a.astype(jnp.float16), b.astype(jnp.float16)
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return _product(a, b, acc)
    if a.dtype != jnp.float32 or b.dtype != jnp.float32:
        has_float16 = jnp.float16 in (a.dtype, b.dtype)
        tiles = [_bfloat16_pieces(x, 3 if has_float16 else pieces) for x in (a, b)]
        pairs = [(x, y) for x in tiles[0] for y in tiles[1]]
        if has_float16 and pieces == 2:
            pairs.pop()  # the least
        return _sum(pairs[::-1], acc)
    tf32 = lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    # No CPU has the TF32 algorithms.
    precision = lax.Precision.HIGHEST if launch.is_interpreted() else tf32[pieces > 1]
    return _product(a, b, acc, precision)


def dot_in_slots(a: jax.Array, b: jax.Array, *, pieces: Pieces, size: int) -> jax.Array:
    """a @ b of a float32 tile and one of 16 bits; every number to be summed over is there twice.

    Along that axis of both tiles `size` numbers are followed by a copy of them. In one tile the
    numbers become their first pieces, and the copies their second ones, so that one product adds up
    both. That is the float32 tile beside a bfloat16 one, and a third piece takes a product of its
    own. A float16 tile is split itself, and meets each of three pieces of the float32 tile.
    """
    is_left = a.dtype == jnp.float32
    x, y, axis = (a, b, 1) if is_left else (b, a, 0)
    if y.dtype == jnp.float16:
        xs = _bfloat16_pieces(x, 3)
        y = _in_slots(1 - axis, size, *_bfloat16_pieces(y, 2))
    else:
        first, second, *third = _bfloat16_pieces(x, pieces)
        xs = [_in_slots(axis, size, first, second), *(_in_slots(axis, size, z, 0) for z in third)]
    return _sum([(z, y) if is_left else (y, z) for z in reversed(xs)])


def dot_in_float16(a: jax.Array, b: jax.Array, acc: jax.Array) -> jax.Array:
    """acc + a @ b of a float32 tile and a float16 one, in two products; |a| is below 65,504.

    The error of a number of a is at most 2**-23 of it, plus 2**-25.
    """
    first = a.astype(jnp.float16)
    second = (a - first.astype(jnp.float32)).astype(jnp.float16)
    return _sum([(second, b), (first, b)], acc)


def sum_of_products(xs: list[jax.Array], ys: list[jax.Array], pieces: Pieces) -> jax.Array:
    """xs[0] @ ys[0] + xs[1] @ ys[1] + ..."""
    acc = dot(xs[0], ys[0], pieces=pieces)
    for x, y in zip(xs[1:], ys[1:], strict=True):
        acc = dot(x, y, acc, pieces=pieces)
    return acc


def _sum(pairs: list[tuple[jax.Array, jax.Array]], acc: jax.Array | None = None) -> jax.Array:
    """acc and the products of all pairs: small ones first, as the tensor cores truncate sums."""
    for x, y in pairs:
        acc = _product(x, y, acc)
    assert acc is not None
    return acc


def _product(a: jax.Array, b: jax.Array, acc: jax.Array | None, precision: Any = None) -> jax.Array:
    product = jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product  # one instruction: the tensor cores add


def _in_slots(axis: int, size: int, first: jax.Array, second: jax.Array | int) -> jax.Array:
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
