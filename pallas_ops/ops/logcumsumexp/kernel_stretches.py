"""Few columns: parts of the axis, each lane of which steps through a stretch of its own.

What its part comes to is known before the lane goes through its stretch again, so that one pivot a
column, which nothing in the part or before it exceeds by more than 1, does for all steps, and no
lane asks another. Unless what was before lies too far below: then pairs follow every step, as in
the variant `recurrence`. The last tiles are not gone through again: their sums stay in registers.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.fastmath import LOG2E, exp2, larger, multiply_add, widened
from pallas_ops.core.tiles import Ref, span
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.logcumsumexp import kernel_parts
from pallas_ops.ops.logcumsumexp.kernel_recurrence import running_pairs
from pallas_ops.ops.logcumsumexp.sums import (
    FAINT,
    add_pairs,
    any_of,
    below,
    carried,
    exclusive_pairs,
    exponentials,
    log_of,
    plus,
    running,
    shares_of,
    sum_before,
    total_of,
)
from pallas_ops.ops.logcumsumexp.tiles import HUGE, Carry, Columns, Pair, Tile

FEW = 4  # tiles, each of which may take 2**-24 from a sum

Step = Callable[[list[jax.Array], Carry], tuple[Iterable[Pair], Carry]]  # a lane's, of a tile


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

    def load_x(self, ref: Ref, k: Any) -> list[jax.Array]:
        return self.load_top(ref, k)[0]

    def load_top(self, ref: Ref, k: Any) -> tuple[list[jax.Array], jax.Array]:
        """x, and the largest of each stretch's."""
        rows = self.rows(k)
        stored = [row.stored(ref, -jnp.inf) for row in rows]
        settled = self.plan.settled
        xs = [row.clipped(settled(widened(x))) for row, x in zip(rows, stored, strict=True)]
        if self.plan.clip is None and ref.dtype == jnp.bfloat16:
            return xs, settled(widened(functools.reduce(larger, stored)))
        return xs, functools.reduce(larger, xs)

    def store(self, ref: Ref, k: Any, pairs: Iterable[Pair]) -> None:
        """Stores the logarithms."""
        for row, pair in zip(self.rows(k), pairs, strict=True):
            row.store(ref, log_of(pair))

    def carried(self, pair: Pair) -> Carry:
        """Before a stretch; what rounding takes is not kept where the tiles are few."""
        return (*pair, None) if self.plan.each <= FEW else carried(pair)

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

    def put_pair(self, refs: tuple[Ref, ...], k: Any, pair: Pair | Carry) -> None:
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
    stretches = Stretches(columns, i)
    totals, held = _totals(stretches, refs[0])
    top, shares = shares_of(totals)
    own = top, shares.sum(axis=0)
    kernel_parts.put(columns, words, i, own)
    lead = Tile(columns, stretches.first * columns.plan.c.block_n, 1).load_x(refs[0]).reshape(-1)
    siblings = sum_before(shares)  # while others tell theirs
    before = kernel_parts.before(columns, i, words, own, initial)
    pivot = jnp.maximum(before[0], top)
    ahead = below(before, pivot)
    fade = exp2((top - pivot) * LOG2E)
    pivots = jnp.broadcast_to(pivot[None], stretches.shape)
    start = ahead[None] + siblings * fade[None]
    foremost = span(stretches.shape[0])[:, None] == 0

    def plain() -> None:
        def step(xs: list[jax.Array], carry: Carry) -> tuple[Iterable[Pair], Carry]:
            _, s, lost = carry
            es = exponentials(xs, pivots)
            sums = itertools.accumulate(es, initial=s)
            next(sums)
            return ((pivots, t) for t in sums), (pivots, *plus(s, lost, total_of(es)))

        # The first pair of all is the state's own, of which second derivatives make it again.
        state = foremost & (i == 0)
        p, s = (jnp.where(state, x[None], y) for x, y in zip(initial, (pivots, start), strict=True))
        stretches.put_pair(marks, 0, (p, s))
        looped = stretches.plan.each - len(held)
        _, s, _ = _walk(stretches, refs, marks, (pivots, start), step, looped)
        for k, (high, sums) in enumerate(held, looped):
            scale = exp2((high - pivots) * LOG2E)
            pairs = [(pivots, multiply_add(t, scale, s)) for t in sums]
            s = pairs[-1][1]
            stretches.store(refs[1], k, pairs)
            stretches.put_pair(marks, k + 1, pairs[-1])

    def exact() -> None:
        def step(xs: list[jax.Array], carry: Carry) -> tuple[Iterable[Pair], Carry]:
            return running_pairs(xs, carry[:2], carry[0]), running(xs, carry)[1]

        siblings = scan(exclusive_pairs, (*_nothing(stretches), *totals))[:2]
        first = add_pairs((before[0][None], before[1][None]), siblings, exp2=exp2)
        stretches.put_pair(marks, 0, first)
        _walk(stretches, refs, marks, first, step, stretches.plan.each)

    # Of all prefixes the first is the smallest: no sum before a stretch lies below it.
    least = jnp.where(before[1] == 0, exp2((lead - pivot) * LOG2E), ahead)
    lax.cond(any_of((least < FAINT) & (pivot > -HUGE)), exact, plain)
    return pivot, ahead + own[1] * fade


def _nothing(stretches: Stretches) -> Pair:
    return jnp.full(stretches.shape, -HUGE), jnp.zeros(stretches.shape)


def _totals(
    stretches: Stretches, x_ref: Ref
) -> tuple[Pair, list[tuple[jax.Array, list[jax.Array]]]]:
    """What each stretch comes to; of its last tiles, a pivot and the sums of the tile alone."""
    plan = stretches.plan
    looped = max(0, plan.each - plan.c.held_n // plan.c.block_n)

    def tile(k: Any, carry: Carry) -> Carry:
        xs, top = stretches.load_top(x_ref, k)
        return running(xs, carry, top)[1]

    carry = stretches.through(tile, stretches.carried(_nothing(stretches)), count=looped)
    held = []
    for k in range(looped, plan.each):
        xs, top = stretches.load_top(x_ref, k)
        sums, carry = running(xs, carry, top)
        held.append((carry[0], sums))
    return carry[:2], held


def _walk(
    stretches: Stretches,
    refs: tuple[Ref, Ref],
    marks: tuple[Ref, ...],
    first: Pair,
    step: Step,
    count: int,
) -> Carry:
    """The output of the first `count` tiles, and what is to be remembered; the sum after them."""

    def tile(k: Any, carry: Carry) -> Carry:
        pairs, after = step(stretches.load_x(refs[0], k), carry)
        stretches.store(refs[1], k, pairs)
        stretches.put_pair(marks, k + 1, after)
        return after

    after: Carry = stretches.through(tile, stretches.carried(first), count=count)
    return after
