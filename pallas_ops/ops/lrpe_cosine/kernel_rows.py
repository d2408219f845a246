"""Kernels that see one token at a time (variant "sequence"), and the cache of angles.

A program has a tile of adjacent rows and no loop. It computes the angles where it needs them: that
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
    load_at,
    rows_tile,
    run,
    store_at,
    tokens_tile,
)


def forward(plan: Plan, operands: Operands, out: jax.ShapeDtypeStruct) -> jax.Array:
    """The output [B, rows, 2, D]."""
    name = "lrpe_cosine"
    return run(_forward_kernel, plan, operands, [out], plan.rows_grid, name)[0]


def backward(plan: Plan, operands: Operands, dx: jax.ShapeDtypeStruct) -> jax.Array:
    """dx [B, rows, D]."""
    name = "lrpe_cosine_backward"
    return run(_backward_kernel, plan, operands, [dx], plan.rows_grid, name)[0]


def angles(
    plan: Plan, theta: jax.Array, offset: jax.Array | None, positions: jax.Array | None
) -> jax.Array:
    """All angles, in turns [(B,) N, H, D], of one head if they share theta."""
    batch = (plan.s.b,) if plan.per_batch else ()
    heads = theta.shape[0]
    out = jax.ShapeDtypeStruct((*batch, plan.s.n, heads, plan.s.d), jnp.float32)
    grid = (plan.blocks_n, plan.blocks_d, heads, *(batch or (1,)))
    operands = (theta, offset, positions)
    return run(_angles_kernel, plan, operands, [out], grid, "lrpe_cosine_angles")[0]


def _forward_kernel(
    x_ref: Ref,  # [B, rows, D]
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    cached_ref: Ref | None,  # [B, N, H, D]
    pivot_ref: Ref | None,  # [B, H, D], as share_ref
    share_ref: Ref | None,
    out_ref: Ref,  # [B, rows, 2, D]
    *,
    plan: Plan,
) -> None:
    block, block_d, b = map(pl.program_id, range(3))
    tile = rows_tile(plan, block, block_d)
    sin, cos = Angles(plan, theta_ref, offset_ref, positions_ref, cached_ref).sincos(tile, b)
    a = activate(plan.act, tile.load_x(x_ref, b), _column(tile, b, pivot_ref, share_ref))
    tile.store(out_ref, b, a * cos, 0)
    tile.store(out_ref, b, a * sin, 1)


def _backward_kernel(
    x_ref: Ref | None,  # [B, rows, D]
    dout_ref: Ref,  # [B, rows, 2, D]
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    cached_ref: Ref | None,  # [B, N, H, D]
    pivot_ref: Ref | None,  # [B, H, D], as share_ref and mean_ref
    share_ref: Ref | None,
    mean_ref: Ref | None,
    dx_ref: Ref,  # [B, rows, D]
    *,
    plan: Plan,
) -> None:
    block, block_d, b = map(pl.program_id, range(3))
    tile = rows_tile(plan, block, block_d)
    sin, cos = Angles(plan, theta_ref, offset_ref, positions_ref, cached_ref).sincos(tile, b)
    x = None if x_ref is None else tile.load_x(x_ref, b)
    da = tile.load_da(dout_ref, b, sin, cos)
    column = _column(tile, b, pivot_ref, share_ref, mean_ref)
    tile.store(dx_ref, b, pull(plan.act, x, da, column))


def _column(tile: Tile, b: jax.Array, *refs: Ref | None) -> Column:
    """The values of this tile's heads and features, from arrays [B, H, D]."""
    index = (b, tile.head, tile.feature)
    return Column(*(load_at(ref, index, tile.mask) for ref in refs if ref is not None))


def _angles_kernel(
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    angles_ref: Ref,  # [B, N, H, D]
    *,
    plan: Plan,
) -> None:
    block, block_d, head, b = map(pl.program_id, range(4))
    tile = tokens_tile(plan, block, head, block_d)
    turns = Angles(plan, theta_ref, offset_ref, positions_ref).turns(tile, b)
    index = Angles(plan, theta_ref, cached=angles_ref).cached_index(tile, b)
    store_at(angles_ref, index, turns, tile.mask)
