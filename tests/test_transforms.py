"""Every op under every transformation of JAX, its kernel against its reference."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_ops
from tests import h200
from tests.ops import OPS, Arrays, TestedOp, compiled, every_op, weighted
from tests.support import (
    assert_close,
    kernel_implementation,
    random_array,
    random_cotangents,
    value_and_vjp,
)

KERNEL = kernel_implementation()
TERMS = 64  # more than are added up at these sizes
Rng = np.random.Generator
Axes = Sequence[int | None]


def random_weights(rng: Rng, op: TestedOp, xs: Arrays) -> Any:
    return random_cotangents(rng, jax.eval_shape(compiled(op, "xla"), *xs))


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
    assert_close(value, jnp.asarray(weighted(lambda: out, weights)()), terms=TERMS, scale=8.0)
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
    want = jax.grad(reference, op.argnums)(*xs)
    policy = jax.checkpoint_policies.save_only_these_names(op.residuals)
    runs = {}
    for name, remat in dict(
        none=lambda f: f, all=jax.checkpoint, named=partial(jax.checkpoint, policy=policy)
    ).items():
        grad = jax.jit(jax.grad(remat(loss), op.argnums))
        assert_close(grad(*xs), want, terms=TERMS)
        runs[name] = count_runs(op, jax.make_jaxpr(grad)(*xs).jaxpr)
    assert runs == dict(none=1, all=2, named=1)


def count_runs(op: TestedOp, jaxpr: Any) -> int:
    """How often a program runs the op's forward kernel."""
    here = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_ops_dispatch"]
    below = (count_runs(op, sub) for sub in jax.extend.core.subjaxprs(jaxpr))
    return sum(eqn.params["bound"].op.name == op.name for eqn in here) + sum(below)


@every_op
def test_forward_mode_of_the_reference(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    floating, integers = xs[: op.num_floating], xs[op.num_floating :]
    weights = random_weights(rng, op, xs)
    tangents = tuple(random_array(rng, x.shape) for x in floating)
    _, reference = losses(op, weights)

    def loss(*ys: jax.Array) -> jax.Array:
        return reference(*ys, *integers)

    grads = jax.jit(jax.grad(loss, op.argnums))(*floating)
    directional = sum(jnp.vdot(g, t) for g, t in zip(grads, tangents, strict=True))
    assert_close(jax.jit(partial(jax.jvp, loss))(floating, tangents)[1], directional, terms=TERMS)
    assert_close(jax.jit(jax.jacfwd(loss))(*floating), grads[0], terms=TERMS)
    kernel = weighted(compiled(op, KERNEL), weights)
    hessian = jax.jit(jax.hessian(loss))(*floating).reshape(2 * [floating[0].size])
    product = jax.grad(weighted(lambda *ys: (jax.grad(kernel)(*ys),), tangents[:1]))(*xs)
    assert_close(product, (hessian @ tangents[0].ravel()).reshape(product.shape), terms=TERMS)


# vmap


def loop(fn: Callable[..., Any], in_axes: Axes) -> Callable[..., Any]:
    """What `jax.vmap(fn, in_axes)` means."""

    def looped(*xs: jax.Array) -> Any:
        size = next(x.shape[a] for x, a in zip(xs, in_axes, strict=True) if a is not None)
        parts = [
            fn(*(x if a is None else jnp.take(x, i, a) for x, a in zip(xs, in_axes, strict=True)))
            for i in range(size)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys), *parts)

    return looped


def batched(rng: Rng, op: TestedOp, *levels: Axes) -> tuple[jax.Array, ...]:
    """Operands to map over by in_axes `levels[0]`, then by `levels[1]`, and so on."""

    def argument(i: int, axes: list[int]) -> jax.Array:
        if not axes:
            return op.argument(rng, i)
        return jnp.stack([argument(i, axes[1:]) for _ in range(2)], axes[0])

    return tuple(
        argument(i, [axis for axes in levels if (axis := axes[i]) is not None])
        for i in range(len(op.operands))
    )


def mixes(op: TestedOp) -> Iterator[Axes]:
    """in_axes: all operands, each alone, all but the last, and other axes than the first."""
    n = len(op.operands)
    yield [0] * n
    for i in range(n):
        yield [0 if j == i else None for j in range(n)]
    yield [0] * (n - 1) + [None]
    yield [len(axes.split()) for axes in op.operands]
    yield [None if j % 3 == 2 else -1 for j in range(n)]


