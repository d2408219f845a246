"""How chunk_cumsum_decay differentiates: it is linear, and its transpose is the op reversed.

The transpose of a running sum runs in the other direction. The transpose of a shift of x is a shift
of the sums. Only the edges of packed sequences are saved.
"""

import functools
from functools import partial
from typing import Any

import jax

from pallas_ops.core import checks
from pallas_ops.core.dispatch import Op, Run
from pallas_ops.core.partition import TypeOf, call, reshard_like
from pallas_ops.core.shards import Names
from pallas_ops.ops.chunk_cumsum_decay import kernel, reference, shards
from pallas_ops.ops.chunk_cumsum_decay.config import Params
from pallas_ops.scan.view import names


@functools.lru_cache(maxsize=128)
def op(name: str, before: int, after: int) -> Op:
    """The sums of x, with axes beside the summed one; operands as of `reference.accumulate`."""
    full = names(before, after, "n")
    return Op(
        name=name,
        kernel=kernel.accumulate,
        reference=reference.accumulate,
        operands=(full, "s", names(before, after)),
        results=(full,),
        unsharded=("s",),
        shards=("n", _of_shard),
    )


def _alone(run: Run, x: jax.Array, *others: Any, params: Params) -> tuple[jax.Array, ...]:
    """The sums of what one device has."""
    axis = params.axis
    return run(op(params.name, axis, x.ndim - axis - 1), x, *others, params=params)


def _of_shard(run: Run, mesh_axes: Names, *operands: Any, params: Params) -> tuple[jax.Array, ...]:
    return shards.accumulate(partial(_alone, run), mesh_axes, *operands, params=params)


def evaluate(params: Params, x: jax.Array, edges: jax.Array | None) -> jax.Array:
    """The sums of [b, ..., n, ...]. JAX differentiates those of "xla"."""
    run = partial(call, implementation=params.implementation)
    if params.axis_name is None:
        return _alone(run, x, edges, None, params=params)[0]
    return _of_shard(run, params.axis_name, x, edges, None, params=params)[0]


accumulate = jax.custom_vjp(evaluate, nondiff_argnums=(0,))


def _forward(params: Params, x: jax.Array, edges: Any):  # type: ignore[no-untyped-def]
    return accumulate(params, x, edges), (TypeOf(jax.typeof(x).sharding), edges)


def _backward(params: Params, saved, do):  # type: ignore[no-untyped-def]
    checks.axis_name(params.axis_name)  # refuses the name of a `jax.vmap`, which is unbound by now
    x, edges = saved
    dx = accumulate(params.transposed(), do, edges)
    return reshard_like(dx, x), None


accumulate.defvjp(_forward, _backward)
