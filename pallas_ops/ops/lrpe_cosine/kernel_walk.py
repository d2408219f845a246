"""Kernels that walk the sequence (variant "block").

A program has a block of features of one head and one part of the sequence, and loops over tiles.
Sums over the sequence are kept elementwise, by the threads that load the elements, and are reduced
once after the loop.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.fastmath import LOG2E, exp2, multiply_add
from pallas_ops.core.tiles import Ref, split_evenly
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.lrpe_cosine import trigonometry
from pallas_ops.ops.lrpe_cosine.activation import Column, activate, pull
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_SEQUENCE, STORING_WALK_TILES, Plan
from pallas_ops.ops.lrpe_cosine.tiles import (
    Angles,
    Operands,
    Tile,
    features,
    load_at,
    run,
    store_at,
    tokens_tile,
)

HUGE = float(jnp.finfo(jnp.float32).max)


def forward(plan: Plan, operands: Operands, out: jax.ShapeDtypeStruct) -> list[jax.Array]:
    """The output; with the softmax over the sequence also its pivot and share."""
    columns = [_column_shape(plan)] * 2 if plan.act == SOFTMAX_SEQUENCE else []
    out_shape = [out, *columns]
    return run(_forward_kernel, plan, operands, out_shape, plan.walk_grid, "lrpe_cosine")


def backward(
    plan: Plan, operands: Operands, dx: jax.ShapeDtypeStruct, *, moves: tuple[bool, bool]
) -> list[jax.Array]:
    """Of dx and the parts' sums for theta [parts, B, H, D], those that `moves` asks for."""
    plan = dataclasses.replace(plan, walk_tiles=STORING_WALK_TILES)
    out = list(itertools.compress((dx, _column_shape(plan, plan.parts)), moves))
    name = {(True, True): "gradients", (False, True): "theta"}.get(moves, "backward")
    body = partial(_backward_kernel, moves=moves)
    return run(body, plan, operands, out, plan.walk_grid, f"lrpe_cosine_{name}")


