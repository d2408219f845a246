"""Every op under the transformations of JAX but vmap: its kernel against its reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.batches import batched, loop
from tests.ops import (
    TERMS,
    Arrays,
    TestedOp,
    compiled,
    every_op,
    pullback,
    random_weights,
    weighted,
)
from tests.support import (
    assert_close,
    kernel_implementation,
    on_host,
    random_array,
    random_cotangents,
    value_and_vjp,
)

KERNEL = kernel_implementation()
Rng = np.random.Generator


def losses(op: TestedOp, weights: Arrays) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Scalar functions of the kernel and of the reference."""
    return weighted(compiled(op, KERNEL), weights), weighted(compiled(op, "xla"), weights)


# jit, eager


@every_op
def test_eager_jit_and_disabled_jit(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    want = compiled(op, "xla")(*xs)
    assert_close(compiled(op, KERNEL)(*xs), want, terms=TERMS)
    assert_close(op.fn(*xs, implementation=KERNEL), want, terms=TERMS)
    assert_close(op.fn(*map(np.asarray, xs), implementation=KERNEL), want, terms=TERMS)
    with jax.disable_jit():
        assert_close(op.fn(*xs, implementation=KERNEL), want, terms=TERMS)


@pytest.mark.slow
@every_op
def test_64_bit_mode_changes_nothing(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    weights = random_weights(rng, op, xs)
    fn = pullback(op, compiled(op, KERNEL))
    want = jax.jit(fn)(weights, xs)
    with jax.enable_x64(True):
        assert_close(jax.jit(fn)(weights, xs), want, terms=TERMS)


# Gradients


@every_op
def test_grad_and_value_and_grad(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    weights = random_weights(rng, op, xs)
    kernel, _ = losses(op, weights)
    out, want = value_and_vjp(compiled(op, "xla"), xs, weights)
    got = jax.grad(kernel, op.argnums)(*xs)
    assert_close(got, want[: op.num_floating], terms=TERMS)
    value, grads = jax.jit(jax.value_and_grad(kernel, op.argnums[-1]))(*xs)
    total = np.sum([np.vdot(x, y) for x, y in zip(out, weights, strict=True)])
    assert_close(value, total, terms=TERMS, scale=8.0)
    assert_close(grads, want[op.num_floating - 1], terms=TERMS)


@every_op
def test_grad_of_grad(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    weights = random_weights(rng, op, xs)
    directions = tuple(random_array(rng, xs[i].shape) for i in op.argnums)
    got, want = (
        jax.jit(jax.grad(weighted(jax.grad(loss, op.argnums), directions), op.argnums))(*xs)
        for loss in losses(op, weights)
    )
    assert_close(got, want, terms=TERMS)


@every_op
def test_remat_keeps_the_named_residuals(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    loss, reference = losses(op, random_weights(rng, op, xs))
    want = jax.jit(jax.grad(reference, op.argnums))(*xs)
    policy = jax.checkpoint_policies.save_only_these_names(op.residuals or "none")
    remats: dict[str, Callable[..., Any]] = dict(
        all=jax.checkpoint, named=partial(jax.checkpoint, policy=policy)
    )
    runs = dict(none=count_runs(op, jax.make_jaxpr(jax.grad(loss, op.argnums))(*xs).jaxpr))
    for name, remat in remats.items():
        grad = jax.jit(jax.grad(remat(loss), op.argnums))
        assert_close(grad(*xs), want, terms=TERMS)
        runs[name] = count_runs(op, jax.make_jaxpr(grad)(*xs).jaxpr)
    assert runs == dict(none=1, all=2 if op.residuals else 1, named=1)


def count_runs(op: TestedOp, jaxpr: Any) -> int:
    """How often a program runs the op's forward kernel."""
    here = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_ops_dispatch"]
    below = [count_runs(op, sub) for sub in jax.extend.core.subjaxprs(jaxpr)]
    return [eqn.params["bound"].op.name for eqn in here].count(op.name) + sum(below)


@pytest.mark.slow
@every_op
def test_forward_mode_of_the_reference(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    floating, integers = xs[: op.num_floating], xs[op.num_floating :]
    weights = random_weights(rng, op, xs)
    tangents = tuple(random_array(rng, x.shape) for x in floating)
    _, reference = losses(op, weights)

    def loss(*ys: jax.Array) -> Any:
        return reference(*ys, *integers)

    @jax.jit  # one program: they have much in common
    def derivatives(ys: Arrays, tangents: Arrays) -> Any:
        firsts = jax.grad(loss, op.argnums)(*ys), jax.jvp(loss, ys, tangents)[1]
        return *firsts, jax.jacfwd(loss)(*ys), jax.hessian(loss)(*ys)

    grads, along, first, hessian = map(on_host, derivatives(floating, tangents))
    directional = np.sum([np.vdot(g, t) for g, t in zip(grads, tangents, strict=True)])
    assert_close(along, directional, terms=TERMS)
    assert_close(first, grads[0], terms=TERMS)
    kernel = weighted(compiled(op, KERNEL), weights)
    twice = jax.grad(weighted(lambda *ys: (jax.grad(kernel)(*ys),), tangents[:1]))
    product = jax.jit(twice)(*xs)
    want = hessian.reshape(2 * [floating[0].size]) @ np.ravel(tangents[0])
    assert_close(product, want.reshape(product.shape), terms=TERMS)


# Control flow


@every_op
def test_scan(rng: Rng, op: TestedOp) -> None:
    """Forward, and backward through the steps."""
    in_axes = [0] * len(op.operands)
    xs = batched(rng, op, in_axes)
    weights = random_cotangents(rng, jax.eval_shape(loop(op.fn, in_axes), *xs))

    def scanned(*xs: jax.Array) -> Arrays:
        out: Arrays = jax.lax.scan(lambda _, x: (None, compiled(op, KERNEL)(*x)), None, xs)[1]
        return out

    def one(*ys: Any) -> Any:
        return value_and_vjp(compiled(op, "xla"), ys[: len(xs)], ys[len(xs) :])

    want = loop(one, [0] * len(xs + weights))(*xs, *weights)
    got = value_and_vjp(scanned, xs, weights)
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][: op.num_floating], want[1][: op.num_floating], terms=TERMS)


def test_scan_over_decode_steps(rng: Rng) -> None:
    b, m, h, r, d, e = 2, 5, 3, 2, 4, 4
    aq, ak, av, bq, bk, bv = (
        on_host(random_array(rng, (m, b, 1, *tail)))
        for tail in ((h, r), (h,), (h,), (r, d), (d,), (e,))
    )

    def step(cache: Any, token: Any) -> Any:
        i, (aq, bq), new = token
        cache = tuple(
            jax.lax.dynamic_update_index_in_dim(x, y, i, 1) for x, y in zip(cache, new, strict=True)
        )
        ak, av, bk, bv = cache
        lengths = jnp.broadcast_to(i + 1, (b,))
        return cache, pallas_ops.tpa_decode(
            aq, ak, av, bq, bk, bv, lengths=lengths, implementation=KERNEL
        )

    caches = tuple(np.full((b, m, x.shape[-1]), np.nan, np.float32) for x in (ak, av, bk, bv))
    tokens = (np.arange(m), (aq, bq), (ak, av, bk, bv))
    got = on_host(jax.jit(partial(jax.lax.scan, step))(caches, tokens)[1])
    whole = (x.swapaxes(0, 1)[:, :, 0] for x in (aq, ak, av, bq, bk, bv))
    assert_close(
        got[:, :, 0].swapaxes(0, 1), jax.jit(pallas_ops.reference.tpa_decode)(*whole), terms=m
    )


def test_infinities_that_jax_looks_for() -> None:
    """It then runs the call again, operation by operation, and has to come to an end."""
    x = jnp.full((1, 2, 1), 3e38, jnp.float32)
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        pallas_ops.chunk_cumsum_decay(x)
