"""The variant `block`: a program walks the sequence; it alone does the softmax over it."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import multiply_add
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_SEQUENCE, Column, activate, pull
from pallas_ops.ops.lrpe_cosine.angles import Angles
from pallas_ops.ops.lrpe_cosine.config import AHEAD
from pallas_ops.ops.lrpe_cosine.tiles import Plan, Tile
from pallas_ops.ops.lrpe_cosine.walk import Operands, Walk, launch_walk, parts_of


def forward(
    plan: Plan, x: jax.Array, angles: Operands, out: jax.ShapeDtypeStruct
) -> list[jax.Array]:
    """The output; with the sequence's softmax also its pivot and share."""
    columns = [parts_of(plan)] * 2 if plan.act == SOFTMAX_SEQUENCE else []
    return launch_walk(_forward_kernel, plan, (x, *angles), [out, *columns], "lrpe_cosine")


def backward(
    plan: Plan, operands: Operands, dx: jax.ShapeDtypeStruct, *, moves: tuple[bool, bool]
) -> list[jax.Array]:
    """Of dx and of sums for theta [parts, B, H, D], what moves."""
    # In as many parts, though bunches are smaller: one program may have to see all tokens.
    config = dataclasses.replace(plan.c, num_parts=plan.parts)
    plan = dataclasses.replace(plan, c=config, ahead=AHEAD)
    out = list(itertools.compress((dx, parts_of(plan, plan.parts)), moves))
    name = {(True, True): "gradients", (False, True): "theta"}.get(moves, "backward")
    body = partial(_backward_kernel, moves=moves)
    return launch_walk(body, plan, operands, out, f"lrpe_cosine_{name}")


def softmax(plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of the sequence's softmax [B, H, D], of its parts'."""
    parts = [parts_of(plan, plan.parts)] * 2
    pivots, totals = launch_walk(_softmax_kernel, plan, (x,), parts, "lrpe_cosine_softmax")
    pivot = pivots.max(axis=0, keepdims=True)
    return pivot[0], 1 / (totals * jnp.exp(pivots - pivot)).sum(axis=0)


def mean(plan: Plan, operands: Operands) -> jax.Array:
    """The sum of a * da over the sequence [B, H, D], of its parts'."""
    parts = [parts_of(plan, plan.parts)]
    (means,) = launch_walk(_mean_kernel, plan, operands, parts, "lrpe_cosine_mean")
    return means.sum(axis=0)


def _forward_kernel(
    x_ref: Ref,  # [B, rows, D]
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    cached_ref: Ref | None,  # [B, N, H, D]
    out_ref: Ref,  # [B, rows, 2, D]
    *column_refs: Ref,  # [B, H, D]: pivot and share
    plan: Plan,
) -> None:
    walk = Walk(plan)
    angles = walk.angles(theta_ref, offset_ref, positions_ref, cached_ref)
    column = None
    if plan.act == SOFTMAX_SEQUENCE:
        pivot, total = walk.softmax(x_ref)
        share = 1 / total
        column = Column(pivot, share)
        for ref, value in zip(column_refs, (pivot, share), strict=True):
            walk.store(ref, value)

    def turn(tile: Tile) -> None:
        sin, cos = angles.sincos(tile, walk.b)
        a = activate(plan.act, tile.load_x(x_ref, walk.b), column)
        tile.store(out_ref, walk.b, a * cos, 0)
        tile.store(out_ref, walk.b, a * sin, 1)

    walk.each(turn)


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
    *out_refs: Ref,  # of what moves: dx [B, rows, D], sums [parts, B, H, D]
    plan: Plan,
    moves: tuple[bool, bool],
) -> None:
    walk = Walk(plan)
    x_moves, theta_moves = moves
    angles = walk.angles(theta_ref, offset_ref, positions_ref, cached_ref)
    column = walk.column(pivot_ref, share_ref, mean_ref)
    if x_moves and column is not None and column.mean is None:
        column = column._replace(mean=_mean(walk, angles, x_ref, dout_ref, column))

    def load(tile: Tile) -> tuple[Any, ...]:
        x = None if x_ref is None else tile.load_x(x_ref, walk.b)
        position = angles.position(tile, walk.b) if theta_moves else None
        return x, tile.load(dout_ref, walk.b, 0), tile.load(dout_ref, walk.b, 1), position

    def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
        for tile, (x, dcos, dsin, position) in [(tile, load(tile)) for tile in tiles]:
            sin, cos = angles.sincos(tile, walk.b, position)
            if x_moves:
                da = multiply_add(dcos, cos, dsin * sin)
                tile.store(out_refs[0], walk.b, pull(plan.act, x, da, column))
            if theta_moves:
                slope = multiply_add(dsin, cos, -dcos * sin) * activate(plan.act, x, column)
                total = multiply_add(position, tile.only(slope), total)
        return total

    total = walk.fold(step, walk.zeros)
    if theta_moves:
        walk.store(out_refs[-1], total.sum(axis=0, keepdims=True), walk.part)


def _mean(walk: Walk, angles: Angles, x_ref: Ref, dout_ref: Ref, column: Column) -> jax.Array:
    """The sum of a * da over a program's part of the sequence [1, features]."""

    def term(tile: Tile) -> jax.Array:
        a = activate(walk.plan.act, tile.load_x(x_ref, walk.b), column)
        return a * angles.turn_back(tile, walk.b, dout_ref)

    return walk.sum(term)


def _mean_kernel(
    x_ref: Ref,  # [B, rows, D]
    dout_ref: Ref,  # [B, rows, 2, D]
    theta_ref: Ref,  # [H, E]
    offset_ref: Ref | None,  # [B]
    positions_ref: Ref | None,  # [B, N, K]
    cached_ref: Ref | None,  # [B, N, H, D]
    pivot_ref: Ref,  # [B, H, D], as share_ref
    share_ref: Ref,
    mean_ref: Ref,  # [parts, B, H, D]
    *,
    plan: Plan,
) -> None:
    walk = Walk(plan)
    angles = walk.angles(theta_ref, offset_ref, positions_ref, cached_ref)
    column = walk.column(pivot_ref, share_ref)
    assert column is not None
    walk.store(mean_ref, _mean(walk, angles, x_ref, dout_ref, column), walk.part)


def _softmax_kernel(x_ref: Ref, pivot_ref: Ref, total_ref: Ref, *, plan: Plan) -> None:
    """From [B, rows, D], each part's pivot and sum [parts, B, H, D]."""
    walk = Walk(plan)
    for ref, value in zip((pivot_ref, total_ref), walk.softmax(x_ref), strict=True):
        walk.store(ref, value, walk.part)
