"""How logcumsumexp differentiates.

Saved: x and the initial state, which the caller has, and a pair of float32 a tile, named so that
`jax.checkpoint` can keep them. The backward pass recomputes the output in its tiles.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import checks, vary
from pallas_ops.core.dispatch import Op
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.core.shards import Names, checked, is_replicated, order
from pallas_ops.ops.logcumsumexp import kernel, kernel_backward, reference
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.shards import Ops, Shard
from pallas_ops.scan.limits import unless_too_many_rows
from pallas_ops.scan.view import names

RESIDUALS = "pallas_ops.logcumsumexp"
Run = Callable[..., tuple[jax.Array, ...]]


@functools.lru_cache(maxsize=128)
def ops(before: int, after: int) -> Ops:
    """The passes, and what shards sum up before them, with axes beside the scanned one."""
    full, states = names(before, after, "n"), names(before, after, "m")
    column = names(before, after)

    def op(
        name: str, runs: Any, operands: Any, results: Any, of_shard: Any = None, **options: bool
    ) -> Op:
        kernel, reference = (partial(run, **options) for run in runs)
        return Op(
            name=f"logcumsumexp{name}",
            kernel=unless_too_many_rows(kernel, reference),
            reference=reference,
            operands=operands,
            results=results,
            unsharded=("m",) if of_shard else ("n", "m"),
            shards=of_shard and ("n", partial(_of_shard, of_shard)),
        )

    given, saved = (full, column, column), (states, states)
    totals, scan = (kernel.totals, reference.totals), (kernel.forward, reference.forward)
    backward_totals = kernel_backward.totals, reference.backward_totals
    backward = kernel_backward.backward, reference.backward
    return Ops(
        op("_totals", totals, (full,), (column, column)),
        op("", scan, given, (full, column), Shard.forward, save=False),
        op("", scan, given, (full, column, *saved), Shard.forward_saving_shards, save=True),
        op("_backward_totals", backward_totals, (full, full, *saved), (column,)),
        op(
            "_backward",
            backward,
            (full, full, column, *saved),
            (full, column),
            Shard.backward_from_shards,
        ),
    )


def _ops_of(params: Params, x: jax.Array) -> Ops:
    return ops(params.axis, x.ndim - params.axis - 1)


def _of_shard(
    of_shard: Run, run: Run, mesh_axes: Names, x: jax.Array, *others: Any, params: Params
) -> tuple[jax.Array, ...]:
    shard = Shard(_ops_of(params, x), partial(run, params=params), mesh_axes, params)
    return of_shard(shard, x, *others)


def _run(params: Params) -> Run:
    return partial(call, implementation=params.implementation)


def evaluate(
    params: Params, x: jax.Array, initial: jax.Array | None, *, save: bool = False
) -> tuple[jax.Array, ...]:
    """Output and final state, and what is saved; differentiated by JAX: the reference can be."""
    run, passes, operands = _run(params), _ops_of(params, x), (x, initial, None)
    if params.axis_name is None:
        return run(passes.saving if save else passes.forward, *operands, params=params)
    of_shard = partial(Shard.forward, save=save)
    return _of_shard(of_shard, run, params.axis_name, *operands, params=params)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate(params: Params, x: jax.Array, initial: jax.Array | None) -> tuple[jax.Array, ...]:
    """Output [b, ..., n, ...], and the final state without n, in float32."""
    return evaluate(params, x, initial)


def _forward(params: Params, *primals):  # type: ignore[no-untyped-def]
    x, initial = primals[0].value, None if primals[1] is None else primals[1].value
    out, final, *states = evaluate(params, x, initial, save=True)
    saved = [checkpoint_name(y, RESIDUALS) for y in states]
    return (out, final), (x, initial, saved)


def _backward(params: Params, saved, cotangents):  # type: ignore[no-untyped-def]
    checks.axis_name(params.axis_name)  # JAX forgets that of a `jax.vmap` before this rule runs
    x, initial, states = saved
    do, dfinal = cotangents
    if isinstance(do, SymbolicZero):
        _, do = vary.unify(x, jnp.zeros_like(x))
    dfinal = None if isinstance(dfinal, SymbolicZero) else dfinal
    run, axis_name = _run(params), params.axis_name
    if axis_name is None:
        dx, dinitial = run(_ops_of(params, x).backward, x, do, dfinal, *states, params=params)
    else:  # where no types say what is replicated, shards' gradients of what all have add up
        if dfinal is not None and not checked(axis_name):
            dfinal = jax.lax.psum(dfinal, axis_name)
        operands = x, do, dfinal, *states
        dx, dinitial = _of_shard(Shard.backward, run, axis_name, *operands, params=params)
        if initial is not None and not is_replicated(initial, axis_name):
            number, _ = order(axis_name, reverse=params.reverse)
            dinitial = jnp.where(number == 0, dinitial, 0)
    return reshard_like(dx, x), None if initial is None else reshard_like(dinitial, initial)


# With symbolic zeros, who uses the output alone pays for no gradient of the final state.
accumulate.defvjp(_forward, _backward, symbolic_zeros=True)
