"""logcumsumexp over the shards of its axis, with one exchange of a state a shard in each pass.

(Where XLA shards the passes, the backward pass has two exchanges, and so has the forward pass if
shards do not begin at tiles.)

Forward, each shard sums up its part of x as a pair (pivot, total), and starts from the sum of the
pairs before it. Backward, each shard r finds u_r, the gradient of the total that it started from,
relative to that total's pivot p_r. The gradient of the total that a shard ended with, relative to
its pivot p, is the sum of u_r * exp(p - p_r) over the shards r after it. p_r >= p - 1, so no factor
overflows. Nothing goes through a logarithm, which would lose the digits of large states.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards
from pallas_ops.core.tiles import along, wide
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.reference import (
    State,
    clamp,
    finite,
    of_first_tile,
    pair_of,
    pair_of_nothing,
)
from pallas_ops.scan.segments import Pair, join_in_scan, sum_pairs


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
        before, last = self._states(self.run("totals", x), *given)
        out, _, *saved = self.run("saving" if save else "forward", *shards.unify(x, *before))
        return out, _log(last), *saved

    def forward_saving(self, x: jax.Array, *given: jax.Array | None) -> tuple[jax.Array, ...]:
        """`forward` where XLA shards the passes: what one device would save, or its shard of that.

        XLA may shard the backward pass in another way, or not at all. Where shards begin at tiles,
        their states are sharded like x. Elsewhere every shard has the states of all tiles: each
        shard scans its numbers a second time, from its first tile on (those before that tile are
        rolled to the end), and the shards exchange the states of their tiles.
        """
        axis, n, block_n = self.params.axis, x.shape[self.params.axis], self.params.block_n
        before, last = self._states(self.run("totals", x), *given)
        if n % block_n == 0:
            out, _, *saved = self.run("saving", x, *before)
            return out, _log(last), *saved[:2], *last
        out, _ = self.run("forward", x, *before)
        skipped = -(self.number * n) % block_n
        before = join_in_scan(before, self._first(x, skipped))
        rolled = jnp.roll(x, skipped if self.params.reverse else -skipped, axis)
        saved = self.run("saving", rolled, *before)[2:4]
        # How many tiles begin before each shard, and how many in it.
        earlier = [-(-i * n // block_n) for i in range(self.count + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(earlier)]
        return out, _log(last), *self._joined(saved, sizes), *last

    def backward_from_saved(
        self, x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array
    ) -> Pair:
        """From what `forward_saving` saved.

        Where shards do not begin at tiles, another scan finds the states of the shard's own tiles.
        """
        axis = self.params.axis
        first = [of_first_tile(y, self.params) for y in saved[:2]]
        if x.shape[axis] % self.params.block_n == 0:
            # The last state of a shard is the first of the next one.
            after = [
                lax.dynamic_index_in_dim(y, self.number + 1, keepdims=False)
                for y in self._gathered(*first)
            ]
            last = _choose(self.number == self.count - 1, saved[2:], after)
            saved = (*saved[:2], *last)
        else:
            before, _ = self._states(self.run("totals", x), *first)
            saved = self.run("saving", x, *before)[2:]
        return self.backward(x, do, dfinal, *saved)

    def backward(
        self, x: jax.Array, do: jax.Array, dfinal: jax.Array | None, *saved: jax.Array
    ) -> Pair:
        """dx of the shard, and on all shards the gradient of the initial state."""
        p, t = (of_first_tile(y, self.params) for y in saved[:2])
        last_p, last_t = saved[2:]
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

    def _states(
        self, own: Pair, initial: jax.Array | None = None, total: jax.Array | None = None
    ) -> tuple[Pair, Pair]:
        """The state before the shard, and the one after all shards.

        `own` is the sum of the shard's own numbers.
        """
        start = pair_of_nothing(own[0]) if initial is None else pair_of(initial, total)
        p, t = self._gathered(*_choose(self.number == 0, join_in_scan(start, own), own))
        earlier = along(jnp.arange(self.count) < self.number, p)
        before = sum_pairs(_choose(earlier, (p, t), pair_of_nothing(p)), axis=0)
        return _choose(self.number == 0, start, before), sum_pairs((p, t), axis=0)

    def _first(self, x: jax.Array, count: jax.Array) -> Pair:
        """The sum of the shard's first `count` numbers, which are fewer than a tile has."""
        axis, n = self.params.axis, x.shape[self.params.axis]
        size = min(n, self.params.block_n)
        begin, end = (n - size, n) if self.params.reverse else (0, size)
        number = jnp.arange(size)[::-1] if self.params.reverse else jnp.arange(size)
        x = lax.slice_in_dim(x, begin, end, axis=axis).astype(wide(x.dtype))
        x = jnp.where(along(number < count, x, axis), clamp(x, self.params.clip), -jnp.inf)
        pivot = finite(x.max(axis))
        return pivot, jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis)

    def _joined(self, states: list[jax.Array], sizes: list[int]) -> list[jax.Array]:
        """The states of each shard's first `sizes[shard]` tiles, one shard after the other."""
        axis, most = self.params.axis, max(sizes)

        def in_order(x: jax.Array) -> jax.Array:
            return jnp.flip(x, axis) if self.params.reverse else x

        every = self._gathered(*(lax.slice_in_dim(in_order(y), 0, most, axis=axis) for y in states))
        parts = [
            [lax.slice_in_dim(y, 0, n, axis=axis) for y, n in zip(ys, sizes, strict=True)]
            for ys in every
        ]
        return [in_order(jnp.concatenate(ys, axis)) for ys in parts]

    def _gathered(self, *xs: jax.Array) -> list[jax.Array]:
        """All shards' xs, along a new first axis of each."""
        every = shards.gather(jnp.stack(shards.unify(*xs)), self.axis_name)
        every = every[::-1] if self.params.reverse else every
        return [every[:, i] for i in range(len(xs))]


def _log(pair: Pair) -> jax.Array:
    p, t = pair
    return State(p, t, t).log


def _choose(condition: jax.Array, ours: Any, others: Any) -> Any:
    return [jnp.where(condition, x, y) for x, y in zip(ours, others, strict=True)]


def _sum_gradients(pivot: jax.Array, p: jax.Array, u: jax.Array, included: jax.Array) -> jax.Array:
    """The sum, relative to `pivot`, of the included gradients u, each relative to its p."""
    included = along(included, u)
    factor = jnp.exp(jnp.where(included, pivot[None] - p, -jnp.inf))
    return jnp.where(included, u * factor, 0).sum(axis=0)
