"""How logcumsumexp differentiates.

Saved: x and the initial state, which the caller has, and a pair of float32 a tile, named so that
`jax.checkpoint` can keep them. The backward pass recomputes the output in its tiles.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import vary
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.ops.logcumsumexp import kernel, kernel_backward
from pallas_ops.ops.logcumsumexp import reference as meaning
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig

RESIDUALS = "pallas_ops.logcumsumexp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    axis: int
    reverse: bool
    clip: float | None
    block_n: int
    implementation: Implementation | None
    config: LogcumsumexpConfig | None

    @property
    def static(self) -> dict[str, Any]:
        """Those of the kernels."""
        names = ("axis", "reverse", "clip", "block_n", "config")
        return {name: getattr(self, name) for name in names}


def reference(p: Params, x: jax.Array, initial: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`accumulate` in jax.numpy, differentiated by JAX."""
    out, final = meaning.accumulate(x, initial, axis=p.axis, reverse=p.reverse, clip=p.clip)
    return out.astype(x.dtype), final


def _forward_reference(
    x: jax.Array, initial: jax.Array | None, *, save: bool, block_n: int, **static: Any
) -> tuple[jax.Array, ...]:
    del static["config"]  # a launch choice
    out, final = meaning.accumulate(x, initial, **static)
    if not save:
        return out.astype(x.dtype), final
    saved = meaning.checkpoints(x, initial, block_n=block_n, **static)
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
    pivot, total = (jax.lax.index_in_dim(y, 0, static["axis"], False) for y in (saved_p, saved_s))
    initial = meaning.State(pivot, total, total).log
    pull = jax.vjp(partial(meaning.accumulate, **static), x, initial)[1]
    dfinal = jnp.zeros_like(total) if dfinal is None else dfinal
    dx, dinitial = pull((do.astype(dfinal.dtype), dfinal))
    return dx, dinitial


@functools.lru_cache(maxsize=128)
def ops(before: int, after: int) -> tuple[Op, Op, Op]:
    """The forward pass, the one that saves, and the backward pass, with axes beside the scanned."""
    outer = ["b", *(f"o{i}" for i in range(before - 1))]
    inner = [f"i{i}" for i in range(after)]
    full, column, states = (" ".join([*outer, *x, *inner]) for x in (["n"], [], ["m"]))
    forward, saving = (
        Op(
            name="logcumsumexp",
            kernel=partial(kernel.forward, save=save),
            reference=partial(_forward_reference, save=save),
            operands=(full, column),
            results=(full, column, *[states] * (2 * save)),
            unsharded=("n",),
        )
        for save in (False, True)
    )
    backward = Op(
        name="logcumsumexp_backward",
        kernel=kernel_backward.backward,
        reference=_backward_reference,
        operands=(full, full, column, states, states),
        results=(full, column),
        unsharded=("n", "m"),
    )
    return forward, saving, backward


def ops_of(p: Params, x: jax.Array) -> tuple[Op, Op, Op]:
    return ops(p.axis, x.ndim - p.axis - 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate(p: Params, x: jax.Array, initial: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output [b, ..., n, ...], and the final state without n, in float32."""
    forward, _, _ = ops_of(p, x)
    out, final = call(forward, x, initial, implementation=p.implementation, **p.static)
    return out, final


def _forward(p: Params, *primals):  # type: ignore[no-untyped-def]
    x, initial = primals[0].value, None if primals[1] is None else primals[1].value
    _, saving, _ = ops_of(p, x)
    out, final, *states = call(saving, x, initial, implementation=p.implementation, **p.static)
    saved = [checkpoint_name(y, RESIDUALS) for y in states]
    return (out, final), (x, initial, saved)


def _backward(p: Params, saved, cotangents):  # type: ignore[no-untyped-def]
    x, initial, states = saved
    _, _, backward = ops_of(p, x)
    do, dfinal = cotangents
    if isinstance(do, SymbolicZero):
        _, do = vary.unify(x, jnp.zeros_like(x))
    dfinal = None if isinstance(dfinal, SymbolicZero) else dfinal
    grads = call(backward, x, do, dfinal, *states, implementation=p.implementation, **p.static)
    dx, dinitial = reshard_like(grads, (x, initial))
    return dx, None if initial is None else dinitial


# With symbolic zeros, who uses the output alone pays for no gradient of the final state.
accumulate.defvjp(_forward, _backward, symbolic_zeros=True)
