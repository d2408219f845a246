"""Tiles whose range is too large for one pivot: a state (pivot, total) at every position.

Each lane scans its own steps as states, and an exclusive scan across lanes joins the groups. The
backward pass scans gradients likewise, each relative to its position's pivot: on its way to an
earlier, smaller pivot a gradient is multiplied by a factor of at most 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.tiles import HUGE, Ref
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.reference import State
from pallas_ops.ops.logcumsumexp.tiles import (
    Segments,
    compensated,
    exponentials,
    finite,
    largest,
    largest_in_lane,
    log_of,
    raised,
    rebase,
    rescaled,
    share,
    sum_of,
)
from pallas_ops.scan.running import GROUPS, STEPS, edge, exclusive_scan
from pallas_ops.scan.segments import Pair, join, join_in_scan
from pallas_ops.scan.tile import Tile, loop, per_range

FAINT_BITS = 16  # a prefix below 2**-16 of exp(pivot) loses digits in its logarithm
SAFE = FAINT_BITS / LOG2E


def range_too_large(x: jax.Array, state: State, pivot: jax.Array) -> jax.Array:
    """Whether some prefix of a tile may lie too far below the tile's pivot.

    None lies below the state before the tile. So only where the pivot has risen far does the
    smallest finite number of the tile have to be found.
    """

    def smallest_is_far() -> jax.Array:
        smallest = jnp.where(x == -jnp.inf, jnp.inf, x).min(axis=STEPS).min(axis=GROUPS - 1)
        low = jnp.minimum(smallest, jnp.where(state.total == 0, jnp.inf, state.pivot))
        return any_of(~(pivot - low <= SAFE))

    suspect = any_of(~(pivot - state.pivot <= SAFE))
    return jnp.asarray(lax.cond(suspect, smallest_is_far, lambda: suspect))


def any_of(x: jax.Array) -> jax.Array:
    """Whether any is true, in a form by which the compiler sees that a warp does not diverge.

    That form is a reduction over 32 equal numbers.
    """
    return jnp.broadcast_to(jnp.where(x, 1, 0).max(), (32,)).max() > 0


def forward(ranges: Segments, first: Any, state: State, x_ref: Ref, out_ref: Ref) -> State:
    """Scans a tile and stores its output; returns the state after it."""
    size = ranges.plan.block_exact

    def step(k: Any, state: State) -> State:
        tile = ranges.exact_tile(first + k * size)
        x = ranges.load_x(tile, x_ref)
        tile.store(out_ref, log_of(*_states(x, state, ranges.view.mirrored)))
        return _after(state, x)

    return loop(ranges.c.block_n // size, step, state)


def backward(
    ranges: Segments,
    first: Any,
    states: list[State],  # before each `block_exact` positions
    grad: State,
    refs: tuple[Ref, Ref, Ref | None],  # x, do, dx; nothing is stored without dx
) -> State:
    """dx of a tile; the gradient of the total before it, from that of the total after it."""
    x_ref, do_ref, dx_ref = refs
    size, mirrored = ranges.plan.block_exact, ranges.view.mirrored
    count = ranges.c.block_n // size

    def step(k: Any, grad: State) -> State:
        k = count - 1 - k
        before = _state_at(states, k)
        tile = ranges.exact_tile(first + k * size)
        x, do = ranges.load_x(tile, x_ref), tile.load(do_ref)
        p, s = _states(x, before, mirrored)
        shares = share(do, s)
        if dx_ref is not None:
            total = _gradients(p, shares, (grad.pivot, grad.total), reverse=not mirrored)
            ranges.store_dx(tile, dx_ref, x_ref, exp2((x - p) * LOG2E) * total)
        factor = exp2((before.pivot - grad.pivot) * LOG2E)
        whole = sum_of(rebase(shares, per_range(before.pivot), p))
        return State(before.pivot, *compensated(grad.total * factor, grad.error * factor, whole))

    return loop(count, step, grad)


def states_before(ranges: Segments, tile: Tile, x: jax.Array, state: State) -> list[State]:
    """The states before each `block_exact` positions of a tile."""
    states, size = [state], ranges.plan.block_exact
    for start in range(0, ranges.c.block_n - size, size):
        there = (tile.order >= start) & (tile.order < start + size)
        states.append(_after(states[-1], jnp.where(there, x, -jnp.inf)))
    return states


def _state_at(states: list[State], k: Any) -> State:
    """states[k] for a traced k."""
    found = states[0]
    for i, state in enumerate(states[1:], 1):
        found = State(*(jnp.where(k == i, *pair) for pair in zip(state, found, strict=True)))
    return found


def _states(x: jax.Array, before: State, mirrored: bool) -> Pair:
    """The pivot and total at each position."""
    p = finite(x)
    start = before.pivot[:, None], before.total[:, None]  # beside [ranges, groups, columns]
    axis = GROUPS if x.shape[STEPS] == 1 else STEPS
    own: Any = scan(join_in_scan, (p, exp2((x - p) * LOG2E)), axis=axis, reverse=mirrored)
    if axis == STEPS and x.shape[GROUPS] > 1:
        top = finite(largest_in_lane(x))
        total = exp2((x - top[None]) * LOG2E).sum(axis=STEPS)
        nothing = jnp.full_like(top, -HUGE), jnp.zeros_like(total)
        groups = top, total
        earlier: Any = exclusive_scan(
            join_in_scan, nothing, groups, axis=GROUPS - 1, reverse=mirrored
        )
        start = join(start, earlier)
    return join((start[0][None], start[1][None]), own)


def _after(state: State, x: jax.Array) -> State:
    """The state with all of x in it."""
    top = finite(largest(x))
    pivot = raised(top, state.pivot)
    total, error = rescaled(state, pivot)
    added = rebase(sum_of(exponentials(x, top)), top, pivot)
    return State(pivot, *compensated(total, error, added))


def _gradients(p: jax.Array, shares: jax.Array, grad: Pair, *, reverse: bool) -> jax.Array:
    """The gradient of the total at each position, relative to its pivot p.

    It is the sum of the shares from that position on, and of `grad`.
    """
    pivot, total = (y[:, None] for y in grad)
    axis = GROUPS if p.shape[STEPS] == 1 else STEPS
    _, own = scan(_add_share, (p, shares), axis=axis, reverse=reverse)
    if axis == GROUPS:
        return own + rebase(total[None], p, pivot[None])
    top = p.max(axis=STEPS)  # each group's last and largest pivot
    after = rebase(total, top, pivot)
    if p.shape[GROUPS] > 1:
        first = tuple(edge(y, STEPS, last=not reverse) for y in (p, own))
        nothing = jnp.full_like(top, jnp.inf), jnp.zeros_like(top)
        later = exclusive_scan(_add_share, nothing, first, axis=GROUPS - 1, reverse=reverse)
        after = after + rebase(later[1], top, later[0])
    return own + rebase(after[None], p, top[None])


def _add_share(later: Any, earlier: Any) -> Any:
    """The sum relative to the earlier (lower) pivot; the pivot of nothing is infinity."""
    p = jnp.minimum(earlier[0], later[0])
    return p, earlier[1] + later[1] * jnp.exp2((p - later[0]) * LOG2E)
