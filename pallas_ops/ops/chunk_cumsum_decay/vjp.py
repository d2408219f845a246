"""How chunk_cumsum_decay differentiates: it is linear, so its gradient is itself turned round.

The transpose of a sum goes the other way, and that of a shift before it is a shift behind it.
Nothing is saved but the bounds of packed sequences.
"""

import dataclasses
import functools
import math
from functools import partial
from typing import Any

import jax

from pallas_ops.core import implementations
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import TypeOf, call, reshard_like
from pallas_ops.ops.chunk_cumsum_decay import kernel
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


def reference(p: Params, x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """`accumulate` in jax.numpy, differentiated by JAX."""
    return _reference(x, cu_seqlens, **p.static)[0]


def _reference(
    x: jax.Array, cu_seqlens: jax.Array | None, *, dtype: str, **static: Any
) -> tuple[jax.Array]:
    del static["config"]  # a launch choice
    return (meaning.accumulate(x, cu_seqlens, **static).astype(dtype),)


def _kernel(
    x: jax.Array, cu_seqlens: jax.Array | None, *, name: str, axis: int, **static: Any
) -> tuple[jax.Array]:
    """The reference where `jax.vmap` has made more rows than the kernel counts."""
    if math.prod(x.shape[:axis]) > implementations.LONGEST:
        return _reference(x, cu_seqlens, axis=axis, **static)
    return kernel.run(x, cu_seqlens, name=name, axis=axis, **static)


@functools.lru_cache(maxsize=128)
def op(before: int, after: int, is_gradient: bool) -> Op:
    """The op, or itself as its gradient, with axes beside the summed one."""
    outer = ["b", *(f"o{i}" for i in range(before - 1))]
    full = " ".join([*outer, "n", *(f"i{i}" for i in range(after))])
    name = "chunk_cumsum_decay" + "_backward" * is_gradient
    return Op(
        name=name,
        kernel=partial(_kernel, name=name),
        reference=_reference,
        operands=(full, "s"),
        results=(full,),
        unsharded=("n", "s"),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate(p: Params, x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The sums of [b, ..., n, ...]."""
    sums = op(p.axis, x.ndim - p.axis - 1, p.is_gradient)
    (out,) = call(sums, x, cu_seqlens, implementation=p.implementation, **p.static)
    return out


def _forward(p: Params, x: jax.Array, cu_seqlens: jax.Array | None):  # type: ignore[no-untyped-def]
    return accumulate(p, x, cu_seqlens), (TypeOf(x), cu_seqlens)


def _backward(p: Params, saved, do):  # type: ignore[no-untyped-def]
    x, cu_seqlens = saved
    dx = accumulate(p.transposed(), do, cu_seqlens)
    return *reshard_like((dx,), (x,)), None


accumulate.defvjp(_forward, _backward)
