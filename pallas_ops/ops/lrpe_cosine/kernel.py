"""Launchers of lrpe_cosine.

A kernel sees one token at a time (`kernel_rows`) or walks the sequence (`kernel_walk`). theta's
gradient and the sums of a softmax over the sequence need a walk. A long sequence is walked in
several parts; XLA adds up the results of the parts. Once XLA has added up the sums of a softmax
over the sequence, kernels that see one token at a time do the rest.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core.card import current
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.lrpe_cosine import kernel_rows, kernel_walk
from pallas_ops.ops.lrpe_cosine.angles import per_feature
from pallas_ops.ops.lrpe_cosine.config import (
    SOFTMAX_SEQUENCE,
    STORING_WALK_TILES,
    Params,
    Plan,
    choose,
    choose_walk,
    plan_of,
    storing_stages,
)
from pallas_ops.ops.lrpe_cosine.tiles import Operands


def forward(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    *,
    save: bool,
    p: Params,
) -> tuple[jax.Array, ...]:
    """The output [B, .., 2, D]; to save, the softmax's pivot and share, and the cached angles.

    The softmax's pivot and share are given if they are known.
    """
    plan = plan_of(p, x, theta.shape[1])
    operands = Operands(theta=_spread(plan, theta), offset=offset, positions=positions)
    cached = _angles(plan, operands) if plan.c.cache_angles else None
    if pivot is None and _has_parts(plan):
        pivot, total = softmax(x, p=p)
        share = 1 / total
    if pivot is not None:
        plan = replace(plan, c=choose(plan.s))
    operands = operands._replace(x=plan.view(x), cached=cached, pivot=pivot, share=share)
    out = [_of_rows(plan, x.dtype, 2)]
    if plan.walks and p.act == SOFTMAX_SEQUENCE:
        out += [_per_feature(plan)] * 2
    result, *computed = _run(_kernels(plan).forward, plan, operands, out)
    result = result.reshape(*x.shape[:3], 2, plan.s.d)
    saved = (*computed, pivot, share, cached) if save else ()
    return result, *(y for y in saved if y is not None)


def softmax(x: jax.Array, *, p: Params) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of the softmax over the sequence [B, H, D]."""
    plan = plan_of(p, x)
    operands, out = Operands(plan.view(x)), [_per_feature(plan, plan.parts)] * 2
    pivots, totals = _run(kernel_walk.softmax, plan, operands, out, "_softmax")
    pivot = pivots.max(axis=0, keepdims=True)
    return pivot[0], (totals * jnp.exp(pivots - pivot)).sum(axis=0)


