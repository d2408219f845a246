"""A chunk of all the axis, in parts: chunks of their own, which start from the sum before them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.tiles import Ref
from pallas_ops.ops.chunk_cumsum_decay.reference import previous
from pallas_ops.ops.chunk_cumsum_decay.tiles import Chunks, Plan


def split(plan: Plan) -> Plan:
    """Parts of whole tiles; a shift within the one chunk is one along the sequence."""
    s, tile = plan.s, plan.c.block_n
    size = math.ceil(s.n / plan.c.num_parts / tile) * tile
    s = dataclasses.replace(s, chunk_size=size, chunks=math.ceil(s.n / size))
    return dataclasses.replace(plan, s=s, shift=plan.shift and "sequence")


def carries(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, parts, C], float32: the sum of all that each part's sum follows."""
    s, y = plan.s, x.astype(jnp.float32)
    y = y if plan.scale is None else y * plan.scale
    if plan.shift and not plan.late:
        y = previous(y, 1, plan.reverse)
    y = jnp.pad(y, ((0, 0), (0, s.chunks * s.chunk_size - s.n), (0, 0)))
    totals = y.reshape(s.b, s.chunks, s.chunk_size, s.c).sum(axis=2)
    return previous(lax.cumsum(totals, 1, reverse=plan.reverse), 1, plan.reverse)


def load_carries(chunks: Chunks, ref: Ref) -> jax.Array:
    mask = None if chunks.plan.all_slots else chunks.start < chunks.stop
    return chunks.load(ref, chunks.index, mask)
