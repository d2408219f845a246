"""The ops of logcumsumexp's passes, and what a shard of the axis does in each pass."""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.core.dispatch import Op
from pallas_ops.core.shards import AxisName
from pallas_ops.ops.logcumsumexp import kernel, kernel_backward, shards
from pallas_ops.ops.logcumsumexp import reference as meaning


class Ops(NamedTuple):
    totals: Op
    forward: Op
    saving: Op
    backward_totals: Op
    backward: Op


@functools.lru_cache(maxsize=128)
def ops(before: int, after: int) -> Ops:
    """The passes, and what shards sum up before them, with axes beside the scanned."""
    outer = ["b", *(f"o{i}" for i in range(before - 1))]
    inner = [f"i{i}" for i in range(after)]
    full, column, states = (" ".join([*outer, *x, *inner]) for x in (["n"], [], ["m"]))
    describe = partial(Op, unsharded=("n", "m"))
    totals = describe(
        name="logcumsumexp_totals",
        kernel=kernel.totals,
        reference=_totals_reference,
        operands=(full,),
        results=(column, column),
    )
    forward, saving = (
        Op(
            name="logcumsumexp",
            kernel=partial(kernel.forward, save=save),
            reference=partial(_forward_reference, save=save),
            operands=(full, column, column),
            results=(full, column, *[states] * (2 * save)),
            unsharded=(),
            shards=("n", partial(_forward_of_shard, save=save)),
        )
        for save in (False, True)
    )
    backward_totals = describe(
        name="logcumsumexp_backward_totals",
        kernel=kernel_backward.totals,
        reference=_backward_totals_reference,
        operands=(full, full, states, states),
        results=(column,),
    )
    backward = Op(
        name="logcumsumexp_backward",
        kernel=kernel_backward.backward,
        reference=_backward_reference,
        operands=(full, full, column, states, states),
        results=(full, column),
        unsharded=("m",),
        shards=("n", _backward_of_shard),
    )
    return Ops(totals, forward, saving, backward_totals, backward)


def ops_of(axis: int, x: jax.Array) -> Ops:
    return ops(axis, x.ndim - axis - 1)


def _forward_of_shard(
    run: Any, mesh_axes: AxisName, *operands: Any, save: bool, **static: Any
) -> tuple[jax.Array, ...]:
    """The shard's part of the results.

    The states that it saves are not those of the tiles of the whole axis. The first one, which is
    the same on all shards, is kept in place of them all.
    """
    x, initial, total = operands
    axis, passes = static["axis"], ops_of(static["axis"], x)
    scans = partial(run, passes.totals), partial(run, passes[1 + save])
    out, final, *_ = shards.forward(*scans, mesh_axes, *operands, **static)
    if not save:
        return out, final
    tiles = -(-x.shape[axis] * jax.lax.axis_size(mesh_axes) // static["block_n"])
    start = shards.nothing(final) if initial is None else meaning.pair_of(initial, total)
    shape = [tiles + 1 if i == axis else size for i, size in enumerate(x.shape)]
    return out, final, *(jnp.broadcast_to(jnp.expand_dims(y, axis), shape) for y in start)


def _backward_of_shard(
    run: Any, mesh_axes: AxisName, *operands: Any, **static: Any
) -> tuple[jax.Array, jax.Array]:
    """Finds the shard's states again, from the first one; XLA sees if the forward pass has them."""
    x, do, dfinal, *saved = operands
    passes, first = ops_of(static["axis"], x), _first(static["axis"], *saved)
    scans = partial(run, passes.totals), partial(run, passes.saving)
    _, _, *saved = shards.forward(*scans, mesh_axes, x, *first, **static)
    scans = partial(run, passes.backward_totals), partial(run, passes.backward)
    return shards.backward(*scans, mesh_axes, x, do, dfinal, *saved, **static)


def _totals_reference(
    x: jax.Array, *, axis: int, clip: float | None, **_: Any
) -> tuple[jax.Array, jax.Array]:
    return meaning.totals(x, axis=axis, clip=clip)


def _forward_reference(
    x: jax.Array,
    initial: jax.Array | None,
    total: jax.Array | None,
    *,
    save: bool,
    block_n: int,
    **static: Any,
) -> tuple[jax.Array, ...]:
    del static["config"]  # a launch choice
    given = initial, total
    out, final = meaning.accumulate(x, *given, **static)
    if not save:
        return out.astype(x.dtype), final
    saved = meaning.checkpoints(x, *given, block_n=block_n, **static)
    return out.astype(x.dtype), final, *saved


def _backward_reference(
    x: jax.Array,
    do: jax.Array,
    dfinal: jax.Array | None,
    saved_p: jax.Array,
    saved_s: jax.Array,
    *,
    block_n: int,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    del block_n, static["config"]
    pivot, total = _first(static["axis"], saved_p, saved_s)

    def run(x: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        return meaning.accumulate(x, pivot, total, **static)

    dfinal = jnp.zeros_like(total) if dfinal is None else dfinal
    dx, dtotal = jax.vjp(run, x, total)[1]((do.astype(dfinal.dtype), dfinal))
    return dx, total * dtotal


def _backward_totals_reference(
    x: jax.Array, do: jax.Array, saved_p: jax.Array, saved_s: jax.Array, **static: Any
) -> tuple[jax.Array]:
    del static["block_n"], static["config"]
    pivot, total = _first(static["axis"], saved_p, saved_s)
    run = lambda total: meaning.accumulate(x, pivot, total, **static)[0]  # noqa: E731
    (dtotal,) = jax.vjp(run, total)[1](do.astype(total.dtype))
    return (dtotal,)


def _first(axis: int, *saved: jax.Array) -> list[jax.Array]:
    """The state before the first tile."""
    return [jax.lax.index_in_dim(y, 0, axis, keepdims=False) for y in saved]