def mean(
    x: jax.Array | None, dout: jax.Array, theta: jax.Array, *others: jax.Array | None, p: Params
) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D]; arguments as for `backward`."""
    plan, operands = _plan_backward(p, x, dout, theta, *others)
    out = [_per_feature(plan, plan.parts)]
    return (_run(kernel_walk.mean, plan, operands, out, "_mean")[0].sum(axis=0),)


def backward(
    x: jax.Array | None, dout: jax.Array, theta: jax.Array, *others: jax.Array | None, p: Params
) -> tuple[jax.Array]:
    """dx, from dout [B, .., 2, D]; x is given if there is an activation.

    `others` are the `Operands` from offset to mean.
    """
    plan, operands = _plan_backward(p, x, dout, theta, *others)
    operands = operands._replace(theta=_spread(plan, theta))
    if operands.mean is None and _has_parts(plan):
        operands = operands._replace(mean=mean(x, dout, theta, *others, p=p)[0])
    if operands.mean is not None:
        plan = replace(plan, c=choose(plan.s))
    plan = replace(plan, walk_tiles=STORING_WALK_TILES)
    out = [_of_rows(plan, dout.dtype)]
    (dx,) = _run(_kernels(plan).backward, plan, operands, out, "_backward")
    return (dx.reshape(*dout.shape[:3], plan.s.d),)


def gradients(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    *others: jax.Array | None,
    with_x: bool,
    p: Params,
) -> tuple[jax.Array, ...]:
    """dx, if asked for, and the gradient of theta, in one pass; arguments as for `backward`."""
    plan, operands = _plan_backward(p, x, dout, theta, *others)
    plan = replace(plan, c=choose_walk(plan.s, p.act, current()))
    if with_x and operands.mean is None and _has_parts(plan):
        operands = operands._replace(mean=mean(x, dout, theta, *others, p=p)[0])
    stages = storing_stages(plan.c, dout.dtype.itemsize, current())
    plan = replace(
        plan,
        c=replace(plan.c, num_stages=stages),
        precise=True,  # the gradient of theta is float32, whatever the dtype of x
        walk_tiles=STORING_WALK_TILES,
    )
    moves, both = (with_x, True), (_of_rows(plan, dout.dtype), _per_feature(plan, plan.parts))
    body, out = partial(kernel_walk.backward, moves=moves), [*itertools.compress(both, moves)]
    *dx, sums = _run(body, plan, operands, out, "_gradients" if with_x else "_theta")

    def expand(theta: jax.Array) -> jax.Array:
        theta = jnp.broadcast_to(theta, (plan.s.h, plan.width))
        return per_feature(theta, p.num_axes, plan.s.d)

    (dtheta,) = jax.linear_transpose(expand, theta)(sums.sum(axis=(0, 1)))
    return *(y.reshape(x.shape) for y in dx), dtheta


def _plan_backward(
    p: Params, x: jax.Array | None, dout: jax.Array, theta: jax.Array, *others: jax.Array | None
) -> tuple[Plan, Operands]:
    """The plan and the operands of a backward launch, x and dout with one axis of rows."""
    plan = plan_of(p, dout, theta.shape[1])
    x = None if x is None else plan.view(x)
    return plan, Operands(x, plan.view(dout), theta, *others)


def _run(
    body: Callable[..., None],
    plan: Plan,
    operands: Operands,
    out: Sequence[jax.ShapeDtypeStruct],
    name: str = "",
    grid: tuple[int, ...] | None = None,
) -> list[jax.Array]:
    """Launches `body(operands, *results, plan=plan)` on refs; each program sees whole arrays."""

    def kernel(*refs: Ref | None) -> None:
        count = len(operands)
        body(Operands(*refs[:count]), *refs[count:], plan=plan)

    return launch(
        kernel,
        *operands,
        name=f"lrpe_cosine{name}",
        grid=grid or plan.grid,
        out_shape=out,
        num_warps=plan.c.num_warps,
    )


def _angles(plan: Plan, operands: Operands) -> jax.Array:
    """All angles, in turns [(B,) N, H, D], of one head if they share theta."""
    batch = (plan.s.b,) if plan.p.per_batch else ()
    heads = operands.theta.shape[0]
    out = jax.ShapeDtypeStruct((*batch, plan.s.n, heads, plan.s.d), jnp.float32)
    grid = (plan.blocks_n, plan.blocks_d, heads, *(batch or (1,)))
    return _run(kernel_rows.angles, plan, operands, [out], "_angles", grid)[0]


def _of_rows(plan: Plan, dtype: Any, *halves: int) -> jax.ShapeDtypeStruct:
    """dx [B, rows, D], or the output [B, rows, 2, D]."""
    return jax.ShapeDtypeStruct((plan.s.b, plan.rows, *halves, plan.s.d), dtype)


def _per_feature(plan: Plan, *parts: int) -> jax.ShapeDtypeStruct:
    """One value per feature [(parts,) B, H, D]."""
    return jax.ShapeDtypeStruct((*parts, plan.s.b, plan.s.h, plan.s.d), jnp.float32)


def _kernels(plan: Plan) -> ModuleType:
    """The module of the variant's kernels."""
    return kernel_walk if plan.walks else kernel_rows


def _has_parts(plan: Plan) -> bool:
    """Whether separate launches compute the sums of a softmax over the sequence."""
    return plan.p.act == SOFTMAX_SEQUENCE and plan.parts > 1


def _spread(plan: Plan, theta: jax.Array) -> jax.Array:
    """theta, with one column per feature where such a copy pays.

    With 43 features per axis, say, the rows of theta are not aligned, and kernels load its elements
    one by one. The rows of the copy are aligned. Making it takes 2 us.
    """
    if not plan.unaligned or not plan.s.is_large:
        return theta
    return per_feature(theta, plan.p.num_axes, plan.s.d)
