"""Kernels that walk the sequence (variant "block").

A program has a block of features of one head and one part of the sequence, and loops over tiles.
Each thread keeps sums over the sequence for the elements that it loads. The sums of a program's
threads are added up once, after the loop.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial, reduce
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
    load_column,
    run,
    store_at,
    tokens_tile,
)

HUGE = float(jnp.finfo(jnp.float32).max)


def forward(plan: Plan, operands: Operands) -> list[jax.Array]:
    """The output [B, rows, 2, D]; with the softmax over the sequence also its pivot and share."""
    out = jax.ShapeDtypeStruct((plan.s.b, plan.rows, 2, plan.s.d), operands.x.dtype)
    columns = [_column_shape(plan)] * 2 if plan.act == SOFTMAX_SEQUENCE else []
    return run(_forward_kernel, plan, operands, [out, *columns], plan.walk_grid, "lrpe_cosine")


def backward(
    plan: Plan, operands: Operands, *, moves: tuple[bool, bool] = (True, False)
) -> list[jax.Array]:
    """`moves` asks for dx [B, rows, D], and for the parts' sums for theta [parts, B, H, D]."""
    plan = dataclasses.replace(plan, walk_tiles=STORING_WALK_TILES)
    dx = jax.ShapeDtypeStruct((plan.s.b, plan.rows, plan.s.d), operands.dout.dtype)
    out = list(itertools.compress((dx, _column_shape(plan, plan.parts)), moves))
    name = {(True, False): "backward", (False, True): "theta", (True, True): "gradients"}[moves]
    body = partial(_backward_kernel, moves=moves)
    return run(body, plan, operands, out, plan.walk_grid, f"lrpe_cosine_{name}")


def softmax(plan: Plan, x: jax.Array) -> list[jax.Array]:
    """The pivot and share of the softmax over the sequence [B, H, D]."""
    out = [_column_shape(plan, plan.parts)] * 2
    name = "lrpe_cosine_softmax"
    pivots, totals = run(_softmax_kernel, plan, Operands(x), out, plan.walk_grid, name)
    pivot = pivots.max(axis=0, keepdims=True)
    return [pivot[0], 1 / (totals * jnp.exp(pivots - pivot)).sum(axis=0)]


def mean(plan: Plan, operands: Operands) -> jax.Array:
    """The sum of a * da over the sequence [B, H, D]."""
    out = [_column_shape(plan, plan.parts)]
    (means,) = run(_mean_kernel, plan, operands, out, plan.walk_grid, "lrpe_cosine_mean")
    return means.sum(axis=0)


def _column_shape(plan: Plan, *parts: int) -> jax.ShapeDtypeStruct:
    """One value per feature [(parts,) B, H, D]."""
    return jax.ShapeDtypeStruct((*parts, plan.s.b, plan.s.h, plan.s.d), jnp.float32)


class Walk:
    """A program of `Plan.walk_grid`: a block of features, a head and a part of the sequence."""

    def __init__(self, plan: Plan, refs: Operands) -> None:
        self.plan, self.refs = plan, refs
        self.block_d, self.head, self.part, self.b = map(pl.program_id, range(4))
        self.feature = features(plan, self.block_d)
        self.inside = self.feature < plan.s.d
        self.zeros = jnp.zeros((plan.c.block_n, plan.c.block_d), jnp.float32)

    def tile(self, block: Any) -> Tile:
        """The tile number `block` of the sequence."""
        return tokens_tile(self.plan, self.b, block, self.head, self.block_d)

    def fold(self, step: Callable[[list[Tile], Any], Any], carry: Any) -> Any:
        """The carry after all steps of this part; `step` takes the tiles of one step."""
        plan = self.plan

        def at(i: Any, carry: Any) -> Any:
            numbers = (i * plan.step_tiles + k for k in range(plan.step_tiles))
            return step([self.tile(k) for k in numbers], carry)

        if plan.steps == 1:
            return at(0, carry)
        start, stop = split_evenly(plan.steps, plan.parts, self.part)
        stages = plan.c.num_stages
        return lax.fori_loop(start, stop, lambda i, y: at(pipelined(i, stages), y), carry)

    def softmax(self) -> tuple[jax.Array, jax.Array]:
        """The pivot and the sum of exp(x - pivot) of this part [1, features]."""

        def step(tiles: list[Tile], carry: tuple[jax.Array, jax.Array]) -> Any:
            before, total = carry
            xs = [tile.load_x(self.refs.x) for tile in tiles]
            pivot = reduce(jnp.maximum, xs, before)
            total *= exp2((before - pivot) * LOG2E)
            for x in xs:
                total += exp2((x - pivot) * LOG2E)
            return pivot, total

        pivots, totals = self.fold(step, (self.zeros - HUGE, self.zeros))
        pivot = pivots.max(axis=0, keepdims=True)
        return pivot, (totals * exp2((pivots - pivot) * LOG2E)).sum(axis=0, keepdims=True)

    def mean(self, angles: Angles, column: Column) -> jax.Array:
        """The sum of a * da over this part [1, features]."""

        def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
            for tile in tiles:
                a = activate(self.plan.act, tile.load_x(self.refs.x), column)
                da = tile.load_da(self.refs.dout, *angles.sincos(tile))
                total += tile.masked(a * da)
            return total

        total: jax.Array = self.fold(step, self.zeros)
        return total.sum(axis=0, keepdims=True)

    def angles(self) -> Angles:
        """Angles whose frequencies are computed before the loop."""
        angles = Angles(self.plan, self.refs)
        if self.refs.cached is not None:
            return angles
        rate = angles.rate(self.tile(0))
        return dataclasses.replace(angles, frequency=trigonometry.frequency(rate))

    def column(self) -> Column:
        """The values that the softmax over the sequence has for this program's features."""
        return load_column(self.refs, (self.b, self.head, self.feature), self.inside)

    def store(self, ref: Ref, column: jax.Array, *part: Any) -> None:
        """Stores one value per feature in an array [(parts,) B, H, D]."""
        store_at(ref, (*part, self.b, self.head, self.feature), column, self.inside)


