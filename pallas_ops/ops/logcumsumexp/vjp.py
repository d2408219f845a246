"""How logcumsumexp differentiates.

Saved: x and the initial state, which the caller has, and a pair of float32 a tile, named so that
`jax.checkpoint` can keep them. The backward pass recomputes the sums in its tiles.
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import checks, shards
from pallas_ops.core.dispatch import Op, Run
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.ops.logcumsumexp import kernel, kernel_backward, reference
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.shards import Shard
from pallas_ops.scan.view import names

RESIDUALS = "pallas_ops.logcumsumexp"


@functools.lru_cache(maxsize=128)
def op(name: str, before: int, after: int, block_n: int) -> Op:
    """The op of a pass, with axes beside the scanned one; totals are what shards exchange."""
    full, states = names(before, after, "n"), names(before, after, "m")
    column = names(before, after)
    given, saved = (full, column, column), (states, states, column, column)
    operands, results, of_shard = dict[str, Any](
        totals=((full,), (column, column), None),
        forward=(given, (full, column), Shard.forward),
        saving=(given, (full, column, *saved), Shard.forward_saving),
        backward_totals=((full, full, *saved), (column,), None),
        backward=((full, full, column, *saved), (full, column), Shard.backward_from_saved),
    )[name]
    kernels = kernel_backward if name.startswith("backward") else kernel
    return Op(
        name="logcumsumexp" if name in ("forward", "saving") else f"logcumsumexp_{name}",
        kernel=getattr(kernels, name),
        reference=getattr(reference, name),
        operands=operands,
        results=results,
        unsharded=() if of_shard else ("n", "m"),
        tiles=("n", "m", block_n) if of_shard and name != "forward" else None,
        shards=of_shard and ("n", partial(_of_shard, of_shard)),
        has_pairs=name in ("totals", "saving", "backward"),
    )


def _passes(params: Params, run: Run | None = None) -> Run:
    """Runs a pass by its name; x is the first operand of each."""
    run = run or partial(call, implementation=params.implementation)

    def run_pass(name: str, x: jax.Array, *others: Any) -> tuple[jax.Array, ...]:
        one = op(name, params.axis, x.ndim - params.axis - 1, params.block_n)
        return run(one, x, *others, params=params)

    return run_pass


def _of_shard(
    of_shard: Run, run: Run, mesh_axes: shards.Names, *operands: Any, params: Params
) -> tuple[jax.Array, ...]:
    return of_shard(Shard(_passes(params, run), mesh_axes, params), *operands)


def evaluate(
    params: Params, x: jax.Array, initial: jax.Array | None, *, save: bool = False
) -> tuple[jax.Array, ...]:
    """Output and final state, and what is saved. JAX differentiates those of "xla"."""
    run = _passes(params)
    if params.axis_name is None:
        return run("saving" if save else "forward", x, initial, None)
    return Shard(run, params.axis_name, params).forward(x, initial, None, save=save)


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
    checks.axis_name(params.axis_name)  # refuses the name of a `jax.vmap`, which is unbound by now
    x, initial, states = saved
    do, dfinal = cotangents
    if isinstance(do, SymbolicZero):
        _, do = shards.unify(x, jnp.zeros_like(x))
    dfinal = None if isinstance(dfinal, SymbolicZero) else dfinal
    run, axis_name = _passes(params), params.axis_name
    if axis_name is None:
        dx, dinitial = run("backward", x, do, dfinal, *states)
    else:  # without check_vma, gradients of replicated values have to be summed over the shards
        if dfinal is not None and not shards.checked(axis_name):
            dfinal = jax.lax.psum(dfinal, axis_name)
        dx, dinitial = Shard(run, axis_name, params).backward(x, do, dfinal, *states)
        if initial is not None and not shards.is_replicated(initial, axis_name):
            number, _ = shards.order(axis_name, reverse=params.reverse)
            dinitial = jnp.where(number == 0, dinitial, 0)
    return reshard_like(dx, x), None if initial is None else reshard_like(dinitial, initial)


# Symbolic zeros tell where the final state has no cotangent: then its gradient is not computed.
accumulate.defvjp(_forward, _backward, symbolic_zeros=True)