MIXES = [(op, axes) for op in OPS for axes in mixes(op)]


@pytest.mark.parametrize(("op", "in_axes"), MIXES, ids=lambda x: getattr(x, "name", None) or str(x))
def test_vmap(rng: Rng, op: TestedOp, in_axes: Axes) -> None:
    xs = batched(rng, op, in_axes)
    got = jax.jit(jax.vmap(compiled(op, KERNEL), in_axes))(*xs)
    assert_close(got, loop(compiled(op, "xla"), in_axes)(*xs), terms=TERMS)


@every_op
def test_vmap_out_axes(rng: Rng, op: TestedOp) -> None:
    in_axes = [0] * len(op.operands)
    xs = batched(rng, op, in_axes)
    out_axes = tuple(range(1, 1 + len(op.results)))
    got = jax.jit(jax.vmap(compiled(op, KERNEL), in_axes, out_axes))(*xs)
    want = loop(compiled(op, "xla"), in_axes)(*xs)
    want = tuple(jnp.moveaxis(x, 0, axis) for x, axis in zip(want, out_axes, strict=True))
    assert_close(got, want, terms=TERMS)


def nested_mixes(op: TestedOp) -> dict[str, list[Axes]]:
    n = len(op.operands)
    every: Axes = [0] * n
    last: Axes = [None] * (n - 1) + [0]
    odd: Axes = [i % 2 or None for i in range(n)]
    even: Axes = [None if i % 2 else 0 for i in range(n)]
    return {
        "all-all": [every, every],
        "all-some": [every, odd],
        "some-all": [even, every],
        "some-others": [odd, even],
        "last-all-last": [last, every, last],
    }


@pytest.mark.parametrize("mix", nested_mixes(OPS[0]))
@every_op
def test_vmap_of_vmap(rng: Rng, op: TestedOp, mix: str) -> None:
    levels = nested_mixes(op)[mix]
    xs = batched(rng, op, *levels)
    kernel, reference = compiled(op, KERNEL), compiled(op, "xla")
    for in_axes in reversed(levels):
        kernel, reference = jax.vmap(kernel, in_axes), loop(reference, in_axes)
    assert_close(jax.jit(kernel)(*xs), reference(*xs), terms=TERMS)


@pytest.mark.parametrize("mix", ["all-all", "all-some", "some-all"])
@every_op
def test_vmap_of_grad_and_grad_of_vmap(rng: Rng, op: TestedOp, mix: str) -> None:
    in_axes = nested_mixes(op)[mix][-1]
    xs = batched(rng, op, in_axes)
    kernel, reference = (compiled(op, implementation) for implementation in (KERNEL, "xla"))
    weights = random_cotangents(rng, jax.eval_shape(loop(reference, in_axes), *xs))
    mapped = weighted(jax.vmap(kernel, in_axes), weights)
    want = jax.grad(weighted(loop(reference, in_axes), weights), op.argnums)(*xs)
    assert_close(jax.jit(jax.grad(mapped, op.argnums))(*xs), want, terms=TERMS)

    def grad(f: Any) -> Callable[..., Any]:
        return lambda ws, *xs: jax.grad(weighted(f, ws), op.argnums)(*xs)

    got = jax.jit(jax.vmap(grad(kernel), (0, *in_axes)))(weights, *xs)
    each = loop(
        lambda *xs: jax.jit(grad(reference))(xs[: len(op.results)], *xs[len(op.results) :]),
        [0] * len(op.results) + list(in_axes),
    )
    assert_close(got, each(*weights, *xs), terms=TERMS)


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

    want = value_and_vjp(loop(compiled(op, "xla"), in_axes), xs, weights)
    got = value_and_vjp(scanned, xs, weights)
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][: op.num_floating], want[1][: op.num_floating], terms=TERMS)


