"""What logcumsumexp means, in jax.numpy.

`jax.lax.cumlogsumexp` is not a reference: it sums bfloat16 in bfloat16, and its gradient is NaN
after two leading -inf.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import stop_gradient  # chex replaces `jax.lax.stop_gradient` while it checks gradients

from pallas_ops.core import shards
from pallas_ops.core.partition import gathered, reshard_like
from pallas_ops.core.tiles import OF_SYMBOLIC, wide
from pallas_ops.ops.logcumsumexp.config import Params

SHORTEST = 16  # positions of a segment
SIDE_BY_SIDE = 2**19  # numbers that one step of a scan may take side by side


class State(NamedTuple):
    """The log-sum-exp pivot + log(total), with total = sum exp(x - pivot).

    `error` is the compensation term of Kahan summation, so that many small numbers after a large
    one count. Pivot and error are constants to differentiation.
    """

    pivot: jax.Array
    total: jax.Array
    error: jax.Array

    @property
    def log(self) -> jax.Array:
        empty = self.total == 0
        return jnp.where(empty, -jnp.inf, self.pivot + jnp.log(jnp.where(empty, 1, self.total)))


def initial_state(
    given: jax.Array, x: jax.Array | jax.ShapeDtypeStruct, axis: int, clip: float | None
) -> jax.Array:
    """The given initial state, clipped, in float32 (float64), and without `axis`."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    full = jnp.broadcast_to(given.astype(wide(x.dtype)), shape)
    return clamp(full.squeeze(axis), clip)


def forward(
    x: jax.Array, *given: jax.Array | None, params: Params, save: bool = False
) -> tuple[jax.Array, ...]:
    """Output and final state; to save: pivots and totals before each tile, and after the last.

    States are in float32 (float64), the final one without the axis. What is given: the initial
    state, if any, and None; or a pivot and a total.
    """
    axis, numbers = params.axis, _numbers(x, params)
    start = _start(numbers, *given)
    what = "log and pair" if save else "log"
    last, (out, *states) = _scan(start, (numbers,), what, params.reverse)
    result = reshard_like(jnp.moveaxis(out, 0, axis).astype(x.dtype), x)
    if not save:
        return result, last.log
    pairs = zip(start, states, strict=False)
    return result, last.log, *(_before_tiles(first, y, params) for first, y in pairs), *last[:2]


saving = partial(forward, save=True)


def totals(x: jax.Array, *, params: Params) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of all of the axis."""
    numbers = _numbers(x, params)
    xs: tuple[jax.Array, ...] = (numbers,)
    if length := _segment_length(xs):
        xs = _totals(_segments(xs, length))[:2]
    return _scan(_start(numbers), xs, "nothing")[0][:2]


def backward(
    x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array, params: Params
) -> tuple[jax.Array, jax.Array]:
    """dx, and the gradient of the initial state, from the states that `forward` saved."""
    dx, total, dtotal = _pulled(x, do, dfinal, *saved, params=params)
    return reshard_like(dx, x), total * dtotal


def backward_totals(
    x: jax.Array, do: jax.Array, *saved: jax.Array, params: Params
) -> tuple[jax.Array]:
    """The gradient of the total before the first tile, without that of the final state."""
    return (_pulled(x, do, None, *saved, params=params)[2],)


def _pulled(
    x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array, params: Params
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx, the total before the first tile and its gradient."""
    pivot, total = (of_first_tile(gathered(y, params.axis), params) for y in saved[:2])
    dfinal = jnp.zeros_like(total) if dfinal is None else dfinal
    x, do = (gathered(y, params.axis) for y in (x, do))
    pull = jax.vjp(lambda x, total: forward(x, pivot, total, params=params), x, total)[1]
    dx, dtotal = pull((do, dfinal))
    return dx, total, dtotal


def _numbers(x: jax.Array, params: Params) -> jax.Array:
    """x in float32 (float64), clipped, with the scanned axis first."""
    y = gathered(x, params.axis).astype(wide(x.dtype))
    return clamp(jnp.moveaxis(y, params.axis, 0), params.clip)


def _before_tiles(first: jax.Array, y: jax.Array, params: Params) -> jax.Array:
    """The state before each tile: `first`, then from y, which has the state after each position."""
    y, block_n = y[::-1] if params.reverse else y, params.block_n
    y = jnp.concatenate([first[None], y[block_n - 1 : max(0, len(y) - 1) : block_n]])
    return jnp.moveaxis(y[::-1] if params.reverse else y, 0, params.axis)


def of_first_tile(y: jax.Array, params: Params) -> jax.Array:
    """The entry of y of the tile that the sum meets first. y has one entry a tile, in x's order."""
    return lax.index_in_dim(y, -1 if params.reverse else 0, params.axis, keepdims=False)


