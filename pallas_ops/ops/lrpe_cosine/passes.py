"""The ops of lrpe_cosine's passes, and what a shard of the sequence does in each of them.

A shard's positions are those of its tokens in the whole sequence. For a softmax over the sequence
shards exchange a pivot and a total per feature, and backward the sum of a * da.
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import shards, vary
from pallas_ops.core.dispatch import Op
from pallas_ops.ops.lrpe_cosine import kernel, reference
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, Params


def op(name: str, p: Params) -> Op:
    """The op of a pass: forward, saving, backward (dx), theta, gradients (both), softmax, mean."""
    caches_angles = p.config is not None and p.config.cache_angles
    return _op(name, p.act, p.theta, p.heads_first, p.per_batch, caches_angles)


@functools.lru_cache(maxsize=1024)
def _op(
    name: str, act: str, theta: str, heads_first: bool, per_batch: bool, caches_angles: bool
) -> Op:
    """`op`, the same object for all calls with these axes: caches know an `Op` by its identity."""
    tokens, batch = "h n" if heads_first else "n h", "b " if per_batch else ""
    x, out, feature = f"b {tokens} d", f"b {tokens} two d", "b h d"
    heads, width = theta.split()
    cached = f"{batch}n {heads} d"
    where = theta, batch.strip() or "one", f"{batch}n k"  # theta, offset, positions
    softmax = feature, feature  # pivot and share
    saved = [*softmax] * (act == SOFTMAX_SEQUENCE) + [cached] * caches_angles
    forward, backward = (x, *where, *softmax), (x, out, *where, cached, *softmax, feature)
    passes: dict[str, Any] = {
        "forward": (kernel.forward, reference.forward, forward, (out,)),
        "saving": (kernel.forward, reference.forward, forward, (out, *saved)),
        "backward": (kernel.backward, reference.backward, backward, (x,)),
        "theta": (kernel.gradients, reference.gradients, backward, (theta,)),
        "gradients": (kernel.gradients, reference.gradients, backward, (x, theta)),
        "softmax": (kernel.softmax, reference.softmax, (x,), softmax),
        "mean": (kernel.mean, reference.mean, backward, (feature,)),
    }
    launcher, definition, operands, results = passes[name]
    facts: dict[str, bool] = {}
    if operands is forward:
        facts = dict(save=name == "saving")
    if theta in results:
        facts = dict(with_x=name == "gradients")
    unsharded = ["e", "k", "one", "two"]  # axes that every device needs in full
    if act == SOFTMAX_FEATURES or width == "e":
        unsharded.append("d")
    of_shard = _forward_of_shard if operands is forward else _backward_of_shard
    if name in ("softmax", "mean"):
        unsharded.append("n")
    missing = " ".join(axis for axis in "bnhd" if axis not in (heads, width))
    return Op(
        name="lrpe_cosine" if operands is forward else f"lrpe_cosine_{name}",
        kernel=partial(launcher, **facts),
        reference=partial(definition, **facts),
        operands=operands,
        results=results,
        unsharded=tuple(unsharded),
        summed=tuple(missing if result == theta else "" for result in results),
        shards=None if "n" in unsharded else ("n", partial(of_shard, name)),
    )


def _forward_of_shard(
    name: str,
    run: Any,
    axis_name: shards.Names,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    *,
    p: Params,
) -> tuple[jax.Array, ...]:
    positions = _positions(p, axis_name, x, theta, offset, positions)
    if p.act == SOFTMAX_SEQUENCE and pivot is None:
        pivot, share = _joined(axis_name, *run(op("softmax", p), x, p=p))
    operands = vary.unify(x, theta, None, positions, pivot, share)
    results: tuple[jax.Array, ...] = run(op(name, p), *operands, p=p)
    return results


def _backward_of_shard(
    name: str,
    run: Any,
    axis_name: shards.Names,
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *others: jax.Array | None,
    p: Params,
) -> tuple[jax.Array, ...]:
    positions = _positions(p, axis_name, dout, theta, offset, positions)
    *operands, mean = vary.unify(x, dout, theta, None, positions, *others)
    if p.act == SOFTMAX_SEQUENCE and name != "theta" and mean is None:
        (of_shard,) = run(op("mean", p), *operands, None, p=p)
        mean = lax.psum(of_shard, axis_name)
    results: tuple[jax.Array, ...] = run(op(name, p), *vary.unify(*operands, mean), p=p)
    return results


def _positions(
    p: Params,
    axis_name: shards.Names,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    """Of the shard's tokens [(B,) N, K]: as given, or counted in the whole sequence."""
    if positions is not None:
        return positions
    n = x.shape[p.tokens_axis]
    first = n * lax.axis_index(axis_name)
    return reference.counted(p, n, offset, first).astype(theta.dtype)


def _joined(
    axis_name: shards.Names, pivot: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of all shards."""
    both = shards.gather(jnp.stack([pivot, total]), axis_name)
    pivots, totals = both[:, 0], both[:, 1]
    pivot = pivots.max(axis=0)
    return pivot, 1 / (totals * jnp.exp(pivots - pivot[None])).sum(axis=0)