def test_scan_over_decode_steps(rng: Rng) -> None:
    b, m, h, r, d, e = 2, 5, 3, 2, 4, 4
    aq, ak, av, bq, bk, bv = (
        random_array(rng, (m, b, 1, *tail)) for tail in ((h, r), (h,), (h,), (r, d), (d,), (e,))
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

    caches = tuple(jnp.full((b, m, x.shape[-1]), jnp.nan) for x in (ak, av, bk, bv))
    tokens = (jnp.arange(m), (aq, bq), (ak, av, bk, bv))
    _, got = jax.jit(partial(jax.lax.scan, step))(caches, tokens)
    whole = (x.swapaxes(0, 1)[:, :, 0] for x in (aq, ak, av, bq, bk, bv))
    assert_close(got[:, :, 0].swapaxes(0, 1), pallas_ops.reference.tpa_decode(*whole), terms=m)


# Compilations


class Events:
    """Counts the traces and compilations that JAX reports."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, *_: Any, **__: Any) -> None:
        if name.endswith(("jaxpr_trace_duration", "backend_compile_duration")):
            self.names.append(name)


@pytest.fixture
def events() -> Iterator[Events]:
    listener = Events()
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield listener
    jax.monitoring.unregister_event_duration_listener(listener)


@every_op
def test_integers_compile_once(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    fn = jax.jit(partial(op.fn, implementation=None))
    results = []
    for _ in range(5):
        integers = tuple(op.argument(rng, i) for i in op.integers)
        results.append(fn(*xs[: op.num_floating], *integers)[0])
        assert fn._cache_size() == 1
    assert not np.array_equal(results[0], results[1])


@every_op
def test_eager_calls_share_one_program(rng: Rng, op: TestedOp, events: Events) -> None:
    calls = [op.arguments(rng, b=3) for _ in range(2)]  # a size of this test's own
    op.fn(*calls[0], implementation=KERNEL)
    assert events.names
    events.names.clear()
    op.fn(*calls[1], implementation=KERNEL)
    assert not events.names


# Platforms


@every_op
def test_triton_on_a_cpu_says_what_to_pass(rng: Rng, op: TestedOp) -> None:
    xs = jax.device_put(op.arguments(rng), jax.devices("cpu")[0])
    message = f'{op.name}: implementation="triton" needs an NVIDIA GPU.*pass implementation=None'
    with pytest.raises(ValueError, match=message):
        jax.jit(partial(op.fn, implementation="triton"))(*xs)


@every_op
def test_a_cpu_never_traces_the_kernel(
    rng: Rng, op: TestedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("traced a kernel")

    monkeypatch.setattr(pl, "pallas_call", refuse)
    jax.clear_caches()
    xs = jax.device_put(op.arguments(rng), jax.devices("cpu")[0])
    weights = random_weights(rng, op, xs)
    got, want = (
        value_and_vjp(partial(op.fn, implementation=implementation), xs, weights)
        for implementation in (None, "xla")
    )
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][: op.num_floating], want[1][: op.num_floating], terms=TERMS)
    with pytest.raises(AssertionError, match="traced a kernel"):
        op.fn(*xs, implementation="interpret")


@every_op
def test_import_and_tracing_start_no_backend(op: TestedOp) -> None:
    program = f"""
import jax, jax.numpy as jnp, numpy as np
from tests.ops import OPS, weighted
op = next(op for op in OPS if op.name == "{op.name}")
xs = [jax.ShapeDtypeStruct([op.sizes[a] for a in axes.split()], "i4" if i in op.integers else "f4")
      for i, axes in enumerate(op.operands)]
jax.make_jaxpr(op.fn)(*xs)
jax.make_jaxpr(jax.vmap(op.fn))(*[jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in xs])
"""
    env = os.environ | dict(JAX_PLATFORMS="there-is-none")
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


@every_op
def test_export_for_cpu_and_cuda(rng: Rng, op: TestedOp) -> None:
    xs = jax.device_put(op.arguments(rng), jax.devices("cpu")[0])
    weights = random_weights(rng, op, xs)
    export = jax.export.export(
        jax.jit(op.fn),
        platforms=("cpu", "cuda"),
        disabled_checks=pallas_ops.DISABLE_JAX_EXPORT_CHECKS,
    )
    with h200.on_h200():
        exported = export(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
        data = exported.serialize(vjp_order=1)
    assert f"pallas_ops_{op.name}".encode() in exported.mlir_module_serialized
    loaded = jax.export.deserialize(data)
    assert loaded.platforms == ("cpu", "cuda")
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    assert_close(tuple(loaded.call(*xs)), want, terms=TERMS)
    got = tuple(loaded.vjp().call(*xs, *weights))
    assert_close(got[: op.num_floating], grads[: op.num_floating], terms=TERMS)
