"""How lrpe_cosine runs: the launchers, then the bodies of the variant `sequence`.

A program turns rows that lie side by side. An angle takes some 13 instructions, so it is computed
where it is needed; several batch elements may share it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, whole
from pallas_ops.ops.lrpe_cosine import kernel_block, kernel_theta
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_SEQUENCE, activate, pull
from pallas_ops.ops.lrpe_cosine.angles import Angles, spread
from pallas_ops.ops.lrpe_cosine.config import choose
from pallas_ops.ops.lrpe_cosine.tiles import Plan, plan_of
from pallas_ops.ops.lrpe_cosine.walk import Operands


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
    theta = spread(plan, theta)
    view = plan.view(x)
    cached = kernel_theta.cache(plan, theta, offset, positions) if plan.c.cache_angles else None
    angles = (theta, offset, positions, cached)
    columns: Operands = (None, None)
    if plan.act == SOFTMAX_SEQUENCE and plan.parts > 1:
        columns = kernel_block.softmax(plan, view)
        plan = _by_rows(plan)
    out = jax.ShapeDtypeStruct((*view.shape[:2], 2, plan.s.d), x.dtype)
    if plan.c.variant == "block":
        result, *columns = kernel_block.forward(plan, view, angles, out)
    else:
        operands = (view, *angles, *columns)
        result = _launch(_forward_kernel, plan, operands, out, "lrpe_cosine")
    saved = [y for y in (*columns, cached) if y is not None]
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
    """dx, from dout [B, .., 2, D] and, where there is an activation, x."""
    plan = plan_of(dout, theta, positions, **static)
    theta = spread(plan, theta)
    views = (None if x is None else plan.view(x), plan.view(dout))
    operands: Operands = (*views, theta, offset, positions, cached, pivot, share)
    mean = None
    if plan.act == SOFTMAX_SEQUENCE and plan.parts > 1:
        mean = kernel_block.mean(plan, operands)
        plan = _by_rows(plan)
    dx = jax.ShapeDtypeStruct((plan.s.b, plan.rows, plan.s.d), dout.dtype)
    if plan.c.variant == "block":
        (result,) = kernel_block.backward(plan, (*operands, None), dx, moves=(True, False))
    else:
        name = "lrpe_cosine_backward"
        result = _launch(_backward_kernel, plan, (*operands, mean), dx, name)
    return (result.reshape(*dout.shape[:3], plan.s.d),)


def _by_rows(plan: Plan) -> Plan:
    """The plan once the softmax over the sequence is known."""
    return dataclasses.replace(plan, c=choose(plan.s))


def _launch(
    body: Callable[..., None],
    plan: Plan,
    operands: Operands,
    out: jax.ShapeDtypeStruct,
    name: str,
) -> jax.Array:
    c = plan.c
    (result,) = launch(
        partial(body, plan=plan),
        *operands,
        name=name,
        grid=(pl.cdiv(plan.rows, c.block_n), plan.blocks_d, pl.cdiv(plan.s.b, c.block_b)),
        in_specs=[None if x is None else whole(x) for x in operands],
        out_specs=[whole(out)],
        out_shape=[out],
        num_warps=c.num_warps,
    )
    return result


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
    tile = plan.rows_tile(pl.program_id(0), pl.program_id(1))
    angles = Angles(plan, theta_ref, offset_ref, positions_ref, cached_ref)
    common = None if plan.per_batch else angles.sincos(tile, 0)

    def element(b: Any) -> None:
        sin, cos = common or angles.sincos(tile, b)
        a = activate(plan.act, tile.load_x(x_ref, b), tile.column(b, pivot_ref, share_ref))
        tile.store(out_ref, b, a * cos, 0)
        tile.store(out_ref, b, a * sin, 1)

    plan.each_element(pl.program_id(2), element)


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
    tile = plan.rows_tile(pl.program_id(0), pl.program_id(1))
    angles = Angles(plan, theta_ref, offset_ref, positions_ref, cached_ref)
    common = None if plan.per_batch else angles.sincos(tile, 0)

    def element(b: Any) -> None:
        x = None if x_ref is None else tile.load_x(x_ref, b)
        da = angles.turn_back(tile, b, dout_ref, common)
        column = tile.column(b, pivot_ref, share_ref, mean_ref)
        tile.store(dx_ref, b, pull(plan.act, x, da, column))

    plan.each_element(pl.program_id(2), element)
