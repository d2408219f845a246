"""Features of eight bits, loaded as words of two and widened in registers.

A word's two bytes go to two tiles: the features at even places, and those at odd ones. A product
over all features is the sum of one over each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import launch
from pallas_ops.core.fastmath import assembly
from pallas_ops.core.tiles import stack, unstack

# One byte of each of two words ($1) as two bfloat16 ($0). In bfloat16, 0x4300 is 128, with seven
# bits of mantissa below it: (0x4300 | bits 0 to 6) - (0x4300 | bit 7), whose second term is 128 or
# 256, is the signed byte.
_INT8 = """{
.reg .b32 byte, value, sign, minus;
shr.u32 byte, $1, %d;
lop3.b32 value, byte, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, byte, 0x00800080, 0x43004300, 0xEA;
mov.b32 minus, 0xBF80BF80;
fma.rn.bf16x2 $0, sign, minus, value;
}"""
_FLOAT8 = """{
.reg .b16 first, second, byte<4>;
.reg .b32 pair<2>;
.reg .f32 x<2>;
mov.b32 {first, second}, $1;
cvt.rn.f16x2.e4m3x2 pair0, first;
cvt.rn.f16x2.e4m3x2 pair1, second;
mov.b32 {byte0, byte1}, pair0;
mov.b32 {byte2, byte3}, pair1;
cvt.f32.f16 x0, byte%d;
cvt.f32.f16 x1, byte%d;
cvt.rn.bf16x2.f32 $0, x1, x0;
}"""
_WIDEN = {"int8": (_INT8 % 0, _INT8 % 8), "float8_e4m3fn": (_FLOAT8 % (0, 2), _FLOAT8 % (1, 3))}


def pack(x: jax.Array) -> jax.Array:
    """[..., 2 n] of eight bits as n words."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int16)


def deinterleave(x: jax.Array, count: int) -> list[jax.Array]:
    """Every `count`-th column of [rows, features], from columns 0, 1, .. on: `count` tiles."""
    return unstack(x.reshape(len(x), -1, count))


def interleave(xs: list[jax.Array]) -> jax.Array:
    """The inverse of `deinterleave`."""
    return stack(xs).reshape(len(xs[0]), -1)


def widen(x: jax.Array, dtype: str) -> list[jax.Array]:
    """Words as their first bytes and their second ones, in bfloat16, exactly."""
    if launch.is_interpreted():
        return unstack(lax.bitcast_convert_type(x, jnp.dtype(dtype)).astype(jnp.bfloat16))
    return [assembly(ptx, x, dtype=jnp.bfloat16, pack=2) for ptx in _WIDEN[dtype]]
