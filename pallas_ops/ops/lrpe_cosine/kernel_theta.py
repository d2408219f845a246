"""The gradient of theta, and angles that are computed once."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, whole
from pallas_ops.ops.lrpe_cosine.activation import activate
from pallas_ops.ops.lrpe_cosine.angles import Angles
from pallas_ops.ops.lrpe_cosine.config import choose_sums
from pallas_ops.ops.lrpe_cosine.tiles import Plan, Tile, place_of, plan_of
from pallas_ops.ops.lrpe_cosine.walk import Walk, launch_walk, parts_of


def dtheta(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    """The gradient of theta, in float32 whatever x is."""
    plan = plan_of(x, theta, positions, **static)
    plan = dataclasses.replace(plan, c=choose_sums(plan.s), precise=True)
    operands = (plan.view(x), plan.view(dout), theta, offset, positions, pivot, share)
    parts = [parts_of(plan, plan.parts)]
    (sums,) = launch_walk(_theta_kernel, plan, operands, parts, "lrpe_cosine_theta")
    return (_gather(sums.sum(axis=(0, 1)), theta.shape, plan.num_axes),)


def _gather(dtheta: jax.Array, theta: tuple[int, ...], num_axes: int) -> jax.Array:
    """What each feature asks of theta [H, D], added up where they share it."""
    (h, d), (heads, width) = dtheta.shape, theta
    if num_axes == 1 and width == 1:
        dtheta = dtheta.sum(axis=1, keepdims=True)
    else:
        dtheta = jnp.pad(dtheta, ((0, 0), (0, max(0, num_axes * width - d))))
        dtheta = dtheta[:, : num_axes * width].reshape(h, num_axes, width).sum(axis=1)
    return dtheta if heads == h else dtheta.sum(axis=0, keepdims=True)


def _theta_kernel(
    x_ref: Ref,  # [B, rows, D]
    dout_ref: Ref,  # [B, rows, 2, D]
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    pivot_ref: Ref | None,  # [B, H, D], as share_ref
    share_ref: Ref | None,
    sum_ref: Ref,  # [parts, B, H, D]
    *,
    plan: Plan,
) -> None:
    walk = Walk(plan)
    angles = Angles(plan, theta_ref, offset_ref, positions_ref)
    column = walk.column(pivot_ref, share_ref)

    def term(tile: Tile) -> jax.Array:
        sin, cos = angles.sincos(tile, walk.b)
        a = activate(plan.act, tile.load_x(x_ref, walk.b), column)
        dsin, dcos = tile.load(dout_ref, walk.b, 1), tile.load(dout_ref, walk.b, 0)
        return angles.position(tile, walk.b) * (a * (dsin * cos - dcos * sin))

    walk.store(sum_ref, walk.sum(term), walk.part)


def cache(
    plan: Plan, theta: jax.Array, offset: jax.Array | None, positions: jax.Array | None
) -> jax.Array:
    """All angles, in turns: [(B,) N, H, D], of one head if they share theta."""
    heads = theta.shape[0]
    batch = (plan.s.b,) if plan.per_batch else ()
    out = jax.ShapeDtypeStruct((*batch, plan.s.n, heads, plan.s.d), jnp.float32)
    operands = (theta, offset, positions)
    (angles,) = launch(
        partial(_cache_kernel, plan=plan),
        *operands,
        name="lrpe_cosine_angles",
        grid=(plan.tiles, plan.blocks_d, heads, *(batch or (1,))),
        in_specs=[None if y is None else whole(y) for y in operands],
        out_specs=[whole(out)],
        out_shape=[out],
        num_warps=plan.c.num_warps,
    )
    return angles


def _cache_kernel(
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    angles_ref: Ref,  # [B, N, H, D]
    *,
    plan: Plan,
) -> None:
    block, features, head, b = map(pl.program_id, range(4))
    tile = plan.tokens_tile(block, head, features)
    turns = Angles(plan, theta_ref, offset_ref, positions_ref).turns(tile, b)
    place = place_of(angles_ref, Angles(plan, theta_ref, cached=angles_ref).cached_index(tile, b))
    plgpu.store(place, turns, mask=tile.mask)
