"""How lrpe_cosine differentiates: the ops of its passes, what shards do in them, and the rules.

theta, offset and positions are saved. x is saved for an activation, and for the gradients of theta
and of positions. A softmax over the sequence also saves its pivot and share per feature, and
`cache_angles` the angles.
By default one pass makes the gradients of x and theta. A given config is for dx alone: then theta's
gradient is a pass of its own.

A shard's positions are those of its tokens in the whole sequence. For a softmax over the sequence
shards exchange a pivot and a total per feature, and backward the sum of a * da.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_ops.core import checks, partition, shards
from pallas_ops.core.dispatch import Op, Run
from pallas_ops.core.partition import TypeOf, reshard_like
from pallas_ops.ops.lrpe_cosine import kernel, reference
from pallas_ops.ops.lrpe_cosine.config import SOFTMAX_FEATURES, Operands, Params
from pallas_ops.scan.segments import sum_pairs

RESIDUALS = "pallas_ops.lrpe_cosine"


@functools.lru_cache(maxsize=1024)
def op(name: str, p: Params) -> Op:
    """The op of a pass. "saving" is "forward" with residuals, "theta" the gradient of theta."""
    tokens, batch = "h n" if p.heads_first else "n h", "b " if p.per_batch else ""
    x, out, feature = f"b {tokens} d", f"b {tokens} two d", "b h d"
    theta, (heads, width) = p.theta, p.theta.split()
    cached = f"{batch}n {heads} d"
    where = theta, batch.strip() or "one", f"{batch}n k"  # theta, offset, positions
    saved = [feature, feature] * p.over_sequence + [cached] * p.caches_angles
    results = dict(
        forward=[out],
        saving=[out, *saved],
        backward=[x],
        theta=[theta],
        gradients=[x, theta],
        softmax=[feature, feature],
        mean=[feature],
    )[name]
    unsharded = ["e", "k", "one", "two"]  # axes that every device needs in full
    if p.act == SOFTMAX_FEATURES or width == "e":
        unsharded.append("d")
    if name in ("softmax", "mean"):
        unsharded.append("n")
    others = " ".join(axis for axis in "bnhd" if axis not in (heads, width))
    return Op(
        name="lrpe_cosine" if name in ("forward", "saving") else f"lrpe_cosine_{name}",
        kernel=_of_arrays(getattr(kernel, name)),
        reference=_of_arrays(getattr(reference, name)),
        operands=Operands(x, out, *where, cached, *[feature] * 3),
        results=tuple(results),
        unsharded=tuple(unsharded),
        summed=tuple(others if result == theta else "" for result in results),
        shards=None if "n" in unsharded else ("n", partial(_of_shard, name)),
    )


def _of_arrays(run: Run) -> Run:
    return lambda *operands, p: run(Operands(*operands), p=p)


def _of_shard(
    name: str, run: Run, axis_name: shards.Names, *operands: jax.Array | None, p: Params
) -> tuple[jax.Array, ...]:
    """A pass on a shard of the sequence."""
    o = Operands(*operands)
    if o.positions is None:
        n = o.sized.shape[p.tokens_axis]
        positions = reference.token_positions(p, n, o.offset, n * lax.axis_index(axis_name))
        o = o._replace(positions=positions.astype(o.theta.dtype), offset=None)
    if p.over_sequence and o.pivot is None:
        own = jnp.stack(run(op("softmax", p), *Operands(o.x), p=p))
        every = shards.gather(own, axis_name)
        pivot, total = sum_pairs((every[:, 0], every[:, 1]), axis=0)
        o = o._replace(pivot=pivot, share=1 / total)
    o = Operands(*shards.unify(*o))
    if p.over_sequence and o.mean is None and name in ("backward", "gradients"):
        (mean,) = run(op("mean", p), *o, p=p)
        o = Operands(*shards.unify(*o._replace(mean=lax.psum(mean, axis_name))))
    return run(op(name, p), *o, p=p)


def _run(p: Params, name: str, o: Operands) -> tuple[jax.Array, ...]:
    """A pass, over the shards of `p.axis_name` if there are any."""
    call = partial(partition.call, implementation=p.implementation)
    if p.axis_name is not None:
        return _of_shard(name, call, p.axis_name, *o, p=p)
    return call(op(name, p), *o, p=p)


def evaluate(p: Params, x: jax.Array, *where: jax.Array | None) -> jax.Array:
    """The output of x, theta, offset and positions. JAX differentiates that of "xla"."""
    return _run(p, "forward", Operands(x, None, *where))[0]


rotate = jax.custom_vjp(evaluate, nondiff_argnums=(0,))


def _forward(p: Params, *primals: Any):  # type: ignore[no-untyped-def]
    operands: list[Any] = [None if y is None else y.value for y in primals]
    wanted = [y is not None and y.perturbed for y in primals]  # which operands need a gradient
    (x, *where), (wants_dx, wants_dtheta, _, wants_dpositions) = operands, wanted
    out, *saved = _run(p, "saving", Operands(x, None, *where))
    named = [checkpoint_name(y, RESIDUALS) for y in saved]
    softmax = named[:2] if p.over_sequence else [None, None]  # pivot and share
    cached = named[-1] if p.caches_angles else None
    needs_x = (p.act != "none" and wants_dx) or wants_dtheta or wants_dpositions
    kept = x if needs_x else jnp.zeros(0, x.dtype)
    # The shape of a residual records which gradients are wanted. The tree of the residuals must not
    # depend on that: JAX traces this rule once for each such set, and keeps only the last tree.
    wanted_shape = jnp.zeros((0, *map(int, wanted)))
    return out, (TypeOf(jax.typeof(x).sharding), kept, where, cached, softmax, wanted_shape)


def _backward(p: Params, saved: Any, dout: Any):  # type: ignore[no-untyped-def]
    checks.axis_name(p.axis_name)  # refuses the name of a `jax.vmap`, which is unbound by now
    of_x, x, where, cached, (pivot, share), wanted_shape = saved
    wants_dx, wants_dtheta, _, wants_dpositions = wanted_shape.shape[1:]
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    o = Operands(x, dout, *where)._replace(pivot=pivot, share=share)
    dx = dtheta = dpositions = None
    if wants_dx and wants_dtheta and p.config is None:
        dx, dtheta = _run(p, "gradients", o)
    elif wants_dx:
        activated = None if p.act == "none" else x
        (dx,) = _run(p, "backward", o._replace(x=activated, cached=cached))
    if wants_dtheta and dtheta is None:
        (dtheta,) = _run(p, "theta", o)
    if wants_dpositions:
        in_numpy = dataclasses.replace(p, implementation="xla")
        out, pull = jax.vjp(partial(evaluate, in_numpy, x, *where[:2]), where[2])
        (dpositions,) = pull(reshard_like(dout, out))
    return tuple(map(reshard_like, (dx, dtheta, None, dpositions), (of_x, *where)))


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
