"""logcumsumexp over the shards of its axis, with one exchange of a state a shard in each pass.

Forward, each shard sums up its part of x as a pair (pivot, total), and starts from the sum of the
pairs before it. Backward, each shard finds the gradient of the total that it started from. That of
the total which it ended with is the sum of those of the shards after it: below pivot p it is
u * exp(p - p_r), where u is that of shard r below p_r. p_r is not below p by more than 1, so no
factor overflows. Nothing goes through a logarithm, which would lose the digits of large states.

`totals` and `scan` run the ops of one shard. Shards are numbered in the order of the sum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards, vary
from pallas_ops.core.shards import Names
from pallas_ops.ops.logcumsumexp.reference import State, finite, pair_of

Pair = tuple[jax.Array, jax.Array]
Call = Callable[..., tuple[jax.Array, ...]]


class States(NamedTuple):
    """The pair that the first shard starts from, and those of all shards, in order [shards, ..]."""

    start: Pair
    shards: Pair


def exchanged(
    totals: Call,
    axis_name: Names,
    x: jax.Array,
    initial: jax.Array | None,
    total: jax.Array | None,
    *,
    reverse: bool,
    **static: Any,
) -> States:
    """The states of all shards; the first one's has the initial state in it."""
    own = totals(x, reverse=reverse, **static)
    start = nothing(own[0]) if initial is None else pair_of(initial, total)
    number, _ = shards.order(axis_name, reverse=reverse)
    first = _joined(*(jnp.stack(pair) for pair in zip(start, own, strict=True)))
    p, t = _gathered(axis_name, _choose(number == 0, first, own), reverse=reverse)
    return States(start, (p, t))


def forward(
    scan: Call, axis_name: Names, x: jax.Array, states: States, *, reverse: bool, **static: Any
) -> tuple[jax.Array, ...]:
    """The results of the shard; the final state is that of all shards, on each of them."""
    number, count = shards.order(axis_name, reverse=reverse)
    p, t = states.shards
    before = _choose(number == 0, states.start, _joined(p, t, jnp.arange(count) < number))
    operands: Any = vary.unify(x, *before)
    out, _, *saved = scan(*operands, reverse=reverse, **static)
    final = _joined(p, t)
    return out, State(*final, final[1]).log, *saved


def backward(
    totals: Call,
    scan: Call,
    axis_name: Names,
    x: jax.Array,
    do: jax.Array,
    dfinal: jax.Array | None,
    saved_p: jax.Array,
    saved_s: jax.Array,
    *,
    axis: int,
    **static: Any,
) -> Pair:
    """dx of the shard, and on all shards the gradient of the initial state."""
    static |= dict(axis=axis)
    (p, t), (last_p, last_t) = (
        [lax.index_in_dim(y, at, axis, keepdims=False) for y in (saved_p, saved_s)]
        for at in (0, -1)
    )
    number, count = shards.order(axis_name, reverse=static["reverse"])
    (u,) = totals(x, do, saved_p, saved_s, **static)
    dfinal = jnp.zeros_like(u) if dfinal is None else dfinal
    end = jnp.where(last_t == 0, 0, dfinal / jnp.where(last_t == 0, 1, last_t))
    u = jnp.where(number == count - 1, u + end * jnp.exp(p - last_p), u)
    p, t, u = _gathered(axis_name, (p, t, u), reverse=static["reverse"])
    after = _below(last_p, p, u, jnp.arange(count) > number) * finite(last_t)
    dlast = jnp.where(number == count - 1, dfinal, after)
    dx, _ = scan(*vary.unify(x, do, dlast, saved_p, saved_s), **static)
    return dx, t[0] * _below(p[0], p, u, jnp.arange(count) >= 0)


def nothing(like: jax.Array) -> Pair:
    """The pair of no numbers."""
    return jnp.full_like(like, jnp.finfo(like.dtype).min), jnp.zeros_like(like)


def _choose(condition: jax.Array, ours: Any, others: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), ours, others)


def _gathered(axis_name: Names, xs: tuple[jax.Array, ...], *, reverse: bool) -> list[jax.Array]:
    """Each of xs, of all shards, along a new first axis."""
    stacked: Any = vary.unify(*xs)
    every = shards.gather(jnp.stack(stacked), axis_name)
    every = every[::-1] if reverse else every
    return [every[:, i] for i in range(len(xs))]


def _joined(p: jax.Array, t: jax.Array, among: jax.Array | None = None) -> Pair:
    """The sum of pairs along the first axis, or of some of them."""
    if among is not None:
        p, t = _choose(_along(among, p), (p, t), nothing(p))
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