def _scan(
    state: State, xs: tuple[jax.Array, ...], what: str, reverse: bool = False
) -> tuple[State, Any]:
    """The final state, and what is emitted (`_EMITTED`) for each of xs.

    xs are numbers, or pivots and totals. Their axis is cut into segments that are scanned side by
    side. First the total of each segment is found; this function scans the totals, which gives the
    state before each segment. Then each segment is scanned from there.
    """
    n, length = xs[0].shape[0], _segment_length(xs)
    if length:
        xs = _segments(xs, length)
        _, state = _scan(state, _totals(xs)[:2], "before", reverse)
    last, emitted = lax.scan(_step(what), state, xs, reverse=reverse)
    if length:
        last = jax.tree.map(lambda x: x[0 if reverse else -1], last)
        emitted = jax.tree.map(lambda x: lax.collapse(x.swapaxes(0, 1), 0, 2)[:n], emitted)
    return last, emitted


# What a step of a scan emits, of the states before and after it.
_EMITTED: dict[str, Callable[[State, State], Any]] = {
    "nothing": lambda *_: None,
    "before": lambda before, _: before,
    "log": lambda _, after: (after.log,),
    "log and pair": lambda _, after: (after.log, after.pivot, after.total),
}


@functools.cache
def _step(what: str) -> Callable[..., tuple[State, Any]]:
    """One function for each of these, as an eager `lax.scan` compiles each function anew."""

    def step(before: State, x: tuple[jax.Array, ...]) -> tuple[State, Any]:
        after = _sum(before, *x)
        return after, _EMITTED[what](before, after)

    return step


def _segments(xs: tuple[jax.Array, ...], length: int) -> tuple[jax.Array, ...]:
    """xs with a second axis of segments."""
    n, count = xs[0].shape[0], -(-xs[0].shape[0] // length)
    padding = [(0, length * count - n, 0), *[(0, 0, 0)] * (xs[0].ndim - 1)]
    return tuple(
        lax.pad(x, jnp.array(-jnp.inf if i == 0 else 0, x.dtype), padding)
        .reshape(count, length, *x.shape[1:])
        .swapaxes(0, 1)
        for i, x in enumerate(xs)
    )


def _totals(xs: tuple[jax.Array, ...]) -> State:
    """The state of each segment, as if nothing came before it."""
    return lax.scan(_step("nothing"), _start(xs[0]), xs)[0]


def _segment_length(xs: tuple[jax.Array, ...]) -> int | None:
    """Positions of one of some sqrt(n) segments (more if there are few columns); None: not cut."""
    n, columns = xs[0].shape[0], math.prod(xs[0].shape[1:])
    if not isinstance(n, int):
        return OF_SYMBOLIC if len(xs) == 1 else None  # totals of segments are not cut again
    side_by_side = SIDE_BY_SIDE // max(1, columns) if isinstance(columns, int) else 1
    count = min(n // SHORTEST, max(math.isqrt(n), side_by_side))
    return -(-n // count) if count > 1 else None


def _sum(state: State, x: jax.Array, total: jax.Array | int = 1) -> State:
    """The state with total * exp(x) in it.

    The pivot is raised only where x exceeds it by more than 1. So the old total is multiplied by
    exactly 1 or by at most 1 / e: the rounding errors of many factors near 1 would add up.
    """
    largest = jnp.finfo(x.dtype).max
    raised = jnp.where(x > state.pivot + 1, jnp.minimum(x, largest), state.pivot)
    pivot = stop_gradient(raised)
    fade = jnp.exp(state.pivot - pivot)
    before = state.total * fade
    added = total * jnp.exp(x - pivot) + state.error * fade
    after = before + added
    error = jnp.where(jnp.abs(after) < jnp.inf, added - (after - before), 0)
    return State(pivot, after, stop_gradient(error))


def _start(
    numbers: jax.Array, initial: jax.Array | None = None, total: jax.Array | None = None
) -> State:
    """The state before any number, from what was given if anything was."""
    if initial is not None:
        pivot, total = pair_of(initial, total)
        return State(pivot, total, stop_gradient(jnp.zeros_like(total)))
    column = numbers.sum(0)  # only its type is used, not its values
    lowest, zero = pair_of_nothing(column)
    return State(*shards.unify(lowest, zero, zero, column)[:3])


def pair_of_nothing(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of no numbers, in the shape and dtype of x."""
    return jnp.full_like(x, jnp.finfo(x.dtype).min), jnp.zeros_like(x)


def pair_of(initial: jax.Array, total: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The pivot and total of a logarithm; or what was given, if that is a pair already."""
    if total is not None:
        return stop_gradient(initial), total
    pivot = stop_gradient(finite(initial))
    return pivot, jnp.exp(initial - pivot)


def finite(x: jax.Array) -> jax.Array:
    """Infinities as the largest finite numbers; NaN stays."""
    limit = jnp.finfo(x.dtype).max
    return jnp.where(x > limit, limit, jnp.where(x < -limit, -limit, x))


def clamp(x: jax.Array, clip: float | None) -> jax.Array:
    """x in [-clip, clip], with gradient 0 for what was outside; NaN stays."""
    if clip is None:
        return x
    return jnp.where(x > clip, clip, jnp.where(x < -clip, -clip, x))
