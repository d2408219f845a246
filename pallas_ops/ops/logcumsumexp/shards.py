"""logcumsumexp over the shards of its axis, with one exchange of a state a shard in each pass.

Forward, each shard sums up its part of x as a pair (pivot, total), and starts from the sum of the
pairs before it. Backward, each shard finds the gradient of the total that it started from. That of
the total which it ended with is the sum of those of the shards after it: below pivot p it is
u * exp(p - p_r), where u is that of shard r below p_r. p_r is not below p by more than 1, so no
factor overflows. Nothing goes through a logarithm, which would lose the digits of large states.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards
from pallas_ops.core.tiles import along
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.reference import State, finite, pair_of, pair_of_nothing
from pallas_ops.scan.segments import Pair, sum_pairs


class Shard:
    """One of the shards of an axis, which are numbered in the order of the sum.

    `run(name, *operands)` is a pass (`vjp.op`) on this shard alone.
    """

    def __init__(self, run: Callable[..., Any], axis_name: shards.Names, params: Params) -> None:
        self.run, self.axis_name, self.params = run, axis_name, params
        self.number, self.count = shards.order(axis_name, reverse=params.reverse)

    def forward(
        self, x: jax.Array, *given: jax.Array | None, save: bool = False
    ) -> tuple[jax.Array, ...]:
        """Output and final state, from what the op is given; to save: the states of tiles."""
        own = self.run("totals", x)
        start = _start(own, *given)
        name = "saving" if save else "forward"
        return self._scan(name, x, start, self._exchanged(own, start))

    def forward_saving_start(self, x: jax.Array, *given: jax.Array | None) -> tuple[jax.Array, ...]:
        """Saves what the first shard starts from, in the first of the slots for states of tiles.

        A shard has not the states of all tiles, and XLA may shard the backward pass in another way.
        That reads nothing else; where it is not sharded at all, its result is NaN.
        """
        own, axis = self.run("totals", x), self.params.axis
        start = _start(own, *given)
        out, final = self._scan("forward", x, start, self._exchanged(own, start))
        tiles = -(-x.shape[axis] * self.count // self.params.block_n)
        padding = [(0, tiles if i == axis else 0, 0) for i in range(x.ndim)]
        saved = (jnp.expand_dims(y, axis) for y in start)
        return out, final, *(lax.pad(y, jnp.full((), jnp.nan, y.dtype), padding) for y in saved)

    def backward_from_start(
        self, x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array
    ) -> Pair:
        """Runs the forward kernel again for the states of the shard's tiles."""
        axis = self.params.axis
        start: Any = tuple(lax.index_in_dim(y, 0, axis, keepdims=False) for y in saved)
        states = self._exchanged(self.run("totals", x), start)
        _, _, *tiles = self._scan("saving", x, start, states)
        return self.backward(x, do, dfinal, *tiles)

    def backward(
        self, x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array
    ) -> Pair:
        """dx of the shard, and on all shards the gradient of the initial state."""
        (p, t), (last_p, last_t) = (
            [lax.index_in_dim(y, at, self.params.axis, keepdims=False) for y in saved]
            for at in (0, -1)
        )
        is_last, numbers = self.number == self.count - 1, jnp.arange(self.count)
        (u,) = self.run("backward_totals", x, do, *saved)
        dfinal = jnp.zeros_like(u) if dfinal is None else dfinal
        end = jnp.where(last_t == 0, 0, dfinal / jnp.where(last_t == 0, 1, last_t))
        u = jnp.where(is_last, u + end * jnp.exp(p - last_p), u)
        p, t, u = self._gathered(p, t, u)
        after = _sum_gradients(last_p, p, u, numbers > self.number) * finite(last_t)
        dlast = jnp.where(is_last, dfinal, after)
        dx, _ = self.run("backward", *shards.unify(x, do, dlast, *saved))
        return dx, t[0] * _sum_gradients(p[0], p, u, numbers >= 0)

    def _exchanged(self, own: Pair, start: Pair) -> Pair:
        """The states of all shards; the first one's has the initial state in it."""
        p, t = map(jnp.stack, zip(start, own, strict=True))
        first = sum_pairs((p, t), axis=0)
        p, t = self._gathered(*_choose(self.number == 0, first, own))
        return p, t

    def _scan(self, name: str, x: jax.Array, start: Pair, states: Pair) -> tuple[jax.Array, ...]:
        """The results of the shard; the final state is that of all shards, on each of them.

        From the pair that the first shard starts from, and those of all, in order [shards, ..].
        """
        p, t = states
        earlier = along(jnp.arange(self.count) < self.number, p)
        before = sum_pairs(_choose(earlier, (p, t), pair_of_nothing(p)), axis=0)
        operands = shards.unify(x, *_choose(self.number == 0, start, before))
        out, _, *saved = self.run(name, *operands)
        final = sum_pairs((p, t), axis=0)
        return out, State(*final, final[1]).log, *saved

    def _gathered(self, *xs: jax.Array) -> list[jax.Array]:
        """All shards' xs, along a new first axis of each."""
        every = shards.gather(jnp.stack(shards.unify(*xs)), self.axis_name)
        every = every[::-1] if self.params.reverse else every
        return [every[:, i] for i in range(len(xs))]


def _start(own: Pair, initial: jax.Array | None, total: jax.Array | None) -> Pair:
    return pair_of_nothing(own[0]) if initial is None else pair_of(initial, total)


def _choose(condition: jax.Array, ours: Any, others: Any) -> Any:
    return [jnp.where(condition, x, y) for x, y in zip(ours, others, strict=True)]


def _sum_gradients(pivot: jax.Array, p: jax.Array, u: jax.Array, included: jax.Array) -> jax.Array:
    """The sum, relative to `pivot`, of the included gradients u, each relative to its p."""
    included = along(included, u)
    factor = jnp.exp(jnp.where(included, pivot[None] - p, -jnp.inf))
    return jnp.where(included, u * factor, 0).sum(axis=0)
