"""How lrpe_cosine differentiates.

theta is saved. x is saved for an activation, and for the gradients of theta and of positions. A
softmax over the sequence also saves its pivot and share per feature, and `cache_angles` the angles,
under a name by which `jax.checkpoint` can keep them. One pass over x makes the gradients of x and
theta. With a given config, which applies to dx alone, there are two passes.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import partition
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import TypeOf, reshard_like
from pallas_ops.ops.lrpe_cosine import passes
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_SEQUENCE, LrpeCosineConfig

RESIDUALS = "pallas_ops.lrpe_cosine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    act: str
    shape: tuple[int, ...] | None
    num_prefix_tokens: int
    heads_first: bool
    per_batch: bool
    axis_name: tuple[str, ...] | None
    implementation: Implementation | None
    config: LrpeCosineConfig | None

    @property
    def static(self) -> dict[str, Any]:
        """Those of the kernels."""
        names = ("act", "shape", "num_prefix_tokens", "heads_first", "per_batch", "config")
        return {name: getattr(self, name) for name in names}


def _passes(p: Params, x: Any, theta: Any, offset: Any, positions: Any) -> passes.Ops:
    """The ops for arguments of these shapes."""
    num_axes = len(p.shape or ()) if positions is None else positions.shape[-1]
    heads = x.shape[1 if p.heads_first else 2]
    batch = "b" if p.per_batch else "one"
    own = num_axes == 1 and theta.shape[1] == x.shape[-1]
    shared = num_axes == 1 and theta.shape[1] == 1
    axes = passes.Axes(
        "h" if theta.shape[0] == heads else "one",
        "d" if own else "single" if shared else "e",
        "" if offset is None else batch,
        "" if positions is None else "b n k" if p.per_batch else "n k",
        num_axes,
    )
    return passes.ops(axes, p.act, p.heads_first, p.per_batch, p.config)


def _run(p: Params, op: Op, *operands: jax.Array | None, call: Any = None) -> tuple[Any, ...]:
    """An op, over the shards of `p.axis_name` if there are any; `call` runs it on one device."""
    call = call or partial(partition.call, implementation=p.implementation)
    of_shard = partial(call, op)
    if p.axis_name is not None and op.shards is not None:
        of_shard = partial(op.shards[1], call, p.axis_name)
    results: tuple[jax.Array, ...] = of_shard(*operands, **p.static)
    return results


def reference(p: Params, *operands: Any) -> jax.Array:
    """`rotate` in jax.numpy, differentiated by JAX."""
    call = lambda op, *operands, **static: op.reference(*operands, **static)  # noqa: E731
    (out,) = _run(p, _passes(p, *operands).forward, *operands, None, None, call=call)
    return out  # type: ignore[no-any-return]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotate(
    p: Params,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    """The output [B, .., 2, D] of x [B, N, H, D] or [B, H, N, D] and theta [H, E] or [1, E]."""
    operands = (x, theta, offset, positions)
    (out,) = _run(p, _passes(p, *operands).forward, *operands, None, None)
    return out  # type: ignore[no-any-return]


def _forward(p: Params, *primals: Any):  # type: ignore[no-untyped-def]
    operands: list[Any] = [None if y is None else y.value for y in primals]
    moves = [y is not None and y.perturbed for y in primals]  # which operands need a gradient
    x_moves, theta_moves, _, positions_move = moves
    out, *saved = _run(p, _passes(p, *operands).saving, *operands, None, None)
    named = [checkpoint_name(y, RESIDUALS) for y in saved]  # [pivot, share], then [cached]
    columns = named[:2] if p.act == SOFTMAX_SEQUENCE else [None, None]
    cached = named[-1] if len(named) % 2 else None
    x, *where = operands
    needs_x = (p.act != "none" and x_moves) or theta_moves or positions_move
    kept = x if needs_x else jnp.zeros(0, x.dtype)
    # The shape of a residual records which operands move. The tree of the residuals must not depend
    # on them: JAX traces this rule once per set of moving operands, and keeps only the last tree.
    moving = jnp.zeros((0, *map(int, moves)))
    return out, (TypeOf(x), kept, where, cached, columns, moving)


def _backward(p: Params, saved, dout):  # type: ignore[no-untyped-def]
    of_x, x, where, cached, columns, moving = saved
    x_moves, theta_moves, _, positions_move = moving.shape[1:]
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    shape = (*dout.shape[:3], dout.shape[4])
    ops = _passes(p, jax.ShapeDtypeStruct(shape, dout.dtype), *where)
    dx = dtheta = dpositions = None
    if x_moves and theta_moves and p.config is None:
        dx, dtheta = _run(p, ops.gradients, x, dout, *where, None, *columns, None)
    elif x_moves:
        activated = None if p.act == "none" else x
        (dx,) = _run(p, ops.backward, activated, dout, *where, cached, *columns, None)
    if theta_moves and dtheta is None:
        (dtheta,) = _run(p, ops.theta, x, dout, *where, None, *columns, None)
    if positions_move:
        run = partial(reference, p, x, *where[:2])
        out, pull = jax.vjp(run, where[2])
        (dpositions,) = pull(*reshard_like((dout,), (out,)))
    return reshard_like((dx, dtheta, None, dpositions), (of_x, *where))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
