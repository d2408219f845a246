"""How logcumsumexp differentiates.

Saved: x and the initial state, which the caller has, and a pair of float32 a tile, named so that
`jax.checkpoint` can keep them. The backward pass recomputes the output in its tiles.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.core.shards import checked, is_replicated, order
from pallas_ops.ops.logcumsumexp import shards
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.passes import forward_of_shard, ops_of

RESIDUALS = "pallas_ops.logcumsumexp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    axis: int
    reverse: bool
    clip: float | None
    block_n: int
    axis_name: tuple[str, ...] | None
    implementation: Implementation | None
    config: LogcumsumexpConfig | None

    @property
    def static(self) -> dict[str, Any]:
        """Those of the kernels."""
        names = ("axis", "reverse", "clip", "block_n", "config")
        return {name: getattr(self, name) for name in names}

    @property
    def call(self) -> Callable[..., tuple[jax.Array, ...]]:
        """Runs an op."""
        return partial(call, implementation=self.implementation)


def _forward_pass(
    p: Params, call: Any, x: jax.Array, initial: jax.Array | None, *, save: bool
) -> tuple[jax.Array, ...]:
    """Output and final state, and what is saved."""
    scan = partial(call, ops_of(p.axis, x)[1 + save])
    if p.axis_name is not None:
        scan = partial(forward_of_shard, call, p.axis_name, save=save)
    results: tuple[jax.Array, ...] = scan(x, initial, None, **p.static)
    return results


def reference(p: Params, x: jax.Array, initial: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`accumulate` in jax.numpy, differentiated by JAX."""
    call = lambda op, *operands, **static: op.reference(*operands, **static)  # noqa: E731
    out, final = _forward_pass(p, call, x, initial, save=False)
    return out, final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate(p: Params, x: jax.Array, initial: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output [b, ..., n, ...], and the final state without n, in float32."""
    out, final = _forward_pass(p, p.call, x, initial, save=False)
    return out, final


def _forward(p: Params, *primals):  # type: ignore[no-untyped-def]
    x, initial = primals[0].value, None if primals[1] is None else primals[1].value
    out, final, *states = _forward_pass(p, p.call, x, initial, save=True)
    saved = [checkpoint_name(y, RESIDUALS) for y in states]
    return (out, final), (x, initial, saved)


def _backward(p: Params, saved, cotangents):  # type: ignore[no-untyped-def]
    x, initial, states = saved
    do, dfinal = cotangents
    if isinstance(do, SymbolicZero):
        _, do = vary.unify(x, jnp.zeros_like(x))
    dfinal = None if isinstance(dfinal, SymbolicZero) else dfinal
    backward = _backward_pass if p.axis_name is None else _backward_pass_of_shard
    dx, dinitial = reshard_like(backward(p, x, initial, do, dfinal, *states), (x, initial))
    return dx, None if initial is None else dinitial


def _backward_pass(p: Params, x: Any, _: Any, *others: Any) -> tuple[jax.Array, ...]:
    grads: tuple[jax.Array, ...] = p.call(ops_of(p.axis, x).backward, x, *others, **p.static)
    return grads


def _backward_pass_of_shard(
    p: Params, x: Any, initial: Any, do: Any, dfinal: Any, *states: Any
) -> tuple[jax.Array, ...]:
    """Where no types say what is replicated, shards' gradients of what all have add up."""
    assert p.axis_name is not None
    passes = ops_of(p.axis, x)
    if dfinal is not None and not checked(p.axis_name):
        dfinal = jax.lax.psum(dfinal, p.axis_name)
    scans = partial(p.call, passes.backward_totals), partial(p.call, passes.backward)
    dx, dinitial = shards.backward(*scans, p.axis_name, x, do, dfinal, *states, **p.static)
    if initial is not None and not is_replicated(initial, p.axis_name):
        number, _ = order(p.axis_name, reverse=p.reverse)
        dinitial = jnp.where(number == 0, dinitial, 0)
    return dx, dinitial


# With symbolic zeros, who uses the output alone pays for no gradient of the final state.
accumulate.defvjp(_forward, _backward, symbolic_zeros=True)
