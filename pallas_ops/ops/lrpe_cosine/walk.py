"""A program that walks the sequence with one head's features, some tiles at a time.

Sums over the sequence are kept elementwise, each thread its own, and joined at the end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core import fastmath
from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, whole
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.lrpe_cosine.activation import Column
from pallas_ops.ops.lrpe_cosine.angles import Angles
from pallas_ops.ops.lrpe_cosine.tiles import Plan, Tile, load_at, place_of

Operands = Sequence[jax.Array | None]
HUGE = float(jnp.finfo(jnp.float32).max)


def launch_walk(
    body: Callable[..., None],
    plan: Plan,
    operands: Operands,
    out: list[jax.ShapeDtypeStruct],
    name: str,
) -> list[jax.Array]:
    """A program for each block of features, head, part of the sequence and batch element."""
    return launch(
        partial(body, plan=plan),
        *operands,
        name=name,
        grid=(plan.blocks_d, plan.s.h, plan.parts, plan.s.b),
        in_specs=[None if x is None else whole(x) for x in operands],
        out_specs=list(map(whole, out)),
        out_shape=out,
        num_warps=plan.c.num_warps,
    )


def parts_of(plan: Plan, *parts: int) -> jax.ShapeDtypeStruct:
    """A column of each program: [(parts,) B, H, D]."""
    return jax.ShapeDtypeStruct((*parts, plan.s.b, plan.s.h, plan.s.d), jnp.float32)


class Walk:
    """A program's features and its part of the sequence."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.block, self.head, self.part, self.b = map(pl.program_id, range(4))
        self.feature = plan.features(self.block)[None]
        self.inside = self.feature < plan.s.d
        self.zeros = jnp.zeros((plan.c.block_n, plan.c.block_d), jnp.float32)

    def fold(self, step: Callable[[list[Tile], Any], Any], carry: Any) -> Any:
        """The carry after `step` with each bunch of tiles in turn."""
        plan = self.plan

        def bunch(i: Any, carry: Any) -> Any:
            i = pipelined(i, plan.c.num_stages) if plan.bunches > 1 else i
            tiles = (i * plan.bunch + k for k in range(plan.bunch))
            return step([plan.tokens_tile(k, self.head, self.block) for k in tiles], carry)

        if plan.bunches == 1:
            return bunch(0, carry)
        first = self.part * plan.bunches // plan.parts
        stop = (self.part + 1) * plan.bunches // plan.parts
        return lax.fori_loop(first, stop, bunch, carry)

    def each(self, step: Callable[[Tile], None]) -> None:
        def bunch(tiles: list[Tile], _: None) -> None:
            for tile in tiles:
                step(tile)

        self.fold(bunch, None)

    def softmax(self, x_ref: Ref) -> tuple[jax.Array, jax.Array]:
        """Pivot and sum exp(x - pivot) [1, features]."""

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

    def sum(self, term: Callable[[Tile], jax.Array]) -> jax.Array:
        """The sum of `term` over the sequence, [1, features]."""

        def step(tiles: list[Tile], total: jax.Array) -> jax.Array:
            for tile in tiles:
                total += tile.only(term(tile))
            return total

        total: jax.Array = self.fold(step, self.zeros)
        return total.sum(axis=0, keepdims=True)

    def angles(
        self, theta: Ref, offset: Ref | None, positions: Ref | None, cached: Ref | None
    ) -> Angles:
        """With frequencies that are computed once."""
        angles = Angles(self.plan, theta, offset, positions, cached)
        if cached is not None:
            return angles
        rate = angles.rate(self.plan.tokens_tile(0, self.head, self.block))
        return dataclasses.replace(angles, frequency=fastmath.frequency(rate))

    def column(self, *refs: Ref | None) -> Column | None:
        """From arrays [B, H, D]."""
        there = [ref for ref in refs if ref is not None]
        index = (self.b, self.head, self.feature)
        return Column(*(load_at(ref, index, self.inside) for ref in there)) if there else None

    def store(self, ref: Ref, column: jax.Array, *part: Any) -> None:
        """To [(parts,) B, H, D]."""
        place = place_of(ref, (*part, self.b, self.head, self.feature))
        plgpu.store(place, column, mask=self.inside)
