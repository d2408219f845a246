"""Launchers of lrpe_cosine.

A kernel sees one token at a time (`kernel_rows`) or walks the sequence (`kernel_walk`). theta's
gradient and the sums of a softmax over the sequence need a walk. A long sequence is walked in
several parts; XLA adds up the results of the parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.ops.lrpe_cosine import kernel_rows, kernel_walk
from pallas_ops.ops.lrpe_cosine.config import (
    SOFTMAX_SEQUENCE,
    STORING_WALK_STAGES,
    Plan,
    choose,
    choose_walk,
    plan_of,
)
from pallas_ops.ops.lrpe_cosine.tiles import spread_theta


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    save: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """The output [B, .., 2, D]; to save: the softmax's pivot and share, the cached angles."""
    plan = plan_of(x, theta, positions, **static)
    theta = spread_theta(plan, theta)
    view = plan.view(x)
    where = (theta, offset, positions)
    cached = kernel_rows.angles(plan, *where) if plan.c.cache_angles else None
    columns: list[jax.Array] = []
    if _has_parts(plan):
        columns = [*kernel_walk.softmax(plan, view)]
        plan = _by_rows(plan)
    out = jax.ShapeDtypeStruct((*view.shape[:2], 2, plan.s.d), x.dtype)
    if plan.c.variant == "block":
        result, *columns = kernel_walk.forward(plan, (view, *where, cached), out)
    else:
        result = kernel_rows.forward(plan, (view, *where, cached, *(columns or (None, None))), out)
    saved = columns if cached is None else [*columns, cached]
    return result.reshape(*x.shape[:3], 2, plan.s.d), *(saved if save else ())


def backward(
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    cached: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    """dx, from dout [B, .., 2, D] and, if there is an activation, x."""
    plan = plan_of(dout, theta, positions, **static)
    theta = spread_theta(plan, theta)
    views = (None if x is None else plan.view(x), plan.view(dout))
    operands = (*views, theta, offset, positions, cached, pivot, share)
    mean = None
    if _has_parts(plan):
        mean = kernel_walk.mean(plan, operands)
        plan = _by_rows(plan)
    dx = jax.ShapeDtypeStruct((plan.s.b, plan.rows, plan.s.d), dout.dtype)
    if plan.c.variant == "block":
        (result,) = kernel_walk.backward(plan, (*operands, None), dx, moves=(True, False))
    else:
        result = kernel_rows.backward(plan, (*operands, mean), dx)
    return (result.reshape(*dout.shape[:3], plan.s.d),)


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
    """dx, if asked for, and the gradient of theta, in float32 whatever x is, in one pass."""
    plan = plan_of(x, theta, positions, **static)
    plan = dataclasses.replace(plan, c=choose_walk(plan.s, plan.act))
    view = plan.view(x)
    operands = (view, plan.view(dout), theta, offset, positions, None, pivot, share)
    mean = kernel_walk.mean(plan, operands) if with_x and _has_parts(plan) else None
    config = dataclasses.replace(plan.c, num_stages=STORING_WALK_STAGES)
    plan = dataclasses.replace(plan, c=config, precise=True)
    dx = jax.ShapeDtypeStruct(view.shape, x.dtype)
    *found, sums = kernel_walk.backward(plan, (*operands, mean), dx, moves=(with_x, True))
    dtheta = _gather(sums.sum(axis=(0, 1)), theta.shape, plan.num_axes)
    return *(y.reshape(x.shape) for y in found), dtheta


def _has_parts(plan: Plan) -> bool:
    """Whether a softmax over the sequence has its sums from launches of their own."""
    return plan.act == SOFTMAX_SEQUENCE and plan.parts > 1


def _by_rows(plan: Plan) -> Plan:
    """The plan for the rows, once the sums of the softmax are known."""
    return dataclasses.replace(plan, c=choose(plan.s))


def _gather(dtheta: jax.Array, theta: tuple[int, ...], num_axes: int) -> jax.Array:
    """The gradient per head and feature [H, D], summed over those that share an entry of theta."""
    (h, d), (heads, width) = dtheta.shape, theta
    if num_axes == 1 and width == 1:
        dtheta = dtheta.sum(axis=1, keepdims=True)
    else:
        dtheta = jnp.pad(dtheta, ((0, 0), (0, max(0, num_axes * width - d))))
        dtheta = dtheta[:, : num_axes * width].reshape(h, num_axes, width).sum(axis=1)
    return dtheta if heads == h else dtheta.sum(axis=0, keepdims=True)
