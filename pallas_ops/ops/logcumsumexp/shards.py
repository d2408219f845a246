"""logcumsumexp over the shards of its axis, with one exchange of a state a shard in each pass.

Forward, each shard sums up its part of x as a pair (pivot, total), and starts from the sum of the
pairs before it. Backward, each shard finds the gradient of the total that it started from. That of
the total which it ended with is the sum of those of the shards after it: below pivot p it is
u * exp(p - p_r), where u is that of shard r below p_r. p_r is not below p by more than 1, so no
factor overflows. Nothing goes through a logarithm, which would lose the digits of large states.

`run(op, *operands)` is an op on one shard alone. Shards are numbered in the order of the sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards, vary
from pallas_ops.core.dispatch import Op
from pallas_ops.core.shards import Names
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.reference import State, finite, pair_of

Pair = tuple[jax.Array, jax.Array]
Run = Callable[..., tuple[jax.Array, ...]]


class Ops(NamedTuple):
    """The passes over an axis, and the sums that shards exchange before them."""

    totals: Op
    forward: Op
    saving: Op
    backward_totals: Op
    backward: Op


class States(NamedTuple):
    """The pair that the first shard starts from, and those of all shards, in order [shards, ..]."""

    start: Pair
    shards: Pair


def forward(
    ops: Ops,
    run: Run,
    axis_name: Names,
    x: jax.Array,
    initial: jax.Array | None,
    total: jax.Array | None,
    *,
    params: Params,
    save: bool = False,
) -> tuple[jax.Array, ...]:
    """Output and final state; to save: the states of the shard's tiles."""
    states = _exchanged(ops, run, axis_name, x, initial, total, params)
    return _scan(partial(run, ops.saving if save else ops.forward), axis_name, x, states, params)


def forward_saving_shards(
    ops: Ops, run: Run, axis_name: Names, *operands: Any, params: Params
) -> tuple[jax.Array, ...]:
    """Saves not the states of tiles, which are not those of the whole axis, but those of shards.

    They lie where one device would have those of tiles, if there is room for all of them.
    """
    x, initial, total = operands
    states = _exchanged(ops, run, axis_name, x, initial, total, params)
    out, final, *_ = _scan(partial(run, ops.saving), axis_name, x, states, params)
    slots = 1 - (-x.shape[params.axis] * lax.axis_size(axis_name) // params.block_n)

    def in_slots(start: jax.Array, others: jax.Array) -> jax.Array:
        y = jnp.concatenate([start[None], others])[:slots]
        padding = [(0, slots - len(y) if i == 0 else 0, 0) for i in range(y.ndim)]
        return jnp.moveaxis(lax.pad(y, jnp.zeros((), y.dtype), padding), 0, params.axis)

    return out, final, *map(in_slots, *states)


def backward_from_shards(
    ops: Ops,
    run: Run,
    axis_name: Names,
    x: jax.Array,
    do: jax.Array,
    dfinal: jax.Array | None,
    *saved: jax.Array,
    params: Params,
) -> Pair:
    """Finds the states of the shard's tiles again; XLA may see that it has them."""
    p, t = (jnp.moveaxis(y, params.axis, 0) for y in saved)
    count = lax.axis_size(axis_name)
    if count < len(p):
        states = States((p[0], t[0]), (p[1 : count + 1], t[1 : count + 1]))
    else:
        states = _exchanged(ops, run, axis_name, x, p[0], t[0], params)
    _, _, *tiles = _scan(partial(run, ops.saving), axis_name, x, states, params)
    return backward(ops, run, axis_name, x, do, dfinal, *tiles, params=params)


def backward(
    ops: Ops,
    run: Run,
    axis_name: Names,
    x: jax.Array,
    do: jax.Array,
    dfinal: jax.Array | None,
    *saved: jax.Array,
    params: Params,
) -> Pair:
    """dx of the shard, and on all shards the gradient of the initial state."""
    (p, t), (last_p, last_t) = (
        [lax.index_in_dim(y, at, params.axis, keepdims=False) for y in saved] for at in (0, -1)
    )
    number, count = shards.order(axis_name, reverse=params.reverse)
    (u,) = run(ops.backward_totals, x, do, *saved)
    dfinal = jnp.zeros_like(u) if dfinal is None else dfinal
    end = jnp.where(last_t == 0, 0, dfinal / jnp.where(last_t == 0, 1, last_t))
    u = jnp.where(number == count - 1, u + end * jnp.exp(p - last_p), u)
    p, t, u = _gathered(axis_name, (p, t, u), params)
    after = _below(last_p, p, u, jnp.arange(count) > number) * finite(last_t)
    dlast = jnp.where(number == count - 1, dfinal, after)
    dx, _ = run(ops.backward, *vary.unify(x, do, dlast, *saved))
    return dx, t[0] * _below(p[0], p, u, jnp.arange(count) >= 0)


def _exchanged(
    ops: Ops,
    run: Run,
    axis_name: Names,
    x: jax.Array,
    initial: jax.Array | None,
    total: jax.Array | None,
    params: Params,
) -> States:
    """The states of all shards; the first one's has the initial state in it."""
    p, t = run(ops.totals, x)
    start = _nothing(p) if initial is None else pair_of(initial, total)
    number, _ = shards.order(axis_name, reverse=params.reverse)
    first = _joined(jnp.stack([start[0], p]), jnp.stack([start[1], t]))
    p, t = _gathered(axis_name, _choose(number == 0, first, (p, t)), params)
    return States(start, (p, t))


def _scan(
    scan: Run, axis_name: Names, x: jax.Array, states: States, params: Params
) -> tuple[jax.Array, ...]:
    """The results of the shard; the final state is that of all shards, on each of them."""
    number, count = shards.order(axis_name, reverse=params.reverse)
    p, t = states.shards
    earlier = _choose(_along(jnp.arange(count) < number, p), (p, t), _nothing(p))
    before = _choose(number == 0, states.start, _joined(*earlier))
    operands: Any = vary.unify(x, *before)
    out, _, *saved = scan(*operands)
    final = _joined(p, t)
    return out, State(*final, final[1]).log, *saved


def _gathered(axis_name: Names, xs: tuple[jax.Array, ...], params: Params) -> list[jax.Array]:
    """Each of xs, of all shards, along a new first axis."""
    stacked: Any = vary.unify(*xs)
    every = shards.gather(jnp.stack(stacked), axis_name)
    every = every[::-1] if params.reverse else every
    return [every[:, i] for i in range(len(xs))]


def _nothing(like: jax.Array) -> Pair:
    """The pair of no numbers."""
    return jnp.full_like(like, jnp.finfo(like.dtype).min), jnp.zeros_like(like)


def _choose(condition: jax.Array, ours: Any, others: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), ours, others)


def _joined(p: jax.Array, t: jax.Array) -> Pair:
    """The sum of pairs along the first axis."""
    pivot = p.max(axis=0)
    return pivot, (t * jnp.exp(p - pivot[None])).sum(axis=0)


def _below(pivot: jax.Array, p: jax.Array, u: jax.Array, among: jax.Array) -> jax.Array:
    """The sum of some of the gradients u, each below one of p, as a gradient below `pivot`."""
    among = _along(among, u)
    factor = jnp.exp(jnp.where(among, pivot[None] - p, -jnp.inf))
    return jnp.where(among, u * factor, 0).sum(axis=0)


def _along(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags beside the first axis of x."""
    return lax.expand_dims(flags, range(1, x.ndim))
