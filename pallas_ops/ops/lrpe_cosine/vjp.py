"""How lrpe_cosine differentiates.

Saved: theta, and what an activation needs: x, and of the sequence's softmax a pivot and a share a
feature, named so that `jax.checkpoint` can keep them. x is saved as well where theta's gradient is
asked for.
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
from pallas_ops.core.partition import TypeOf, call, like
from pallas_ops.ops.lrpe_cosine import kernel, kernel_theta
from pallas_ops.ops.lrpe_cosine import reference as meaning
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig

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
        """Those of the kernels."""
        fields = dataclasses.asdict(self) | {"config": self.config}
        del fields["implementation"]
        return fields


def reference(
    p: Params,
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    """`rotate` in jax.numpy, differentiated by JAX."""
    return _forward_reference(x, theta, offset, positions, save=False, **p.static)[0]


def _forward_reference(
    x: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    save: bool,
    config: LrpeCosineConfig | None,
    **static: Any,
) -> tuple[jax.Array, ...]:
    turn = _turns(x.shape[-1], theta, offset, positions, **static)
    a = _activated(x.astype(theta.dtype), **static)
    out = jnp.stack(meaning.turned(a, _heads(turn, **static)), axis=3).astype(x.dtype)
    if not save:
        return (out,)
    saved: list[jax.Array] = []
    if static["act"] == SOFTMAX_SEQUENCE:
        saved += _columns(x.astype(theta.dtype), **static)
    if config is not None and config.cache_angles:
        saved.append(jnp.broadcast_to(turn, (*turn.shape[:-1], x.shape[-1])))
    return out, *saved


def _turns(
    d: int,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    *,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    per_batch: bool,
    **_: Any,
) -> jax.Array:
    """All angles [(B,) N, H, D], of one head if they share theta."""
    if positions is None:
        positions = meaning.grid(shape or (), num_prefix_tokens)
        if offset is not None:
            positions = positions[None] + offset[:, None, None]
            positions = positions if per_batch else positions[0]
    return meaning.turns(theta, positions.astype(theta.dtype), d)


def _heads(turn: jax.Array, *, heads_first: bool, **_: Any) -> jax.Array:
    return meaning.heads_to(turn, "BHND" if heads_first else "BNHD")


def _activated(x: jax.Array, *, act: str, heads_first: bool, **_: Any) -> jax.Array:
    axis = 3 if act == SOFTMAX_FEATURES else 2 if heads_first else 1
    name: Any = act.partition("_")[0]
    return meaning.activate(x, name, axis)


def _columns(x: jax.Array, *, heads_first: bool, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The pivot and share of the sequence's softmax [B, H, D]."""
    axis = 2 if heads_first else 1
    pivot = jnp.maximum(x.max(axis=axis), jnp.finfo(x.dtype).min)
    return pivot, 1 / jnp.exp(x - jnp.expand_dims(pivot, axis)).sum(axis=axis)


