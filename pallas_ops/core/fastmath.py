"""The hardware's approximations on a GPU, jax.numpy where a kernel is interpreted."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import launch


def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, within 2 ulp of it; a result below 2**-126 is 0.

    Pallas lowers `jnp.exp2` to the library's, which takes three more instructions for results
    below 2**-126.
    """
    if launch.is_interpreted():
        return jnp.exp2(x)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result
