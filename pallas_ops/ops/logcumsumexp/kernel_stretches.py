"""Few columns: parts of the axis, each lane of which steps through a stretch of its own.

What its stretch comes to is known before the lane goes through it again, so that one pivot, the
largest number in it or before it, does for all its steps, and no lane asks another. Unless what
was before lies too far below: then pairs follow every step, as in the variant `recurrence`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_ops.core.fastmath import LOG2E, exp2, reciprocal
from pallas_ops.core.tiles import Ref, span
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.logcumsumexp import kernel_parts
from pallas_ops.ops.logcumsumexp.kernel_recurrence import Refs, advance, keep
from pallas_ops.ops.logcumsumexp.sums import (
    SAFE,
    add_pairs,
    any_of,
    at,
    exclusive_map,
    exclusive_pairs,
    finite,
    joined,
    log_of,
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

    def through(self, step: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False) -> Any:
        """`step` of each k."""
        each = self.plan.each
        if each == 1:
            return step(0, carry)

        def one(k: jax.Array, carry: Any) -> Any:
            k = pipelined(k, self.plan.c.num_stages)
            return step(_mirrored(k, each) if reverse else k, carry)

        return lax.fori_loop(0, each, one, carry)

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

    def total(k: Any, pair: Pair) -> Pair:
        xs = [row.load_x(x_ref) for row in stretches.rows(k)]
        pivot = finite(functools.reduce(jnp.maximum, xs, pair[0]))
        s = pair[1] * exp2((pair[0] - pivot) * LOG2E)
        return pivot, functools.reduce(jnp.add, (exp2((x - pivot) * LOG2E) for x in xs), s)

    nothing = jnp.full(stretches.shape, -HUGE), jnp.zeros(stretches.shape)
    totals = stretches.through(total, nothing)
    own = joined(totals)
    kernel_parts.put(columns, words, i, own)
    lead = stretches.rows(0)[0].load_x(x_ref)
    siblings = scan(exclusive_pairs, (*nothing, *totals))[:2]  # while others tell theirs
    before = kernel_parts.before(columns, i, words, own, initial)
    start = add_pairs((before[0][None], before[1][None]), siblings, exp2=exp2)
    stretches.put_pair(marks, 0, start)
    pivot = jnp.maximum(totals[0], start[0])

    def walk(first: Pair, step: Callable[[Pair, jax.Array], Pair]) -> None:
        def tile(k: Any, pair: Pair) -> Pair:
            for row, x in [(row, row.load_x(x_ref)) for row in stretches.rows(k)]:
                pair = step(pair, x)
                row.store(out_ref, log_of(pair))
            stretches.put_pair(marks, k + 1, pair)
            return pair

        stretches.through(tile, first)

    def plain() -> None:
        s = start[1] * exp2((start[0] - pivot) * LOG2E)
        walk((pivot, s), lambda pair, x: (pivot, pair[1] + exp2((x - pivot) * LOG2E)))

    def exact() -> None:
        walk(start, lambda pair, x: advance(pair, x)[0])

    lax.cond(any_of(~(pivot - jnp.maximum(lead, start[0]) <= SAFE)), exact, plain)
    return add_pairs(before, own, exp2=exp2)  # type: ignore[no-any-return]


def backward(
    columns: Columns,
    i: jax.Array,
    words: tuple[Ref, ...],
    marks: tuple[Ref, Ref],
    dfinal_ref: Ref,
    refs: Refs,
) -> jax.Array:
    """dx of the i-th part, and the gradient of the state before it."""
    stretches = Stretches(columns, i)
    first, last = (stretches.pair(marks, k) for k in (0, stretches.plan.each))
    own_map = _map(stretches, refs, first, last)
    lead = stretches.rows(0)[0].load_x(refs[0])
    far = ~(last[0] - jnp.maximum(lead, log_of(first)) <= SAFE)
    wide = any_of(far & (last[1] != 0))
    own_map = lax.cond(wide, lambda: _exact_map(stretches, refs, first), lambda: own_map)
    p, s = columns.pair(marks, stretches.first)
    own = (kernel_parts.fade((p[None], s[None]), first) * own_map[1]).sum(axis=0)
    kernel_parts.put(columns, words, i, (own,))
    one, zero = jnp.ones(stretches.shape), jnp.zeros(stretches.shape)  # while others tell theirs
    others, add, factor, _ = scan(exclusive_map, (one, zero, *own_map), reverse=True)
    behind = kernel_parts.behind(columns, i, words, marks, own, dfinal_ref)
    grad = others * behind[None] + add
    lax.cond(
        wide,
        lambda: _exact(stretches, marks, refs, grad),
        lambda: _plain(stretches, marks, refs, last, grad),
    )
    before: jax.Array = at(factor, 0) * behind + own
    return before


def _load(stretches: Stretches, refs: Refs, k: Any) -> list[tuple[Tile, jax.Array, jax.Array]]:
    return [(row, row.load_x(refs[0]), row.load(refs[1])) for row in stretches.rows(k)]


def _below(pair: Pair, last: Pair) -> jax.Array:
    """The sum below the pivot of the last; 1 where that sums nothing."""
    return jnp.where(last[1] == 0, 1.0, pair[1] * exp2((pair[0] - last[0]) * LOG2E))


def _map(stretches: Stretches, refs: Refs, first: Pair, last: Pair) -> Pair:
    """The gradient of the state before each stretch, (factor, own), is factor * W + own."""

    def tile(k: Any, carry: Pair) -> Pair:
        s, own = carry
        for _, x, do in _load(stretches, refs, k):
            s = s + exp2((x - last[0]) * LOG2E)
            own = own + do * reciprocal(s)
        return s, own

    carry = _below(first, last), jnp.zeros(stretches.shape)
    s, own = stretches.through(tile, carry)
    start = first[1] * exp2((first[0] - last[0]) * LOG2E)
    start = jnp.where(start == jnp.inf, 0.0, start)
    return start * reciprocal(s), start * own


def _plain(
    stretches: Stretches, marks: tuple[Ref, Ref], refs: Refs, last: Pair, grad: jax.Array
) -> None:
    """dx, from the gradient of the state after each stretch."""

    def tile(k: Any, grad: jax.Array) -> jax.Array:
        s = _below(stretches.pair(marks, k), last)
        steps = []
        for row, x, do in _load(stretches, refs, k):
            e = exp2((x - last[0]) * LOG2E)
            s = s + e
            steps.append((row, e, do * reciprocal(s)))
        for row, e, share in reversed(steps):
            grad = grad + share
            row.store_dx(refs[2], refs[0], e * grad)
        return grad

    stretches.through(tile, grad * reciprocal(_below(last, last)), reverse=True)


def _exact_map(stretches: Stretches, refs: Refs, first: Pair) -> Pair:
    """`_map` by pairs."""

    def tile(k: Any, carry: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
        pair, (factor, own) = carry
        for _, x, do in _load(stretches, refs, k):
            pair, kept, _ = keep(pair, x)
            factor = factor * kept
            own = own + factor * do
        return pair, (factor, own)

    one, zero = jnp.ones(stretches.shape), jnp.zeros(stretches.shape)
    result: Pair = stretches.through(tile, (first, (one, zero)))[1]
    return result


def _exact(stretches: Stretches, marks: tuple[Ref, Ref], refs: Refs, grad: jax.Array) -> None:
    """`_plain` by pairs."""

    def tile(k: Any, grad: jax.Array) -> jax.Array:
        pair = stretches.pair(marks, k)
        steps = []
        for row, x, do in _load(stretches, refs, k):
            pair, kept, weight = keep(pair, x)
            steps.append((row, do, kept, weight))
        for row, do, kept, weight in reversed(steps):
            grad = grad + do
            row.store_dx(refs[2], refs[0], weight * grad)
            grad = kept * grad
        return grad

    stretches.through(tile, grad, reverse=True)
