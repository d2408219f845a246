"""Tiles whose range is too large for one pivot: a state (pivot, total) at every position.

Each lane scans its own steps, and an exclusive scan across lanes joins the groups. The pivots are a
running maximum, and totals a linear recurrence: all exponentials are taken before it. The backward
pass scans gradients likewise, each relative to its position's pivot: on its way to an earlier,
smaller pivot a gradient is multiplied by a factor of at most 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.fastmath import LOG2E, exp2, fmax, multiply_add
from pallas_ops.core.tiles import HUGE, Ref, flipped
from pallas_ops.core.triton_ext import scan
from pallas_ops.ops.logcumsumexp.reference import State
from pallas_ops.ops.logcumsumexp.tiles import (
    Segments,
    compensated,
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
from pallas_ops.scan.tile import Tile, loop

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
    """Whether any is true, as a value that the compiler knows to be the same in all lanes.

    Branches on it do not diverge. It is a reduction over 32 equal numbers.
    """
    return jnp.broadcast_to(jnp.where(x, 1, 0).max(), (32,)).max() > 0


def forward(
    ranges: Segments, tile: Tile, x: jax.Array, state: State, refs: tuple[Ref, Ref]
) -> State:
    """Scans a tile, whose numbers are x, and stores its output; returns the state after it."""
    (x_ref, out_ref), size = refs, ranges.plan.block_exact
    count = ranges.c.block_n // size

    def step(k: Any, state: State) -> State:
        part, y = tile, x
        if count > 1:
            part = ranges.tile(tile.first + k * size, size)
            y = ranges.load_x(part, x_ref)
        at = _states(y, state, ranges.view.mirrored)
        part.store(out_ref, log_of(at.pivot, at.total))
        return _after(state, y, at.groups)

    return loop(count, step, state)


def backward(
    ranges: Segments,
    tile: Tile,
    xs: tuple[jax.Array, jax.Array],  # x and do
    state: State,
    grad: State,
    refs: tuple[Ref, Ref, Ref | None],  # x, do, dx; nothing is stored without dx
) -> State:
    """dx of a tile; the gradient of the total before it, from that of the total after it."""
    (x_ref, do_ref, dx_ref), size = refs, ranges.plan.block_exact
    count, mirrored = ranges.c.block_n // size, ranges.view.mirrored
    states = _states_before(ranges, tile, xs[0], state)

    def step(k: Any, grad: State) -> State:
        k = count - 1 - k
        before = _state_at(states, k)
        part, (x, do) = tile, xs
        if count > 1:
            part = ranges.tile(tile.first + k * size, size)
            x, do = ranges.load_x(part, x_ref), part.load(do_ref)
        at = _states(x, before, mirrored)
        shares = share(do, at.total)
        if dx_ref is None:
            whole = sum_of(shares * at.since)
        else:
            grads, (p, own) = _gradients(at, shares, grad[:2], reverse=not mirrored)
            ranges.store_dx(part, dx_ref, x_ref, at.e * grads)
            whole = rebase(own, before.pivot[:, None], p).sum(axis=GROUPS - 1)
        factor = exp2((before.pivot - grad.pivot) * LOG2E)
        return State(before.pivot, *compensated(grad.total * factor, grad.error * factor, whole))

    return loop(count, step, grad)


def _states_before(ranges: Segments, tile: Tile, x: jax.Array, state: State) -> list[State]:
    """The states before each `block_exact` positions of a tile."""
    states, size = [state], ranges.plan.block_exact
    for start in range(0, ranges.c.block_n - size, size):
        there = (tile.order >= start) & (tile.order < start + size)
        y = jnp.where(there, x, -jnp.inf)
        states.append(_after(states[-1], y, _totals(y)))
    return states


def _state_at(states: list[State], k: Any) -> State:
    """states[k] for a traced k."""
    found = states[0]
    for i, state in enumerate(states[1:], 1):
        found = State(*(jnp.where(k == i, *pair) for pair in zip(state, found, strict=True)))
    return found


class _States(NamedTuple):
    """At each position i: pivot p_i and total s_i, e_i = exp(x_i - p_i), and two factors of totals.

    A pivot is the largest number so far, so s_i = factor_i s_(i-1) + e_i, with
    factor_i = exp(p_(i-1) - p_i). `since` is the product of these factors from the first position
    of the tile to i: exp(p - p_i), with the pivot p before the tile.
    """

    pivot: jax.Array
    total: jax.Array
    e: jax.Array
    factor: jax.Array
    since: jax.Array
    groups: Pair  # the total of each group's own numbers


def _states(x: jax.Array, before: State, mirrored: bool) -> _States:
    start = before.pivot[:, None], before.total[:, None]  # beside [ranges, groups, columns]
    if x.shape[GROUPS] > 1:
        groups = _totals(x)
        nothing = jnp.full_like(groups[0], -HUGE), jnp.zeros_like(groups[1])
        earlier: Any = exclusive_scan(
            join_in_scan, nothing, groups, axis=GROUPS - 1, reverse=mirrored
        )
        start = join(start, earlier)
    pivot, total = (jnp.broadcast_to(y[None], x.shape) for y in start)
    peaks = pivot, jnp.minimum(fmax(x, pivot), HUGE)
    previous, p = scan(_largest, peaks, axis=STEPS, reverse=mirrored)
    e = exp2((x - p) * LOG2E)
    factor = exp2((previous - p) * LOG2E)
    since, sums = scan(_recurrence, (factor, e), axis=STEPS, reverse=mirrored)
    s = multiply_add(since, total, sums)
    if x.shape[GROUPS] > 1:
        since *= exp2((before.pivot[:, None] - start[0]) * LOG2E)[None]
    else:
        groups = edge(p, STEPS, last=not mirrored), edge(sums, STEPS, last=not mirrored)
    return _States(p, s, e, factor, since, groups)


def _totals(x: jax.Array) -> Pair:
    """The total of each group, relative to its largest number."""
    top = finite(largest_in_lane(x))
    return top, exp2((x - top[None]) * LOG2E).sum(axis=STEPS)


def _after(state: State, x: jax.Array, groups: Pair) -> State:
    """The state with all of x in it, from the totals of its groups."""
    pivot = raised(largest(x), state.pivot)
    total, error = rescaled(state, pivot)
    added = rebase(groups[1], groups[0], pivot[:, None]).sum(axis=GROUPS - 1)
    return State(pivot, *compensated(total, error, added))


def _gradients(
    at: _States, shares: jax.Array, grad: Pair, *, reverse: bool
) -> tuple[jax.Array, Pair]:
    """The gradient u_i of the total at each position, relative to its pivot p_i.

    It is the sum of the shares from that position on, and of `grad`:
    u_i = factor_(i+1) u_(i+1) + share_i. Also each group's first pivot, and the sum of the group's
    own shares relative to it.
    """
    p, factor, (pivot, total) = at.pivot, at.factor, (y[:, None] for y in grad)
    if reverse:
        p, factor, shares = flipped(p), flipped(factor), flipped(shares)
    nothing = jnp.ones_like(p), jnp.full_like(p, -0.0)
    # With v_i = factor_i u_i: v_i = factor_i v_(i+1) + factor_i share_i.
    maps = factor, factor * shares
    factors, own = exclusive_scan(_recurrence, nothing, maps, axis=STEPS, reverse=False)
    own += shares
    top = edge(p, STEPS, last=False)  # each group's last and largest pivot
    first = edge(p, STEPS, last=True), edge(own, STEPS, last=True)
    after = rebase(total, top, pivot)
    if p.shape[GROUPS] > 1:
        nothing = jnp.full_like(top, jnp.inf), jnp.zeros_like(top)
        later = exclusive_scan(_add_share, nothing, first, axis=GROUPS - 1, reverse=reverse)
        after = after + rebase(later[1], top, later[0])
    u = multiply_add(factors, jnp.broadcast_to(after[None], p.shape), own)
    return (flipped(u) if reverse else u), first


def _add_share(later: Any, earlier: Any) -> Any:
    """The sum relative to the earlier (lower) pivot; the pivot of nothing is infinity."""
    p = jnp.minimum(earlier[0], later[0])
    return p, earlier[1] + later[1] * jnp.exp2((p - later[0]) * LOG2E)


def _recurrence(before: Any, after: Any) -> Any:
    """y -> factor y + x, one such map after another."""
    return before[0] * after[0], before[1] * after[0] + after[1]


def _largest(before: Any, after: Any) -> Any:
    """The largest of all but the last, and of all."""
    return jnp.maximum(before[1], after[0]), jnp.maximum(before[1], after[1])
