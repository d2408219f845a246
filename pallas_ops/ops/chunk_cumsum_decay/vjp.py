"""How chunk_cumsum_decay differentiates: it is linear, so its gradient is itself turned round.

The transpose of a sum goes the other way, and that of a shift before it is a shift behind it.
Nothing is saved but the edges of packed sequences.
"""

import dataclasses
import functools
import math
from functools import partial
from typing import Any

import jax

from pallas_ops.core import implementations
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import TypeOf, call, gathered, reshard_like
from pallas_ops.ops.chunk_cumsum_decay import kernel, shards
from pallas_ops.ops.chunk_cumsum_decay import reference as meaning
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    axis: int
    chunk_size: int
    reverse: bool
    shift: meaning.Shift | None
    scale: float | None
    dtypes: tuple[str, str]  # of x and of the result
    axis_name: tuple[str, ...] | None
    implementation: Implementation | None
    config: ChunkCumsumDecayConfig | None
    shift_result: bool = False  # a shift is of the sums
    is_gradient: bool = False

    @property
    def static(self) -> dict[str, Any]:
        """Those of the kernel."""
        names = ("axis", "chunk_size", "reverse", "shift", "shift_result", "scale", "config")
        return {name: getattr(self, name) for name in names} | {"dtype": self.dtypes[1]}

    def transposed(self) -> "Params":
        """Of the gradient; twice is the same again."""
        return dataclasses.replace(
            self,
            reverse=not self.reverse,
            shift_result=self.shift == "sequence" and not self.shift_result,
            dtypes=self.dtypes[::-1],
            is_gradient=not self.is_gradient,
        )


def reference(p: Params, x: jax.Array, edges: jax.Array | None) -> jax.Array:
    """`accumulate` in jax.numpy, differentiated by JAX."""
    call = lambda op, *operands, **static: op.reference(*operands, **static)  # noqa: E731
    return _sums(p, call, x, edges)


def _reference(
    x: jax.Array, edges: jax.Array | None, carry: jax.Array | None, *, dtype: str, **static: Any
) -> tuple[jax.Array]:
    del static["config"]  # a launch choice
    whole = gathered(x, static["axis"])
    out = meaning.accumulate(whole, edges, carry, **static).astype(dtype)
    return reshard_like((out,), (x,))  # type: ignore[return-value]


def _kernel(x: jax.Array, *others: Any, name: str, axis: int, **static: Any) -> tuple[jax.Array]:
    """The reference where `jax.vmap` has made more rows than the kernel counts."""
    if math.prod(x.shape[:axis]) > implementations.LONGEST:
        return _reference(x, *others, axis=axis, **static)
    return kernel.run(x, *others, name=name, axis=axis, **static)


@functools.lru_cache(maxsize=128)
def op(before: int, after: int, is_gradient: bool) -> Op:
    """The op, or itself as its gradient, with axes beside the summed one.

    Operands are x, edges and carry: see `reference.accumulate`.
    """
    outer = ["b", *(f"o{i}" for i in range(before - 1))]
    inner = [f"i{i}" for i in range(after)]
    full = " ".join([*outer, "n", *inner])
    name = "chunk_cumsum_decay" + "_backward" * is_gradient
    return Op(
        name=name,
        kernel=partial(_kernel, name=name),
        reference=_reference,
        operands=(full, "s", " ".join([*outer, *inner])),
        results=(full,),
        unsharded=("s",),
        shards=("n", partial(_of_shard, is_gradient)),
    )


def _of_shard(
    is_gradient: bool,
    run: Any,
    mesh_axes: tuple[str, ...],
    x: jax.Array,
    *others: Any,
    **static: Any,
) -> tuple[jax.Array]:
    axis = static["axis"]
    sums = partial(run, op(axis, x.ndim - axis - 1, is_gradient))
    return shards.of_shard(sums, mesh_axes, x, *others, **static)


def _sums(p: Params, run: Any, x: jax.Array, edges: jax.Array | None) -> jax.Array:
    """Of one device, or over the shards of `p.axis_name`."""
    if p.axis_name is None:
        sums = partial(run, op(p.axis, x.ndim - p.axis - 1, p.is_gradient))
    else:
        sums = partial(_of_shard, p.is_gradient, run, p.axis_name)
    (out,) = sums(x, edges, None, **p.static)
    return out  # type: ignore[no-any-return]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate(p: Params, x: jax.Array, edges: jax.Array | None) -> jax.Array:
    """The sums of [b, ..., n, ...]."""
    return _sums(p, partial(call, implementation=p.implementation), x, edges)


def _forward(p: Params, x: jax.Array, edges: jax.Array | None):  # type: ignore[no-untyped-def]
    return accumulate(p, x, edges), (TypeOf(x), edges)


def _backward(p: Params, saved, do):  # type: ignore[no-untyped-def]
    x, edges = saved
    dx = accumulate(p.transposed(), do, edges)
    return *reshard_like((dx,), (x,)), None


accumulate.defvjp(_forward, _backward)
