"""The gradients of theta and x in one pass, and angles that are computed once."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, whole
from pallas_ops.ops.lrpe_cosine import kernel_block
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_SEQUENCE
from pallas_ops.ops.lrpe_cosine.angles import Angles
from pallas_ops.ops.lrpe_cosine.config import STAGES, choose_walk
from pallas_ops.ops.lrpe_cosine.tiles import Plan, place_of, plan_of
from pallas_ops.ops.lrpe_cosine.walk import Operands


def gradients(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    *,
    with_x: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and the gradient of theta, in float32 whatever x is."""
    columns = plan_of(x, theta, positions, **static)
    columns = dataclasses.replace(columns, c=choose_walk(columns.s, columns.act))
    config = dataclasses.replace(columns.c, num_stages=STAGES)
    plan = dataclasses.replace(columns, c=config, precise=True)
    view = plan.view(x)
    operands: Operands = (view, plan.view(dout), theta, offset, positions, None, pivot, share)
    mean = None
    if with_x and plan.act == SOFTMAX_SEQUENCE and plan.parts > 1:
        mean = kernel_block.mean(columns, operands)
    like_x = jax.ShapeDtypeStruct(view.shape, x.dtype)
    *dx, sums = kernel_block.backward(plan, (*operands, mean), like_x, moves=(with_x, True))
    dtheta = _gather(sums.sum(axis=(0, 1)), theta.shape, plan.num_axes)
    return *(y.reshape(x.shape) for y in dx), dtheta


def _gather(dtheta: jax.Array, theta: tuple[int, ...], num_axes: int) -> jax.Array:
    """What each feature asks of theta [H, D], added up where they share it."""
    (h, d), (heads, width) = dtheta.shape, theta
    if num_axes == 1 and width == 1:
        dtheta = dtheta.sum(axis=1, keepdims=True)
    else:
        dtheta = jnp.pad(dtheta, ((0, 0), (0, max(0, num_axes * width - d))))
        dtheta = dtheta[:, : num_axes * width].reshape(h, num_axes, width).sum(axis=1)
    return dtheta if heads == h else dtheta.sum(axis=0, keepdims=True)


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