def _backward_reference(
    x: jax.Array | None,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    cached: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    del pivot, share, static["config"]
    x = jnp.zeros((*dout.shape[:3], dout.shape[4]), dout.dtype) if x is None else x
    turn = _turns(x.shape[-1], theta, offset, positions, **static) if cached is None else cached

    def run(x: jax.Array) -> jax.Array:
        a = _activated(x.astype(theta.dtype), **static)
        return jnp.stack(meaning.turned(a, _heads(turn, **static)), axis=3).astype(x.dtype)

    (dx,) = jax.vjp(run, x)[1](dout)
    return (dx,)


def _theta_reference(
    x: jax.Array,
    dout: jax.Array,
    theta: jax.Array,
    offset: jax.Array | None,
    positions: jax.Array | None,
    pivot: jax.Array | None,
    share: jax.Array | None,
    **static: Any,
) -> tuple[jax.Array]:
    del pivot, share

    def run(theta: jax.Array) -> jax.Array:
        return _forward_reference(x, theta, offset, positions, save=False, **static)[0]

    (dtheta,) = jax.vjp(run, theta)[1](dout)
    return (dtheta,)


@functools.lru_cache(maxsize=128)
def ops(
    p: Params, heads: str, features: str, offset: str, positions: str, num_axes: int
) -> tuple[Op, Op, Op, Op]:
    """Forward, saving forward, dx, dtheta; the strings name axes of theta, offset, positions."""
    tokens = "h n" if p.heads_first else "n h"
    x, out, column = f"b {tokens} d", f"b {tokens} two d", "b h d"
    theta = f"{heads} {features}"
    cached = f"{'b ' if p.per_batch else ''}n {heads} d"
    saved = [column] * 2 * (p.act == SOFTMAX_SEQUENCE)
    saved += [cached] * (p.config is not None and p.config.cache_angles)
    where = (theta, offset, positions)
    whole = {"e", "k", "one", "two"}
    if positions == "" or p.act == SOFTMAX_SEQUENCE:
        whole.add("n")
    if num_axes > 1 or p.act == SOFTMAX_FEATURES or features == "e":
        whole.add("d")
    describe = partial(Op, whole=tuple(sorted(whole)))
    forward, saving = (
        describe(
            name="lrpe_cosine",
            kernel=partial(kernel.forward, save=save),
            reference=partial(_forward_reference, save=save),
            operands=(x, *where),
            results=(out, *saved) if save else (out,),
        )
        for save in (False, True)
    )
    backward = describe(
        name="lrpe_cosine_backward",
        kernel=kernel.backward,
        reference=_backward_reference,
        operands=(x, out, *where, cached, column, column),
        results=(x,),
    )
    dtheta = describe(
        name="lrpe_cosine_theta",
        kernel=kernel_theta.dtheta,
        reference=_theta_reference,
        operands=(x, out, *where, column, column),
        results=(theta,),
        summed=(" ".join(axis for axis in "bnhd" if axis not in theta.split()),),
    )
    return forward, saving, backward, dtheta


def ops_of(p: Params, x: Any, theta: Any, offset: Any, positions: Any) -> tuple[Op, Op, Op, Op]:
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
    operands = [None if y is None else y.value for y in primals]
    _, theta_moves, _, positions_move = (y is not None and y.perturbed for y in primals)
    saving = ops_of(p, *operands)[1]
    out, *saved = call(saving, *operands, implementation=p.implementation, **p.static)
    named = [checkpoint_name(y, RESIDUALS) for y in saved]
    columns = named[:2] if p.act == SOFTMAX_SEQUENCE else [None, None]
    cached = named[-1] if len(named) % 2 else None
    # What was perturbed is said by what is there: an empty tuple is, None is not.
    moves = [() if moved else None for moved in (theta_moves, positions_move)]
    needs_x = p.act != "none" or theta_moves or positions_move
    x, *where = operands
    return out, (TypeOf(primals[0].value), x if needs_x else None, where, columns, cached, moves)


def _backward(p: Params, saved, dout):  # type: ignore[no-untyped-def]
    of_x, x, where, columns, cached, (theta_moves, positions_move) = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    shape = (*dout.shape[:3], dout.shape[4])
    _, _, backward, theta = ops_of(p, jax.ShapeDtypeStruct(shape, dout.dtype), *where)
    static = {"implementation": p.implementation, **p.static}
    activated = None if p.act == "none" else x
    (dx,) = call(backward, activated, dout, *where, cached, *columns, **static)
    dtheta = dpositions = None
    if theta_moves is not None:
        (dtheta,) = call(theta, x, dout, *where, *columns, **static)
    if positions_move is not None:
        (dpositions,) = jax.vjp(partial(reference, p, x, *where[:2]), where[2])[1](dout)
    return like((dx, dtheta, None, dpositions), (of_x, *where))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
