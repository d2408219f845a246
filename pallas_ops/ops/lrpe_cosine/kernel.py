"""Launchers of lrpe_cosine.

A program has one tile of rows and no loop (`kernel_rows`), or walks the sequence (`kernel_walk`).
theta's gradient and the sums of a softmax over the sequence need a walk. A long sequence is walked
in several parts, whose results XLA adds up. `kernel_rows` then computes the output and dx of such
a softmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core.card import current
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.lrpe_cosine import kernel_rows, kernel_walk
from pallas_ops.ops.lrpe_cosine.angles import per_feature
from pallas_ops.ops.lrpe_cosine.config import (
    STORING_WALK_TILES,
    Operands,
    Params,
    Plan,
    choose,
    choose_walk,
    plan_of,
    storing_stages,
)
from pallas_ops.scan.segments import sum_pairs


def forward(o: Operands, *, p: Params, save: bool = False) -> tuple[jax.Array, ...]:
    """The output [B, .., 2, D]; to save, the softmax's pivot and share, and the cached angles."""
    plan = plan_of(p, o)
    o = o._replace(theta=_spread(plan, o.theta))
    if p.caches_angles:
        o = o._replace(cached=_angles(plan, o))
    if o.pivot is None and _has_parts(plan):
        pivot, total = softmax(Operands(o.x), p=p)
        o = o._replace(pivot=pivot, share=1 / total)
    if o.pivot is not None:
        plan = replace(plan, c=choose(plan.s))
    out = [_rows_struct(plan, o.x.dtype, 2)]
    if plan.walks and p.over_sequence:
        out += [_feature_struct(plan)] * 2
    body = kernel_walk.forward if plan.walks else kernel_rows.forward
    result, *computed = _run(body, plan, o, out)
    saved = (*computed, o.pivot, o.share, o.cached) if save else ()
    return plan.unview(result), *(y for y in saved if y is not None)


def softmax(o: Operands, *, p: Params) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of the softmax over the sequence [B, H, D]."""
    plan = plan_of(p, o)
    out = [_feature_struct(plan, plan.parts)] * 2
    pivots, totals = _run(kernel_walk.softmax, plan, o, out, "_softmax")
    return sum_pairs((pivots, totals), axis=0)


def mean(o: Operands, *, p: Params) -> tuple[jax.Array]:
    """The sum of a * da over the sequence [B, H, D]; operands as for `backward`."""
    plan = plan_of(p, o)
    out = [_feature_struct(plan, plan.parts)]
    return (_run(kernel_walk.mean, plan, o, out, "_mean")[0].sum(axis=0),)


def backward(o: Operands, *, p: Params) -> tuple[jax.Array]:
    """dx. `o.x` is there if there is an activation, `o.mean` if another launch computed it."""
    plan = plan_of(p, o)
    if o.mean is None and _has_parts(plan):
        o = o._replace(mean=mean(o, p=p)[0])
    if o.mean is not None:
        plan = replace(plan, c=choose(plan.s))
    plan = replace(plan, walk_tiles=STORING_WALK_TILES)
    o, out = o._replace(theta=_spread(plan, o.theta)), [_rows_struct(plan, o.dout.dtype)]
    body = kernel_walk.backward if plan.walks else kernel_rows.backward
    return (plan.unview(*_run(body, plan, o, out, "_backward")),)


def gradients(o: Operands, *, p: Params, with_x: bool = True) -> tuple[jax.Array, ...]:
    """dx, if asked for, and the gradient of theta, in one pass; operands as for `backward`."""
    plan = plan_of(p, o)
    c = choose_walk(plan.s, p.act, current())
    c = replace(c, num_stages=storing_stages(c, o.dout.dtype.itemsize, current()))
    # The gradient of theta is float32, whatever the dtype of x.
    plan = replace(plan, c=c, precise=True, walk_tiles=STORING_WALK_TILES)
    if with_x and o.mean is None and _has_parts(plan):
        o = o._replace(mean=mean(o, p=p)[0])
    out = [_rows_struct(plan, o.dout.dtype)] * with_x + [_feature_struct(plan, plan.parts)]
    body = partial(kernel_walk.backward, wanted=(with_x, True))
    name = "_gradients" if with_x else "_theta"
    *dx, sums = _run(body, plan, o, out, name)

    def expand(theta: jax.Array) -> jax.Array:
        theta = jnp.broadcast_to(theta, (plan.s.h, plan.width))
        return per_feature(theta, p.num_axes, plan.s.d)

    (dtheta,) = jax.linear_transpose(expand, o.theta)(sums.sum(axis=(0, 1)))
    return *map(plan.unview, dx), dtheta


saving, theta = partial(forward, save=True), partial(gradients, with_x=False)


def _run(
    body: Callable[..., None],
    plan: Plan,
    operands: Operands,
    out: Sequence[jax.ShapeDtypeStruct],
    name: str = "",
    grid: tuple[int, ...] | None = None,
) -> list[jax.Array]:
    """Launches `body(operands, *results, plan=plan)` on refs; each program sees whole arrays.

    x and dout have one axis of rows there.
    """
    x, dout, *others = operands

    def kernel(*refs: Ref | None) -> None:
        count = len(operands)
        body(Operands(*refs[:count]), *refs[count:], plan=plan)

    return launch(
        kernel,
        *(None if y is None else plan.view(y) for y in (x, dout)),
        *others,
        name=f"lrpe_cosine{name}",
        grid=grid or plan.grid,
        out_shape=out,
        num_warps=plan.c.num_warps,
    )


def _angles(plan: Plan, operands: Operands) -> jax.Array:
    """All angles, in turns [(B,) N, H, D]; one head if all heads share theta."""
    batch = (plan.s.b,) if plan.p.per_batch else ()
    heads = operands.theta.shape[0]
    out = jax.ShapeDtypeStruct((*batch, plan.s.n, heads, plan.s.d), jnp.float32)
    grid = (plan.blocks_n, plan.blocks_d, heads, *(batch or (1,)))
    own = Operands(theta=operands.theta, offset=operands.offset, positions=operands.positions)
    return _run(kernel_rows.angles, plan, own, [out], "_angles", grid)[0]


def _rows_struct(plan: Plan, dtype: Any, *halves: int) -> jax.ShapeDtypeStruct:
    """dx [B, rows, D], or the output [B, rows, 2, D]."""
    return jax.ShapeDtypeStruct((plan.s.b, plan.rows, *halves, plan.s.d), dtype)


def _feature_struct(plan: Plan, *parts: int) -> jax.ShapeDtypeStruct:
    """One value per feature [(parts,) B, H, D]."""
    return jax.ShapeDtypeStruct((*parts, plan.s.b, plan.s.h, plan.s.d), jnp.float32)


def _has_parts(plan: Plan) -> bool:
    """Whether separate launches compute the sums of a softmax over the sequence."""
    return plan.p.over_sequence and plan.parts > 1


def _spread(plan: Plan, theta: jax.Array) -> jax.Array:
    """theta, with one column per feature where such a copy pays.

    With 43 features per axis, say, the rows of theta are not aligned, and kernels load its elements
    one by one. The rows of the copy are aligned. Making it takes 2 us.
    """
    return per_feature(theta, plan.p.num_axes, plan.s.d) if plan.spread else theta
