"""Few columns, going backward: see `kernel_stretches`.

A part tells what it comes to for the gradient of the state before it, and then goes through its
stretches again, from behind. What was summed before each tile was remembered.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2, reciprocal
from pallas_ops.core.tiles import Ref
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp import kernel_parts
from pallas_ops.ops.logcumsumexp.kernel_recurrence import Refs, keep
from pallas_ops.ops.logcumsumexp.kernel_stretches import Stretches
from pallas_ops.ops.logcumsumexp.sums import SAFE, any_of, at, below, exclusive_map, log_of
from pallas_ops.ops.logcumsumexp.tiles import Columns, Pair, Tile


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
    return jnp.where(last[1] == 0, 1.0, below(pair, last[0]))


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
    start = below(first, last[0])
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
