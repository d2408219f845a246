"""What programs of one launch tell those that start after them.

A word is told once, as the bits of a float32 where there was 0: who reads it sees nothing yet, or
all of it, so that it takes neither locks nor an order of stores. Programs start in the order of
their numbers, along the grid's first axis first: who waits for lower ones does not wait in vain.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.tiles import Ref

Index = tuple[jax.Array, ...]


def tell(ref: Ref, index: Index, x: jax.Array, mask: jax.Array | None = None) -> None:
    """Stores x, whose zeros are negative from here on."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, -0.0, x), jnp.int32)
    plgpu.store(ref.at[index], bits, mask=mask)


def told(
    refs: tuple[Ref, ...], index: Index, mask: jax.Array, others: tuple[float, ...]
) -> tuple[jax.Array, ...]:
    """What was told at `index` of each ref, once all was; where the mask is false, `others`.

    A tile of at least a number a thread: of fewer, several threads load the same, not all of which
    need to see the same.
    """

    def look(_: Any) -> list[jax.Array]:
        at = [ref.at[index] for ref in refs]
        return [plgpu.load(x, mask=mask, other=jnp.int32(1), volatile=True) for x in at]

    def lacks(words: list[jax.Array]) -> jax.Array:
        lacking = [jnp.where(x == 0, 1, 0) for x in words]
        return sum(lacking[1:], lacking[0]).max() > 0

    words: list[jax.Array] = lax.while_loop(lacks, look, look(None))
    floats = (lax.bitcast_convert_type(x, jnp.float32) for x in words)
    return tuple(jnp.where(mask, x, y) for x, y in zip(floats, others, strict=True))
