"""One chunk that is the whole axis, in segments: each starts from the sum of those before it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.ops.chunk_cumsum_decay.reference import previous
from pallas_ops.ops.chunk_cumsum_decay.tiles import Plan


def split(plan: Plan) -> Plan:
    """Segments of whole tiles; a shift within the one chunk is one along the sequence."""
    view = plan.view
    s = view.s.split(plan.c.num_segments, view.block_n)
    view = dataclasses.replace(view, s=s)
    return dataclasses.replace(plan, view=view, shift=plan.shift and "sequence")


def carries(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, segments, C], float32: for each segment the sum of all before it."""
    s, y = plan.view.s, x.astype(jnp.float32)
    y = y if plan.scale is None else y * plan.scale
    if plan.shift and not plan.shift_result:
        y = previous(y, 1, plan.view.reverse)
    y = jnp.pad(y, ((0, 0), (0, s.count * s.size - s.n), (0, 0)))
    totals = y.reshape(s.b, s.count, s.size, s.c).sum(axis=2)
    return previous(lax.cumsum(totals, 1, reverse=plan.view.reverse), 1, plan.view.reverse)
