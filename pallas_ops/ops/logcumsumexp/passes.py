"""The ops of logcumsumexp's passes, and what a shard of the axis does in each pass."""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.core.dispatch import Op
from pallas_ops.core.partition import gathered, reshard_like
from pallas_ops.core.shards import Names
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


def forward_of_shard(
    run: Any, axis_name: Names, *operands: Any, save: bool, **static: Any
) -> tuple[jax.Array, ...]:
    """Output, final state and saved states of one shard."""
    x = operands[0]
    passes = ops_of(static["axis"], x)
    states = shards.exchanged(partial(run, passes.totals), axis_name, *operands, **static)
    return shards.forward(partial(run, passes[1 + save]), axis_name, x, states, **static)


def _forward_of_shard(
    run: Any, mesh_axes: Names, *operands: Any, save: bool, **static: Any
) -> tuple[jax.Array, ...]:
    """Saves not the states of tiles, which are not those of the whole axis, but those of shards."""
    if not save:
        return forward_of_shard(run, mesh_axes, *operands, save=False, **static)
    x, axis = operands[0], static["axis"]
    passes = ops_of(axis, x)
    states = shards.exchanged(partial(run, passes.totals), mesh_axes, *operands, **static)
    results = shards.forward(partial(run, passes.saving), mesh_axes, x, states, **static)
    slots = _num_slots(x, mesh_axes, **static)
    return *results[:2], *(
        _in_slots(slots, axis, *pair) for pair in zip(states.start, states.shards, strict=True)
    )


def _backward_of_shard(
    run: Any, mesh_axes: Names, *operands: Any, **static: Any
) -> tuple[jax.Array, jax.Array]:
    """Finds the shard's states again from those of all shards; XLA may see that it has them."""
    x, do, dfinal, *saved = operands
    axis, count = static["axis"], jax.lax.axis_size(mesh_axes)
    passes, start = ops_of(axis, x), _first(axis, *saved)
    if count < _num_slots(x, mesh_axes, **static):
        p, t = (jnp.moveaxis(y, axis, 0)[1 : count + 1] for y in saved)
        states = shards.States((start[0], start[1]), (p, t))
    else:
        states = shards.exchanged(partial(run, passes.totals), mesh_axes, x, *start, **static)
    _, _, *saved = shards.forward(partial(run, passes.saving), mesh_axes, x, states, **static)
    scans = partial(run, passes.backward_totals), partial(run, passes.backward)
    return shards.backward(*scans, mesh_axes, x, do, dfinal, *saved, **static)


def _num_slots(x: jax.Array, mesh_axes: Names, *, axis: int, block_n: int, **_: Any) -> int:
    """Of the states that one device would save."""
    return 1 - (-x.shape[axis] * jax.lax.axis_size(mesh_axes) // block_n)


def _in_slots(count: int, axis: int, start: jax.Array, others: jax.Array) -> jax.Array:
    """`start` and, if there are slots for all, `others`; then zeros."""
    y = start[None]
    if len(others) < count:
        y = jnp.concatenate([y, others])
    padding = [(0, count - len(y) if i == 0 else 0, 0) for i in range(y.ndim)]
    return jnp.moveaxis(jax.lax.pad(y, jnp.zeros((), y.dtype), padding), 0, axis)


def _totals_reference(
    x: jax.Array, *, axis: int, clip: float | None, **_: Any
) -> tuple[jax.Array, jax.Array]:
    return meaning.totals(gathered(x, axis), axis=axis, clip=clip)


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
    given = gathered(x, static["axis"]), initial, total
    out, final = meaning.accumulate(*given, **static)
    results: Any = (*reshard_like((out.astype(x.dtype),), (x,)), final)
    if save:
        results += (*meaning.checkpoints(*given, block_n=block_n, **static),)
    return results  # type: ignore[no-any-return]


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
    whole, do = (gathered(y, static["axis"]) for y in (x, do.astype(dfinal.dtype)))
    dx, dtotal = jax.vjp(run, whole, total)[1]((do, dfinal))
    return *reshard_like((dx,), (x,)), total * dtotal


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
