"""Kernels that see one token at a time (variant "sequence"), and the cache of angles.

A program has a tile of adjacent rows and no loop. It computes the angles where it needs them, which
takes about 13 instructions an element.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core.tiles import Ref
from pallas_ops.ops.lrpe_cosine.activation import Column, activate, pull
from pallas_ops.ops.lrpe_cosine.config import Plan
from pallas_ops.ops.lrpe_cosine.tiles import (
    Angles,
    Operands,
    Tile,
    load_column,
    rows_tile,
    run,
    store_at,
    tokens_tile,
)


def forward(plan: Plan, operands: Operands) -> list[jax.Array]:
    """The output [B, rows, 2, D]."""
    out = jax.ShapeDtypeStruct((plan.s.b, plan.rows, 2, plan.s.d), operands.x.dtype)
    return run(_forward_kernel, plan, operands, [out], plan.rows_grid, "lrpe_cosine")


def backward(plan: Plan, operands: Operands) -> list[jax.Array]:
    """dx [B, rows, D]."""
    dx = jax.ShapeDtypeStruct((plan.s.b, plan.rows, plan.s.d), operands.dout.dtype)
    return run(_backward_kernel, plan, operands, [dx], plan.rows_grid, "lrpe_cosine_backward")


def angles(plan: Plan, operands: Operands) -> jax.Array:
    """All angles, in turns [(B,) N, H, D], of one head if they share theta."""
    batch = (plan.s.b,) if plan.per_batch else ()
    heads = operands.theta.shape[0]
    out = jax.ShapeDtypeStruct((*batch, plan.s.n, heads, plan.s.d), jnp.float32)
    grid = (plan.blocks_n, plan.blocks_d, heads, *(batch or (1,)))
    return run(_angles_kernel, plan, operands, [out], grid, "lrpe_cosine_angles")[0]


def _forward_kernel(refs: Operands, out_ref: Ref, *, plan: Plan) -> None:
    tile = rows_tile(plan)
    sin, cos = Angles(plan, refs).sincos(tile)
    a = activate(plan.act, tile.load_x(refs.x), _column(refs, tile))
    tile.store(out_ref, a * cos, 0)
    tile.store(out_ref, a * sin, 1)


def _backward_kernel(refs: Operands, dx_ref: Ref, *, plan: Plan) -> None:
    tile = rows_tile(plan)
    sin, cos = Angles(plan, refs).sincos(tile)
    x = None if refs.x is None else tile.load_x(refs.x)
    da = tile.load_da(refs.dout, sin, cos)
    tile.store(dx_ref, pull(plan.act, x, da, _column(refs, tile)))


def _column(refs: Operands, tile: Tile) -> Column:
    """The values that the softmax over the sequence has for the tile's heads and features."""
    return load_column(refs, (tile.b, tile.head, tile.feature), tile.mask)


def _angles_kernel(refs: Operands, angles_ref: Ref, *, plan: Plan) -> None:
    block, block_d, head, b = map(pl.program_id, range(4))
    tile = tokens_tile(plan, b, block, head, block_d)
    angles = Angles(plan, refs)
    store_at(angles_ref, angles.cached_index(tile), angles.turns(tile), tile.mask)
