"""How lrpe_cosine differentiates.

theta is saved. x is saved for an activation, and for the gradients of theta and of positions. A
softmax over the sequence also saves its pivot and share per feature, and `cache_angles` the angles,
under a name by which `jax.checkpoint` can keep them. One pass over x makes the gradients of x and
theta. With a given config, which applies to dx alone, there are two passes.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import TypeOf, call, reshard_like
from pallas_ops.ops.lrpe_cosine import kernel, reference
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, LrpeCosineConfig

RESIDUALS = "pallas_ops.lrpe_cosine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    act: str
    shape: tuple[int, ...] | None
    num_prefix_tokens: int
    heads_first: bool
    per_batch: bool
    implementation: Implementation | None
    config: LrpeCosineConfig | None


@functools.lru_cache(maxsize=128)
def _ops(
    p: Params, heads: str, features: str, offset: str, positions: str, num_axes: int
) -> tuple[Op, Op, Op, Op, Op]:
    """Forward, forward that saves residuals, dx, dtheta, both gradients.

    The strings name the axes of theta (`heads` and `features`), of offset and of positions.
    """
    tokens = "h n" if p.heads_first else "n h"
    x, out, column = f"b {tokens} d", f"b {tokens} two d", "b h d"
    theta = f"{heads} {features}"
    cached = f"{'b ' if p.per_batch else ''}n {heads} d"
    saved = [column, column] if p.act == SOFTMAX_SEQUENCE else []
    if p.config is not None and p.config.cache_angles:
        saved.append(cached)
    unsharded = {"e", "k", "one", "two"}  # axes that every device needs in full
    if positions == "" or p.act == SOFTMAX_SEQUENCE:
        unsharded.add("n")
    if num_axes > 1 or p.act == SOFTMAX_FEATURES or features == "e":
        unsharded.add("d")
    describe = partial(Op, unsharded=tuple(sorted(unsharded)))
    forward, saving = (
        describe(
            name="lrpe_cosine",
            kernel=partial(kernel.forward, save=save),
            reference=partial(reference.forward, save=save),
            operands=(x, theta, offset, positions),
            results=(out, *saved) if save else (out,),
        )
        for save in (False, True)
    )
    operands = (x, out, theta, offset, positions, cached, column, column)
    backward = describe(
        name="lrpe_cosine_backward",
        kernel=kernel.backward,
        reference=reference.backward,
        operands=operands,
        results=(x,),
    )
    summed = " ".join(axis for axis in "bnhd" if axis not in theta.split())
    dtheta, gradients = (
        describe(
            name="lrpe_cosine_gradients" if with_x else "lrpe_cosine_theta",
            kernel=partial(kernel.gradients, with_x=with_x),
            reference=partial(reference.gradients, with_x=with_x),
            operands=operands,
            results=(x, theta) if with_x else (theta,),
            summed=("", summed) if with_x else (summed,),
        )
        for with_x in (False, True)
    )
    return forward, saving, backward, dtheta, gradients


def _ops_of(p: Params, x: Any, theta: Any, offset: Any, positions: Any) -> tuple[Op, ...]:
    """`_ops` for arguments of these shapes."""
    num_axes = len(p.shape or ()) if positions is None else positions.shape[-1]
    heads = x.shape[1 if p.heads_first else 2]
    batch = "b" if p.per_batch else "one"
    own = num_axes == 1 and theta.shape[1] == x.shape[-1]
    shared = num_axes == 1 and theta.shape[1] == 1
    return _ops(
        p,
        "h" if theta.shape[0] == heads else "one",
        "d" if own else "single" if shared else "e",
        "" if offset is None else batch,
        "" if positions is None else "b n k" if p.per_batch else "n k",
        num_axes,
    )


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
    (out,) = call(_ops_of(p, *operands)[0], *operands, **vars(p))
    return out


def _forward(p: Params, *primals: Any):  # type: ignore[no-untyped-def]
    operands: list[Any] = [None if y is None else y.value for y in primals]
    moves = [y is not None and y.perturbed for y in primals]  # which operands need a gradient
    x_moves, theta_moves, _, positions_move = moves
    out, *saved = call(_ops_of(p, *operands)[1], *operands, **vars(p))
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
    _, _, backward, theta, gradients = _ops_of(p, jax.ShapeDtypeStruct(shape, dout.dtype), *where)
    dx = dtheta = dpositions = None
    if x_moves and theta_moves and p.config is None:
        dx, dtheta = call(gradients, x, dout, *where, None, *columns, **vars(p))
    elif x_moves:
        activated = None if p.act == "none" else x
        (dx,) = call(backward, activated, dout, *where, cached, *columns, **vars(p))
    if theta_moves and dtheta is None:
        (dtheta,) = call(theta, x, dout, *where, None, *columns, **vars(p))
    if positions_move:
        run = partial(reference.rotate, x, *where[:2], **vars(p))
        out, pull = jax.vjp(run, where[2])
        (dpositions,) = pull(*reshard_like((dout,), (out,)))
    return reshard_like((dx, dtheta, None, dpositions), (of_x, *where))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
