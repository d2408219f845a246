"""Launchers of lrpe_cosine.

A kernel sees one token at a time (`kernel_rows`) or walks the sequence (`kernel_walk`). theta's
gradient and the sums of a softmax over the sequence need a walk. A long sequence is walked in
several parts; XLA adds up the results of the parts. Once XLA has added up the sums of a softmax
over the sequence, kernels that see one token at a time do the rest.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core.card import current
from pallas_ops.ops.lrpe_cosine import kernel_rows, kernel_walk
from pallas_ops.ops.lrpe_cosine.config import (
    SOFTMAX_SEQUENCE,
    Plan,
    choose,
    choose_walk,
    plan_of,
    storing_stages,
)
from pallas_ops.ops.lrpe_cosine.tiles import Operands, spread_theta


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *given: jax.Array | None,
    save: bool,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """The output [B, .., 2, D]; to save, the softmax's pivot and share, and the cached angles.

    `given` are the pivot and share, if they are known.
    """
    plan = plan_of(x, theta, positions, **static)
    operands = Operands(theta=spread_theta(plan, theta), offset=offset, positions=positions)
    cached = [kernel_rows.angles(plan, operands)] if plan.c.cache_angles else []
    operands = operands._replace(x=plan.view(x), cached=cached[0] if cached else None)
    columns = [column for column in given if column is not None]
    if columns or _has_parts(plan):
        columns = columns or kernel_walk.softmax(plan, operands.x)
        operands = operands._replace(pivot=columns[0], share=columns[1])
        plan = replace(plan, c=choose(plan.s))
    result, *more_columns = _kernels(plan).forward(plan, operands)
    result = result.reshape(*x.shape[:3], 2, plan.s.d)
    return (result, *columns, *more_columns, *cached) if save else (result,)


def softmax(x: jax.Array, **static: Any) -> tuple[jax.Array, ...]:
    """The pivot and total of the softmax over the sequence [B, H, D]."""
    theta: Any = jax.ShapeDtypeStruct((1, 1), jnp.float32)  # there are no angles
    plan = plan_of(x, theta, None, **static)
    pivot, share = kernel_walk.softmax(plan, plan.view(x))
    return pivot, 1 / share


def mean(
    x: jax.Array, dout: jax.Array, *others: jax.Array | None, **static: Any
) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D]; arguments as for `backward`."""
    plan, operands = _plan_backward(x, dout, *others, **static)
    operands = operands._replace(theta=spread_theta(plan, operands.theta))
    return (kernel_walk.mean(plan, operands),)


def backward(
    x: jax.Array | None, dout: jax.Array, *others: jax.Array | None, **static: Any
) -> tuple[jax.Array]:
    """dx, from dout [B, .., 2, D]; x is given if there is an activation.

    `others` are the `Operands` from theta to mean.
    """
    plan, operands = _plan_backward(x, dout, *others, **static)
    operands = operands._replace(theta=spread_theta(plan, operands.theta))
    if operands.mean is not None or _has_parts(plan):
        operands = _with_mean(plan, operands)
        plan = replace(plan, c=choose(plan.s))
    (dx,) = _kernels(plan).backward(plan, operands)
    return (dx.reshape(*dout.shape[:3], plan.s.d),)


def gradients(
    x: jax.Array, dout: jax.Array, *others: jax.Array | None, with_x: bool, **static: Any
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and the gradient of theta, in one pass; arguments as for `backward`."""
    plan, operands = _plan_backward(x, dout, *others, **static)
    plan = replace(plan, c=choose_walk(plan.s, plan.act, current()))
    if with_x and _has_parts(plan):
        operands = _with_mean(plan, operands)
    # The gradient of theta is float32, whatever the dtype of x.
    num_stages = storing_stages(plan.c, dout.dtype.itemsize, current())
    plan = replace(plan, c=replace(plan.c, num_stages=num_stages), precise=True)
    *dx, sums = kernel_walk.backward(plan, operands, moves=(with_x, True))
    dtheta = _gather(sums.sum(axis=(0, 1)), operands.theta.shape, plan.num_axes)
    return *(y.reshape(x.shape) for y in dx), dtheta


def _plan_backward(
    x: jax.Array | None, dout: jax.Array, *others: jax.Array | None, **static: Any
) -> tuple[Plan, Operands]:
    """The plan and the operands of a backward launch, x and dout with one axis of rows."""
    operands = Operands(x, dout, *others)
    plan = plan_of(dout, operands.theta, operands.positions, **static)
    x = None if x is None else plan.view(x)
    return plan, operands._replace(x=x, dout=plan.view(dout))


def _with_mean(plan: Plan, operands: Operands) -> Operands:
    if operands.mean is not None:
        return operands
    return operands._replace(mean=kernel_walk.mean(plan, operands))


def _kernels(plan: Plan) -> ModuleType:
    """The module of the variant's kernels."""
    return kernel_walk if plan.c.variant == "block" else kernel_rows


def _has_parts(plan: Plan) -> bool:
    """Whether separate launches compute the sums of a softmax over the sequence."""
    return plan.act == SOFTMAX_SEQUENCE and plan.parts > 1


def _gather(dtheta: jax.Array, theta: tuple[int, ...], num_axes: int) -> jax.Array:
    """The gradient of theta. `dtheta` is the gradient per head and feature [H, D]."""
    (h, d), (heads, width) = dtheta.shape, theta
    if num_axes == 1 and width == 1:
        dtheta = dtheta.sum(axis=1, keepdims=True)
    else:
        dtheta = jnp.pad(dtheta, ((0, 0), (0, max(0, num_axes * width - d))))
        dtheta = dtheta[:, : num_axes * width].reshape(h, num_axes, width).sum(axis=1)
    return dtheta if heads == h else dtheta.sum(axis=0, keepdims=True)
