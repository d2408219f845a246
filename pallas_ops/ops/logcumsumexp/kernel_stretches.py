"""Few columns: parts of the axis, each lane of which steps through a stretch of its own.

What its part comes to is known before the lane goes through its stretch again, so that one pivot a
column, the largest number in the part or before it, does for all steps, and no lane asks another.
Unless what was before lies too far below: then pairs follow every step, as in the variant
`recurrence`. The last tiles are not gone through again: their sums stay in registers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.fastmath import LOG2E, exp2, multiply_add
from pallas_ops.core.tiles import Ref, span
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.logcumsumexp import kernel_parts
from pallas_ops.ops.logcumsumexp.kernel_recurrence import advance
from pallas_ops.ops.logcumsumexp.sums import (
    FAINT,
    add_pairs,
    any_of,
    below,
    exclusive_pairs,
    log_of,
    running,
    shares_of,
    sum_before,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Columns, Pair, Tile


class Stretches:
    """Those of the i-th part, [stretches, columns]: `plan.each` tiles side by side in each."""

    def __init__(self, columns: Columns, i: jax.Array) -> None:
        self.columns, self.plan = columns, columns.plan
        self.first = i * (self.plan.stretches * self.plan.each)
        self.shape = (self.plan.stretches, self.plan.c.block_c)

    def rows(self, k: Any) -> list[Tile]:
        """The positions of every stretch's k-th tile."""
        size, every = self.plan.c.block_n, self.plan.each * self.plan.c.block_n
        first = (self.first + k) * size
        return [Tile(self.columns, first + j, self.shape[0], every=every) for j in range(size)]

    def through(
        self,
        step: Callable[[Any, Any], Any],
        carry: Any,
        *,
        count: int | None = None,
        reverse: bool = False,
    ) -> Any:
        """`step` of the first `count` k, or of each."""
        count = self.plan.each if count is None else count
        if count < 2:
            return step(0, carry) if count else carry

        def one(k: jax.Array, carry: Any) -> Any:
            k = pipelined(k, self.plan.c.num_stages)
            return step(_mirrored(k, count) if reverse else k, carry)

        return lax.fori_loop(0, count, one, carry)

    def _marks(self, k: Any) -> tuple[jax.Array, jax.Array]:
        tile = self.first + k + span(self.shape[0])[:, None] * self.plan.each
        return tile, jnp.broadcast_to(self.columns.inside[None], self.shape)

    def pair(self, refs: tuple[Ref, Ref], k: Any) -> Pair:
        """Remembered before every stretch's k-th tile; beyond the axis, what is after it."""
        tile, mask = self._marks(k)
        index = self.columns.index(jnp.minimum(tile, self.plan.tiles))
        p, s = (plgpu.load(ref.at[index], mask=mask, other=0.0) for ref in refs)
        return self.plan.settled(p), self.plan.settled(s)

    def put_pair(self, refs: tuple[Ref, ...], k: Any, pair: Pair) -> None:
        """Remembers it before every stretch's k-th tile, where there is one."""
        tile, mask = self._marks(k)
        mask &= (tile < self.plan.tiles) & (k < self.plan.each)
        for ref, value in zip(refs, pair, strict=False):
            plgpu.store(ref.at[self.columns.index(tile)], value, mask=mask)


def _mirrored(k: jax.Array, count: int) -> jax.Array:
    """count - 1 - k, as bits if that will do: then all addresses have one base."""
    return count - 1 - k if count & (count - 1) else k ^ (count - 1)


def forward(
    columns: Columns,
    i: jax.Array,
    words: tuple[Ref, ...],
    initial: Pair,
    refs: tuple[Ref, Ref],
    marks: tuple[Ref, ...],
) -> Pair:
    """The output of the i-th part, and the pair after it."""
    x_ref, out_ref = refs
    stretches = Stretches(columns, i)
    each = stretches.plan.each
    looped = max(0, each - stretches.plan.c.held_n // stretches.plan.c.block_n)
    nothing = jnp.full(stretches.shape, -HUGE), jnp.zeros(stretches.shape)

    def xs(k: Any) -> list[jax.Array]:
        return [row.load_x(x_ref) for row in stretches.rows(k)]

    def total(k: Any, pair: Pair) -> Pair:
        pivot, sums = running(xs(k), pair)
        return pivot, sums[-1]

    totals = stretches.through(total, nothing, count=looped)
    held = []
    for k in range(looped, each):
        held.append(running(xs(k), totals))
        totals = held[-1][0], held[-1][1][-1]

    top, shares = shares_of(totals)
    own = top, shares.sum(axis=0)
    kernel_parts.put(columns, words, i, own)
    lead = stretches.rows(0)[0].load_x(x_ref)
    siblings = sum_before(shares)  # while others tell theirs
    before = kernel_parts.before(columns, i, words, own, initial)
    pivot = jnp.maximum(before[0], top)
    ahead = below(before, pivot)
    fade = exp2((top - pivot) * LOG2E)
    pivots = jnp.broadcast_to(pivot[None], stretches.shape)
    start = ahead[None] + siblings * fade[None]

    def walk(first: Pair, step: Callable[[Pair, jax.Array], Pair], count: int) -> None:
        def tile(k: Any, pair: Pair) -> Pair:
            for row, x in zip(stretches.rows(k), xs(k), strict=True):
                pair = step(pair, x)
                row.store(out_ref, log_of(pair))
            stretches.put_pair(marks, k + 1, pair)
            return pair

        stretches.put_pair(marks, 0, first)
        stretches.through(tile, first, count=count)

    def plain() -> None:
        def step(pair: Pair, x: jax.Array) -> Pair:
            return pivots, pair[1] + exp2((x - pivots) * LOG2E)

        walk((pivots, start), step, looped)
        for k, (high, sums) in enumerate(held, looped):
            scale = exp2((high - pivots) * LOG2E)
            pairs = [(pivots, multiply_add(s, scale, start)) for s in sums]
            for row, pair in zip(stretches.rows(k), pairs, strict=True):
                row.store(out_ref, log_of(pair))
            stretches.put_pair(marks, k + 1, pairs[-1])

    def exact() -> None:
        siblings = scan(exclusive_pairs, (*nothing, *totals))[:2]
        first = add_pairs((before[0][None], before[1][None]), siblings, exp2=exp2)
        walk(first, lambda pair, x: advance(pair, x)[0], each)

    fresh = (before[1] == 0)[None] & (span(stretches.shape[0])[:, None] == 0)  # nothing before
    least = jnp.where(fresh, exp2((lead - pivots) * LOG2E), start)
    lax.cond(any_of((least < FAINT) & (pivots > -HUGE)), exact, plain)
    return pivot, ahead + own[1] * fade