def _forward_kernel(refs: Operands, out_ref: Ref, *column_refs: Ref, plan: Plan) -> None:
    """`column_refs` are those of pivot and share [B, H, D]."""
    walk = Walk(plan, refs)
    angles = walk.angles()
    column = Column()
    if plan.act == SOFTMAX_SEQUENCE:
        pivot, total = walk.softmax()
        column = Column(pivot, 1 / total)
        for ref, value in zip(column_refs, column[:2], strict=True):
            walk.store(ref, value)

    def step(tiles: list[Tile], _: None) -> None:
        for tile in tiles:
            sin, cos = angles.sincos(tile)
            a = activate(plan.act, tile.load_x(refs.x), column)
            tile.store(out_ref, a * cos, 0)
            tile.store(out_ref, a * sin, 1)

    walk.fold(step, None)


def _backward_kernel(refs: Operands, *out_refs: Ref, plan: Plan, moves: tuple[bool, bool]) -> None:
    """`out_refs` are, as `moves` asks, dx [B, rows, D] and sums for theta [parts, B, H, D]."""
    walk = Walk(plan, refs)
    x_moves, theta_moves = moves
    angles, column = walk.angles(), walk.column()
    if x_moves and plan.act == SOFTMAX_SEQUENCE and refs.mean is None:
        column = column._replace(mean=walk.mean(angles, column))

    def load(tile: Tile) -> tuple[Any, ...]:
        x = None if refs.x is None else tile.load_x(refs.x)
        position = angles.position(tile) if theta_moves else None
        return x, tile.load(refs.dout, 0), tile.load(refs.dout, 1), position

    def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
        for tile, (x, dcos, dsin, position) in [(tile, load(tile)) for tile in tiles]:
            sin, cos = angles.sincos(tile, position)
            if x_moves:
                da = multiply_add(dcos, cos, dsin * sin)
                tile.store(out_refs[0], pull(plan.act, x, da, column))
            if theta_moves:
                slope = multiply_add(dsin, cos, -dcos * sin) * activate(plan.act, x, column)
                total = multiply_add(position, tile.masked(slope), total)
        return total

    total = walk.fold(step, walk.zeros)
    if theta_moves:
        walk.store(out_refs[-1], total.sum(axis=0, keepdims=True), walk.part)


def _mean_kernel(refs: Operands, mean_ref: Ref, *, plan: Plan) -> None:
    """The mean of each part [parts, B, H, D]."""
    walk = Walk(plan, refs)
    walk.store(mean_ref, walk.mean(walk.angles(), walk.column()), walk.part)


def _softmax_kernel(refs: Operands, pivot_ref: Ref, total_ref: Ref, *, plan: Plan) -> None:
    """The pivot and the sum of each part [parts, B, H, D]."""
    walk = Walk(plan, refs)
    pivot, total = walk.softmax()
    walk.store(pivot_ref, pivot, walk.part)
    walk.store(total_ref, total, walk.part)
