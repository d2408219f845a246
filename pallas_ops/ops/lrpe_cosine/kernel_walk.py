"""Kernels that walk the sequence (variant "block").

A program has a block of features of one head and one part of the sequence, and loops over tiles.
Each thread keeps sums over the sequence for the elements that it loads. The sums of a program's
threads are added up once, after the loop.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E, exp2, multiply_add
from pallas_ops.core.tiles import HUGE, Ref, split_evenly
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.lrpe_cosine.activation import activate, pull
from pallas_ops.ops.lrpe_cosine.config import Operands, Plan, Softmax
from pallas_ops.ops.lrpe_cosine.tiles import Angles, Tile, features, load_softmax


class Walk:
    """A program that walks: a block of features, a head and a part of the sequence."""

    def __init__(self, plan: Plan, refs: Operands) -> None:
        self.plan, self.refs = plan, refs
        self.block_d, self.head, self.part, self.b = map(pl.program_id, range(4))
        self.feature = features(plan, self.block_d)
        self.mask = self.feature < plan.s.d
        self.zeros = jnp.zeros((plan.c.block_n, plan.c.block_d), jnp.float32)

    def tile(self, block: Any) -> Tile:
        """The tile number `block` of the sequence."""
        return Tile.of_tokens(self.plan, self.b, block, self.head, self.block_d)

    def angles(self) -> Angles:
        """Angles whose frequencies are computed before the loop."""
        return Angles(self.plan, self.refs, self.tile(0))

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

    def mean(self, angles: Angles, softmax: Softmax) -> jax.Array:
        """The sum of a * da over this part [1, features]."""

        def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
            for tile in tiles:
                a = activate(self.plan.p.act, tile.load_x(self.refs.x), softmax)
                da = tile.load_da(self.refs.dout, *angles.sincos(tile))
                total += tile.masked(a * da)
            return total

        total: jax.Array = self.fold(step, self.zeros)
        return total.sum(axis=0, keepdims=True)

    def store(self, ref: Ref, value: jax.Array, *part: Any) -> None:
        """Stores one value per feature in an array [(parts,) B, H, D]."""
        plgpu.store(ref.at[*part, self.b, self.head, self.feature], value, mask=self.mask)


def forward(refs: Operands, out_ref: Ref, *softmax_refs: Ref, plan: Plan) -> None:
    """`out_ref` is [B, rows, 2, D]; `softmax_refs`, if any, are pivot and share [B, H, D]."""
    walk = Walk(plan, refs)
    angles, softmax = walk.angles(), Softmax()
    if plan.p.over_sequence:
        pivot, total = walk.softmax()
        softmax = Softmax(pivot, 1 / total)
        for ref, value in zip(softmax_refs, softmax[:2], strict=True):
            walk.store(ref, value)

    def step(tiles: list[Tile], _: None) -> None:
        for tile in tiles:
            sin, cos = angles.sincos(tile)
            a = activate(plan.p.act, tile.load_x(refs.x), softmax)
            tile.store(out_ref, a * cos, 0)
            tile.store(out_ref, a * sin, 1)

    walk.fold(step, None)


def backward(
    refs: Operands, *out_refs: Ref, plan: Plan, wanted: tuple[bool, bool] = (True, False)
) -> None:
    """`out_refs` are, as `wanted` asks, dx [B, rows, D] and sums for theta [parts, B, H, D]."""
    walk = Walk(plan, refs)
    wants_dx, wants_dtheta = wanted
    angles, softmax = walk.angles(), load_softmax(refs, walk)
    if wants_dx and plan.p.over_sequence and refs.mean is None:
        softmax = softmax._replace(mean=walk.mean(angles, softmax))

    def load(tile: Tile) -> tuple[Any, ...]:
        """What a step reads of a tile; it loads all of its tiles before the first store."""
        x = None if refs.x is None else tile.load_x(refs.x)
        position = angles.position(tile) if wants_dtheta else None
        return x, tile.load(refs.dout, 0), tile.load(refs.dout, 1), position

    def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
        for tile, (x, dcos, dsin, position) in [(tile, load(tile)) for tile in tiles]:
            sin, cos = angles.sincos(tile, position)
            if wants_dx:
                da = multiply_add(dcos, cos, dsin * sin)
                tile.store(out_refs[0], pull(plan.p.act, x, da, softmax))
            if wants_dtheta:
                slope = multiply_add(dsin, cos, -dcos * sin) * activate(plan.p.act, x, softmax)
                total = multiply_add(position, tile.masked(slope), total)
        return total

    total = walk.fold(step, walk.zeros)
    if wants_dtheta:
        walk.store(out_refs[-1], total.sum(axis=0, keepdims=True), walk.part)


def mean(refs: Operands, mean_ref: Ref, *, plan: Plan) -> None:
    """Stores the sum of a * da over each part [parts, B, H, D]."""
    walk = Walk(plan, refs)
    walk.store(mean_ref, walk.mean(walk.angles(), load_softmax(refs, walk)), walk.part)


def softmax(refs: Operands, pivot_ref: Ref, total_ref: Ref, *, plan: Plan) -> None:
    """Stores the pivot and the sum of exp(x - pivot) of each part [parts, B, H, D]."""
    walk = Walk(plan, refs)
    for ref, value in zip((pivot_ref, total_ref), walk.softmax(), strict=True):
        walk.store(ref, value, walk.part)
