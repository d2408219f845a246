"""The variant that steps through a tile's positions, each column in a lane of its own.

It needs no test and no scan: pivot and sum follow every step. All rows are loaded ahead.
"""

import jax
import jax.numpy as jnp

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.logcumsumexp.sums import finite, inverse, log_of
from pallas_ops.ops.logcumsumexp.tiles import Columns, Pair, Tile


def forward(
    columns: Columns, first: jax.Array, before: Pair, x_ref: Ref, out_ref: Ref, size: int
) -> Pair:
    """The positions from `first` on, and the pair after them."""
    rows = [Tile(columns, first + i, 1) for i in range(size)]
    pair = before[0][None], before[1][None]
    for row, x in [(row, row.load_x(x_ref)) for row in rows]:
        pair, _, _ = _step(pair, x)
        row.store(out_ref, log_of(pair))
    return pair[0].reshape(-1), pair[1].reshape(-1)


def backward(
    columns: Columns,
    first: jax.Array,
    before: Pair,
    behind: jax.Array,
    refs: tuple[Ref, Ref, Ref | None],
    size: int,
) -> jax.Array:
    """dx from `first` on; the gradient of the state before, from `behind`, that after."""
    x_ref, do_ref, dx_ref = refs
    rows = [Tile(columns, first + i, 1) for i in range(size)]
    loaded = [(row.load_x(x_ref), row.load(do_ref)) for row in rows]
    pair = before[0][None], before[1][None]
    steps = []
    for row, (x, do) in zip(rows, loaded, strict=True):
        total = pair[1]
        pair, fade, e = _step(pair, x)
        share = inverse(pair[1])
        kept = jnp.where(total == jnp.inf, 1.0, fade * total) * share  # exp(o_{i-1} - o_i)
        steps.append((row, do, e * share, kept))
    grad = behind[None]
    for row, do, weight, kept in reversed(steps):
        grad = grad + do
        row.store_dx(dx_ref, x_ref, weight * grad)
        grad = kept * grad
    return grad.reshape(-1)


def _step(pair: Pair, x: jax.Array) -> tuple[Pair, jax.Array, jax.Array]:
    """The pair with x in it, and what the old sum and x were multiplied by."""
    pivot = jnp.maximum(pair[0], finite(x))
    fade = exp2((pair[0] - pivot) * LOG2E)
    e = exp2((x - pivot) * LOG2E)
    return (pivot, pair[1] * fade + e), fade, e
