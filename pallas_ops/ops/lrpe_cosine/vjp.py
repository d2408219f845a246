"""How lrpe_cosine differentiates.

theta is saved. x is saved for an activation, and for the gradient of theta. A softmax over the
sequence saves its pivot and share per feature too, under a name by which `jax.checkpoint` can keep
them. Both gradients are one pass over x; with a given config, which applies to dx, they are two.
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
from pallas_ops.ops.lrpe_cosine import kernel
from pallas_ops.ops.lrpe_cosine import reference as meaning
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

    @property
    def static(self) -> dict[str, Any]:
        """The static arguments of the kernels."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name != "implementation"}


def reference(
    p: Params,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    """`rotate` in jax.numpy, differentiated by JAX."""
    return meaning.forward(x, theta, offset, positions, save=False, **p.static)[0]


def _unsharded(p: Params, features: str, positions: str, num_axes: int) -> tuple[str, ...]:
    """Axes that every device needs in full."""
    unsharded = {"e", "k", "one", "two"}
    if positions == "" or p.act == SOFTMAX_SEQUENCE:
        unsharded.add("n")
    if num_axes > 1 or p.act == SOFTMAX_FEATURES or features == "e":
        unsharded.add("d")
    return tuple(sorted(unsharded))


@functools.lru_cache(maxsize=128)
def ops(
    p: Params, heads: str, features: str, offset: str, positions: str, num_axes: int
) -> tuple[Op, Op, Op, Op, Op]:
    """Forward, saving forward, dx, dtheta, both gradients; the strings name axes of operands."""
    tokens = "h n" if p.heads_first else "n h"
    x, out, column = f"b {tokens} d", f"b {tokens} two d", "b h d"
    theta = f"{heads} {features}"
    cached = f"{'b ' if p.per_batch else ''}n {heads} d"
    saved = [column] * 2 * (p.act == SOFTMAX_SEQUENCE)
    saved += [cached] * (p.config is not None and p.config.cache_angles)
    where = (theta, offset, positions)
    describe = partial(Op, unsharded=_unsharded(p, features, positions, num_axes))
    forward, saving = (
        describe(
            name="lrpe_cosine",
            kernel=partial(kernel.forward, save=save),
            reference=partial(meaning.forward, save=save),
            operands=(x, *where),
            results=(out, *saved) if save else (out,),
        )
        for save in (False, True)
    )
    backward = describe(
        name="lrpe_cosine_backward",
        kernel=kernel.backward,
        reference=meaning.backward,
        operands=(x, out, *where, cached, column, column),
        results=(x,),
    )
    summed = " ".join(axis for axis in "bnhd" if axis not in theta.split())
    dtheta, gradients = (
        describe(
            name=f"lrpe_cosine_{name}",
            kernel=partial(kernel.gradients, with_x=len(results) == 2),
            reference=partial(meaning.gradients, with_x=len(results) == 2),
            operands=(x, out, *where, column, column),
            results=results,
            summed=("",) * (len(results) - 1) + (summed,),
        )
        for name, results in (("theta", (theta,)), ("gradients", (x, theta)))
    )
    return forward, saving, backward, dtheta, gradients


def ops_of(p: Params, x: Any, theta: Any, offset: Any, positions: Any) -> tuple[Op, ...]:
    num_axes = len(p.shape or ()) if positions is None else positions.shape[-1]
    heads = x.shape[1 if p.heads_first else 2]
    batch = "b" if p.per_batch else "one"
    own = num_axes == 1 and theta.shape[1] == x.shape[-1]
    shared = num_axes == 1 and theta.shape[1] == 1
    return ops(
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
    forward = ops_of(p, *operands)[0]
    (out,) = call(forward, *operands, implementation=p.implementation, **p.static)
    return out


def _forward(p: Params, *primals: Any):  # type: ignore[no-untyped-def]
    operands: list[Any] = [None if y is None else y.value for y in primals]
    moves = x_moves, theta_moves, _, positions_move = _moves(primals)
    saving = ops_of(p, *operands)[1]
    out, *saved = call(saving, *operands, implementation=p.implementation, **p.static)
    named = [checkpoint_name(y, RESIDUALS) for y in saved]
    columns = named[:2] if p.act == SOFTMAX_SEQUENCE else [None, None]
    cached = named[-1] if len(named) % 2 else None
    x, *where = operands
    needs_x = (p.act != "none" and x_moves) or theta_moves or positions_move
    kept = x if needs_x else jnp.zeros(0, x.dtype)
    # The shape of a residual records which operands move. The tree of the residuals must not depend
    # on them: JAX traces this rule once per set of moving operands, and keeps only the last tree.
    moving = jnp.zeros((0, *map(int, moves)))
    return out, (TypeOf(x), kept, where, columns, cached, moving)


def _moves(primals: Any) -> tuple[bool, ...]:
    """Which operands need a gradient."""
    return tuple(y is not None and y.perturbed for y in primals)


def _backward(p: Params, saved, dout):  # type: ignore[no-untyped-def]
    of_x, x, where, columns, cached, moving = saved
    x_moves, theta_moves, _, positions_move = moving.shape[1:]
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    shape = (*dout.shape[:3], dout.shape[4])
    _, _, backward, theta, gradients = ops_of(p, jax.ShapeDtypeStruct(shape, dout.dtype), *where)
    static = {"implementation": p.implementation, **p.static}
    dx = dtheta = dpositions = None
    if x_moves and theta_moves and p.config is None:
        dx, dtheta = call(gradients, x, dout, *where, *columns, **static)
    elif x_moves:
        activated = None if p.act == "none" else x
        (dx,) = call(backward, activated, dout, *where, cached, *columns, **static)
    if theta_moves and dtheta is None:
        (dtheta,) = call(theta, x, dout, *where, *columns, **static)
    if positions_move:
        out, pull = jax.vjp(partial(reference, p, x, *where[:2]), where[2])
        (dpositions,) = pull(*reshard_like((dout,), (out,)))
    return reshard_like((dx, dtheta, None, dpositions), (of_x, *where))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
