"""The hardware's approximations on a GPU, jax.numpy where a kernel is interpreted."""

import math
import struct
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core import launch
from pallas_ops.core.backend import plgpu

Operand = jax.Array | float

LOG2E = math.log2(math.e)


def pinned(x: jax.Array) -> jax.Array:
    """A 32-bit x through an inline `mov`, which keeps its load in place (seen, not guaranteed).

    Without it Triton may move the read of a pipelined load into the only branch of a `lax.cond`
    that uses it. There the next load may have overwritten the buffer. LLVM, for its part, computes
    a branch's addresses ahead of the loop, in registers that the other branch then lacks.
    """
    return x if launch.is_interpreted() else ptx("mov.b32", x)


def fmax(x: jax.Array, y: Operand) -> jax.Array:
    """The maximum; of NaN and a number, the number. (In a kernel `jnp.maximum` drops NaN too.)"""
    return jnp.fmax(x, y) if launch.is_interpreted() else jnp.maximum(x, y)


def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, within 2 ulp of it; a result below 2**-126 is 0.

    Pallas lowers `jnp.exp2` to the library's, which takes three more instructions for results
    below 2**-126.
    """
    return jnp.exp2(x) if launch.is_interpreted() else ptx("ex2.approx.ftz.f32", x)


def log2(x: jax.Array) -> jax.Array:
    """The logarithm to base 2 in float32, within 2**-22 for x in [0.5, 2] and 2 ulp elsewhere.

    An x below 2**-126 is taken for 0.
    """
    return jnp.log2(x) if launch.is_interpreted() else ptx("lg2.approx.ftz.f32", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """The inverse in float32, within 1 ulp; infinite for an |x| below 2**-126."""
    return 1 / x if launch.is_interpreted() else ptx("rcp.approx.ftz.f32", x)


def multiply_add(x: Operand, y: Operand, z: Operand) -> jax.Array:
    """x * y + z, rounded once; Triton as XLA runs it does not fuse what `*` and `+` say."""
    if launch.is_interpreted():
        return jnp.asarray(x * y + z)
    return ptx("fma.rn.f32", x, y, z)


def ptx(instruction: str, *operands: Operand) -> jax.Array:
    """The instruction's result, elementwise; a Python number is a part of the instruction."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    places = iter(range(1, len(arrays) + 1))
    words = [f"${next(places)}" if isinstance(x, jax.Array) else _literal(x) for x in operands]
    xs = (jnp.broadcast_to(x, shape) for x in arrays)
    return assembly(f"{instruction} $0, {', '.join(words)};", *xs, dtype=arrays[0].dtype)


def assembly(text: str, *xs: jax.Array, dtype: Any, pack: int = 1) -> jax.Array:
    """Inline PTX that makes $0 of $1, $2, ...: of arrays of one shape, `pack` elements at once."""
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=xs,
        constraints=",".join(["=r", *"r" * len(xs)]),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(xs[0].shape, dtype)],
    )
    return result


def _literal(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"
