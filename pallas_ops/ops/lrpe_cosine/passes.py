"""The ops of lrpe_cosine's passes, and what a shard of the sequence does in each of them.

A shard's positions are those of its tokens in the whole sequence. For a softmax over the sequence
shards exchange a pivot and a total per feature, and backward the sum of a * da.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards, vary
from pallas_ops.core.dispatch import Op
from pallas_ops.ops.lrpe_cosine import kernel, reference
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, LrpeCosineConfig


class Ops(NamedTuple):
    forward: Op
    saving: Op
    backward: Op  # dx alone
    theta: Op
    gradients: Op  # of x and theta
    softmax: Op
    mean: Op


class Axes(NamedTuple):
    """The axes of theta (`heads` and `features`), of offset and of positions, and how many."""

    heads: str
    features: str
    offset: str
    positions: str
    num_axes: int


@functools.lru_cache(maxsize=128)
def ops(
    axes: Axes, act: str, heads_first: bool, per_batch: bool, config: LrpeCosineConfig | None
) -> Ops:
    tokens = "h n" if heads_first else "n h"
    x, out, column = f"b {tokens} d", f"b {tokens} two d", "b h d"
    theta = f"{axes.heads} {axes.features}"
    cached = f"{'b ' if per_batch else ''}n {axes.heads} d"
    saved = [column, column] if act == SOFTMAX_SEQUENCE else []
    if config is not None and config.cache_angles:
        saved.append(cached)
    unsharded = ["e", "k", "one", "two"]  # axes that every device needs in full
    if axes.num_axes > 1 or act == SOFTMAX_FEATURES or axes.features == "e":
        unsharded.append("d")
    summed = " ".join(axis for axis in "bnhd" if axis not in theta.split())
    where = theta, axes.offset, axes.positions
    of_shard: Any = lambda *_: None  # noqa: E731
    if axes.positions == "" or act == SOFTMAX_SEQUENCE:
        own = axes._replace(offset="", positions="b n k" if per_batch else "n k")
        passes = partial(ops, own, act, heads_first, per_batch, config)
        of_shard = lambda run, field: ("n", partial(run, field, passes))  # noqa: E731

    def forward(field: str, **facts: Any) -> Op:
        return Op(
            name="lrpe_cosine",
            kernel=partial(kernel.forward, save=field == "saving"),
            reference=partial(reference.forward, save=field == "saving"),
            operands=(x, *where, column, column),
            unsharded=tuple(unsharded),
            shards=of_shard(_forward_of_shard, field),
            **facts,
        )

    def backward(field: str, **facts: Any) -> Op:
        return Op(
            name=f"lrpe_cosine_{field}",
            operands=(x, out, *where, cached, column, column, column),
            unsharded=tuple(unsharded),
            shards=of_shard(_backward_of_shard, field),
            **facts,
        )

    def gradients(field: str, **facts: Any) -> Op:
        with_x = field == "gradients"
        return backward(
            field,
            kernel=partial(kernel.gradients, with_x=with_x),
            reference=partial(reference.gradients, with_x=with_x),
            **facts,
        )

    return Ops(
        forward=forward("forward", results=(out,)),
        saving=forward("saving", results=(out, *saved)),
        backward=backward(
            "backward", kernel=kernel.backward, reference=reference.backward, results=(x,)
        ),
        theta=gradients("theta", results=(theta,), summed=(summed,)),
        gradients=gradients("gradients", results=(x, theta), summed=("", summed)),
        softmax=Op(
            name="lrpe_cosine_softmax",
            kernel=kernel.softmax,
            reference=reference.softmax,
            operands=(x,),
            results=(column, column),
            unsharded=("n",),
        ),
        mean=Op(
            name="lrpe_cosine_mean",
            kernel=kernel.mean,
            reference=reference.mean,
            operands=(x, out, *where, cached, column, column, column),
            results=(column,),
            unsharded=("n", *unsharded),
        ),
    )


def _forward_of_shard(
    field: str,
    passes: Any,
    run: Any,
    axis_name: shards.Names,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *_: None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    n = x.shape[reference.tokens_axis(static["heads_first"])]
    where = theta, None, _positions(axis_name, n, theta, offset, positions, **static)
    columns: Any = None, None
    if static["act"] == SOFTMAX_SEQUENCE:
        columns = _joined(axis_name, *run(passes().softmax, x, **static))
    results: tuple[jax.Array, ...] = run(
        getattr(passes(), field), *vary.unify(x, *where, *columns), **static | dict(shape=None)
    )
    return results


def _backward_of_shard(
    field: str,
    passes: Any,
    run: Any,
    axis_name: shards.Names,
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *saved: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    n = dout.shape[reference.tokens_axis(static["heads_first"])]
    where = theta, None, _positions(axis_name, n, theta, offset, positions, **static)
    operands = [*vary.unify(x, dout, *where, *saved)]
    static["shape"] = None
    if static["act"] == SOFTMAX_SEQUENCE and field != "theta":
        (mean,) = run(passes().mean, *operands, **static)
        operands = [*vary.unify(*operands[:-1], lax.psum(mean, axis_name))]
    results: tuple[jax.Array, ...] = run(getattr(passes(), field), *operands, **static)
    return results


def _positions(
    axis_name: shards.Names,
    n: int,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    per_batch: bool,
    **_: Any,
) -> jax.Array:
    """Of a shard's n tokens [(B,) N, K]: as given, or counted in the whole sequence."""
    if positions is not None:
        return positions
    first = n * lax.axis_index(axis_name)
    points = reference.grid(shape or (), num_prefix_tokens, first=first, n=n)
    return reference.moved(points, offset, per_batch=per_batch).astype(theta.dtype)


def _joined(
    axis_name: shards.Names, pivot: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of all shards."""
    both = shards.gather(jnp.stack([pivot, total]), axis_name)
    pivots, totals = both[:, 0], both[:, 1]
    pivot = pivots.max(axis=0)
    return pivot, 1 / (totals * jnp.exp(pivots - pivot[None])).sum(axis=0)
