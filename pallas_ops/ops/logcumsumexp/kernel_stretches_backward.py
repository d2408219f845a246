"""Few columns, going backward: see `kernel_stretches`.

A part goes through its stretches from behind, and tells what it comes to for the gradient of the
sum before it; and then once more, with what is behind it. What was summed before each tile was
remembered.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2, multiply_add, reciprocal
from pallas_ops.core.tiles import Ref
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp import kernel_parts
from pallas_ops.ops.logcumsumexp.kernel_recurrence import Refs, dx_back, steps_back
from pallas_ops.ops.logcumsumexp.kernel_stretches import Stretches
from pallas_ops.ops.logcumsumexp.sums import (
    SAFE,
    any_of,
    at,
    below,
    carried,
    exclusive_map,
    log_of,
    plus,
    risen,
)
from pallas_ops.ops.logcumsumexp.tiles import Carry, Columns, Pair, Tile


def backward(
    columns: Columns,
    i: jax.Array,
    words: tuple[Ref, ...],
    marks: tuple[Ref, Ref],
    dfinal_ref: Ref,
    refs: Refs,
) -> jax.Array:
    """dx of the i-th part, and the gradient of the sum before it."""
    stretches, silent = Stretches(columns, i), (*refs[:2], None)
    first, last = (stretches.pair(marks, k) for k in (0, stretches.plan.each))
    one, zero = jnp.ones(stretches.shape), jnp.zeros(stretches.shape)
    own = _plain(stretches, marks, silent, last, zero)
    fade = exp2((first[0] - last[0]) * LOG2E)
    lead = stretches.rows(0)[0].load_x(refs[0])
    far = ~(last[0] - jnp.maximum(lead, log_of(first)) <= SAFE)
    wide = any_of(far & (last[1] != 0))
    own = lax.cond(wide, lambda: _exact(stretches, marks, silent, last, zero), lambda: fade * own)
    p = columns.row(marks[0], stretches.first)
    told = (exp2((p[None] - first[0]) * LOG2E) * own).sum(axis=0)
    kernel_parts.put(columns, words, i, (told,))
    scanned = scan(exclusive_map, (one, zero, fade, own), reverse=True)  # while others tell theirs
    others, add, factor, _ = scanned
    behind = kernel_parts.behind(columns, i, words, marks, told, dfinal_ref)
    grad = others * behind[None] + add
    lax.cond(
        wide,
        lambda: _exact(stretches, marks, refs, last, grad),
        lambda: _plain(stretches, marks, refs, last, grad),
    )
    before: jax.Array = at(factor, 0) * behind + told
    return before


def _load(stretches: Stretches, refs: Refs, k: Any) -> list[tuple[Tile, jax.Array, jax.Array]]:
    return [(row, row.load_x(refs[0]), row.load(refs[1])) for row in stretches.rows(k)]


def _below(pair: Pair, last: Pair) -> jax.Array:
    """The sum below the pivot of the last; 1 where that sums nothing."""
    return jnp.where(last[1] == 0, 1.0, below(pair, last[0]))


def _plain(
    stretches: Stretches, marks: tuple[Ref, Ref], refs: Refs, last: Pair, grad: jax.Array
) -> jax.Array:
    """dx; the gradient of the sum before each stretch, from that of the sum after, below `last`."""

    def tile(k: Any, grad: Pair) -> Pair:
        s, own = _below(stretches.pair(marks, k), last), jnp.zeros_like(grad[0])
        steps = []
        for row, x, do in _load(stretches, refs, k):
            e = exp2((x - last[0]) * LOG2E)
            s = s + e
            own = multiply_add(do, reciprocal(s), own)
            steps.append((row, e, do * reciprocal(s)))
        after = grad[0]
        for row, e, share in reversed(steps):
            after = after + share
            row.store_dx(refs[2], refs[0], e * after)
        return plus(*grad, own)

    result: jax.Array = stretches.through(tile, (grad, jnp.zeros_like(grad)), reverse=True)[0]
    return result


def _exact(
    stretches: Stretches, marks: tuple[Ref, Ref], refs: Refs, last: Pair, grad: jax.Array
) -> jax.Array:
    """The same by pairs; the result is below the pivot before each stretch."""

    def tile(k: Any, grad: Carry) -> Carry:
        p, s = stretches.pair(marks, k)
        rows, xs, dos = zip(*_load(stretches, refs, k), strict=True)
        top, factor, own, steps = steps_back(xs, dos, (p, s), p)
        behind, lost = risen(grad, top)
        for row, dx in zip(reversed(rows), dx_back(steps, behind), strict=True):
            row.store_dx(refs[2], refs[0], dx)
        return p, *plus(factor * behind, factor * lost, own)

    result: jax.Array = stretches.through(tile, carried((last[0], grad)), reverse=True)[1]
    return result