def softmax(plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of the softmax over the sequence [B, H, D]."""
    out = [_column_shape(plan, plan.parts)] * 2
    name = "lrpe_cosine_softmax"
    pivots, totals = run(_softmax_kernel, plan, (x,), out, plan.walk_grid, name)
    pivot = pivots.max(axis=0, keepdims=True)
    return pivot[0], 1 / (totals * jnp.exp(pivots - pivot)).sum(axis=0)


def mean(plan: Plan, operands: Operands) -> jax.Array:
    """The sum of a * da over the sequence [B, H, D]."""
    out = [_column_shape(plan, plan.parts)]
    (means,) = run(_mean_kernel, plan, operands, out, plan.walk_grid, "lrpe_cosine_mean")
    return means.sum(axis=0)


def _column_shape(plan: Plan, *parts: int) -> jax.ShapeDtypeStruct:
    """One value per feature [(parts,) B, H, D]."""
    return jax.ShapeDtypeStruct((*parts, plan.s.b, plan.s.h, plan.s.d), jnp.float32)


class Walk:
    """A program's head, block of features and part of the sequence."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.block, self.head, self.part, self.b = map(pl.program_id, range(4))
        self.feature = features(plan, self.block)[None]
        self.inside = self.feature < plan.s.d
        self.zeros = jnp.zeros((plan.c.block_n, plan.c.block_d), jnp.float32)

    def fold(self, step: Callable[[list[Tile], Any], Any], carry: Any) -> Any:
        """The carry after all steps of this part; `step` takes the tiles of one step."""
        plan = self.plan

        def at(i: Any, carry: Any) -> Any:
            numbers = (i * plan.step_tiles + k for k in range(plan.step_tiles))
            return step([tokens_tile(plan, k, self.head, self.block) for k in numbers], carry)

        if plan.steps == 1:
            return at(0, carry)
        start, stop = split_evenly(plan.steps, plan.parts, self.part)
        stages = plan.c.num_stages
        return lax.fori_loop(start, stop, lambda i, y: at(pipelined(i, stages), y), carry)

    def softmax(self, x_ref: Ref) -> tuple[jax.Array, jax.Array]:
        """The pivot and the sum of exp(x - pivot) of this part [1, features]."""

        def step(tiles: list[Tile], carry: tuple[jax.Array, jax.Array]) -> Any:
            before, total = carry
            xs = [tile.load_x(x_ref, self.b) for tile in tiles]
            pivot = before
            for x in xs:
                pivot = jnp.maximum(pivot, x)
            total *= exp2((before - pivot) * LOG2E)
            for x in xs:
                total += exp2((x - pivot) * LOG2E)
            return pivot, total

        pivots, totals = self.fold(step, (self.zeros - HUGE, self.zeros))
        pivot = pivots.max(axis=0, keepdims=True)
        return pivot, (totals * exp2((pivots - pivot) * LOG2E)).sum(axis=0, keepdims=True)

    def mean(self, angles: Angles, x_ref: Ref, dout_ref: Ref, column: Column) -> jax.Array:
        """The sum of a * da over this part [1, features]."""

        def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
            for tile in tiles:
                a = activate(self.plan.act, tile.load_x(x_ref, self.b), column)
                da = tile.load_da(dout_ref, self.b, *angles.sincos(tile, self.b))
                total += tile.masked(a * da)
            return total

        total: jax.Array = self.fold(step, self.zeros)
        return total.sum(axis=0, keepdims=True)

    def angles(
        self, theta: Ref, offset: Ref | None, positions: Ref | None, cached: Ref | None
    ) -> Angles:
        """Angles whose frequencies are computed before the loop."""
        angles = Angles(self.plan, theta, offset, positions, cached)
        if cached is not None:
            return angles
        rate = angles.rate(tokens_tile(self.plan, 0, self.head, self.block))
        return dataclasses.replace(angles, frequency=trigonometry.frequency(rate))

    def column(self, *refs: Ref | None) -> Column:
        """The values of this program's features, from arrays [B, H, D]."""
        index = (self.b, self.head, self.feature)
        return Column(*(load_at(ref, index, self.inside) for ref in refs if ref is not None))

    def store(self, ref: Ref, column: jax.Array, *part: Any) -> None:
        """One value per feature, to [(parts,) B, H, D]."""
        store_at(ref, (*part, self.b, self.head, self.feature), column, self.inside)


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
    column = Column()
    if plan.act == SOFTMAX_SEQUENCE:
        pivot, total = walk.softmax(x_ref)
        column = Column(pivot, 1 / total)
        for ref, value in zip(column_refs, column[:2], strict=True):
            walk.store(ref, value)

    def step(tiles: list[Tile], _: None) -> None:
        for tile in tiles:
            sin, cos = angles.sincos(tile, walk.b)
            a = activate(plan.act, tile.load_x(x_ref, walk.b), column)
            tile.store(out_ref, walk.b, a * cos, 0)
            tile.store(out_ref, walk.b, a * sin, 1)

    walk.fold(step, None)


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
    *out_refs: Ref,  # as `moves` asks: dx [B, rows, D], sums for theta [parts, B, H, D]
    plan: Plan,
    moves: tuple[bool, bool],
) -> None:
    walk = Walk(plan)
    x_moves, theta_moves = moves
    angles = walk.angles(theta_ref, offset_ref, positions_ref, cached_ref)
    column = walk.column(pivot_ref, share_ref, mean_ref)
    if x_moves and plan.act == SOFTMAX_SEQUENCE and mean_ref is None:
        column = column._replace(mean=walk.mean(angles, x_ref, dout_ref, column))

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
                total = multiply_add(position, tile.masked(slope), total)
        return total

    total = walk.fold(step, walk.zeros)
    if theta_moves:
        walk.store(out_refs[-1], total.sum(axis=0, keepdims=True), walk.part)


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
    walk.store(mean_ref, walk.mean(angles, x_ref, dout_ref, column), walk.part)


def _softmax_kernel(x_ref: Ref, pivot_ref: Ref, total_ref: Ref, *, plan: Plan) -> None:
    """From x [B, rows, D], the pivot and sum of each part [parts, B, H, D]."""
    walk = Walk(plan)
    for ref, value in zip((pivot_ref, total_ref), walk.softmax(x_ref), strict=True):
        walk.store(ref, value, walk.part)
