"""How lrpe_cosine differentiates.

theta is saved. x is saved for an activation, and for the gradients of theta and of positions. A
softmax over the sequence also saves its pivot and share per feature, and `cache_angles` the angles,
under a name by which `jax.checkpoint` can keep them. One pass over x makes the gradients of x and
theta. With a given config, which applies to dx alone, there are two passes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import partition
from pallas_ops.core.partition import TypeOf, reshard_like
from pallas_ops.ops.lrpe_cosine import passes
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_SEQUENCE, Params

RESIDUALS = "pallas_ops.lrpe_cosine"


def _run(p: Params, name: str, *operands: jax.Array | None, call: Any = None) -> tuple[Any, ...]:
    """A pass, over the shards of `p.axis_name` if there are any; `call` runs it on one device."""
    op = passes.op(name, p)
    call = call or partial(partition.call, implementation=p.implementation)
    run = partial(call, op)
    if p.axis_name is not None and op.shards is not None:
        run = partial(op.shards[1], call, p.axis_name)
    results: tuple[jax.Array, ...] = run(*operands, p=p)
    return results


def reference(p: Params, *operands: Any) -> jax.Array:
    """`rotate` in jax.numpy, differentiated by JAX."""
    call = lambda op, *operands, p: op.reference(*operands, p=p)  # noqa: E731
    (out,) = _run(p, "forward", *operands, None, None, call=call)
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
    (out,) = _run(p, "forward", x, theta, offset, positions, None, None)
    return out  # type: ignore[no-any-return]


def _forward(p: Params, *primals: Any):  # type: ignore[no-untyped-def]
    operands: list[Any] = [None if y is None else y.value for y in primals]
    x, *where = operands
    moves = [y is not None and y.perturbed for y in primals]  # which operands need a gradient
    x_moves, theta_moves, _, positions_move = moves
    out, *saved = _run(p, "saving", x, *where, None, None)
    named = [checkpoint_name(y, RESIDUALS) for y in saved]
    softmax = named[:2] if p.act == SOFTMAX_SEQUENCE else [None, None]  # pivot and share
    cached = named[-1] if p.config is not None and p.config.cache_angles else None
    needs_x = (p.act != "none" and x_moves) or theta_moves or positions_move
    kept = x if needs_x else jnp.zeros(0, x.dtype)
    # The shape of a residual records which operands move. The tree of the residuals must not depend
    # on them: JAX traces this rule once per set of moving operands, and keeps only the last tree.
    moving = jnp.zeros((0, *map(int, moves)))
    return out, (TypeOf(x), kept, where, cached, softmax, moving)


def _backward(p: Params, saved, dout):  # type: ignore[no-untyped-def]
    of_x, x, where, cached, softmax, moving = saved
    x_moves, theta_moves, _, positions_move = moving.shape[1:]
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    dx = dtheta = dpositions = None
    if x_moves and theta_moves and p.config is None:
        dx, dtheta = _run(p, "gradients", x, dout, *where, None, *softmax, None)
    elif x_moves:
        activated = None if p.act == "none" else x
        (dx,) = _run(p, "backward", activated, dout, *where, cached, *softmax, None)
    if theta_moves and dtheta is None:
        (dtheta,) = _run(p, "theta", x, dout, *where, None, *softmax, None)
    if positions_move:
        out, pull = jax.vjp(partial(reference, p, x, *where[:2]), where[2])
        (dpositions,) = pull(*reshard_like((dout,), (out,)))
    return reshard_like((dx, dtheta, None, dpositions), (of_x, *where))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
