"""Every op under vmap: any operands, any axes, any nesting, and with gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batches import Axes, batched, loop
from tests.ops import OPS, TERMS, TestedOp, compiled, every_op, weighted
from tests.support import assert_close, in_turn, kernel_implementation, random_cotangents

KERNEL = kernel_implementation()
Rng = np.random.Generator


EVERY_OP = [pytest.param(op, id=op.name) for op in OPS]


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
    want = tuple(np.moveaxis(x, 0, axis) for x, axis in zip(want, out_axes, strict=True))
    assert_close(got, want, terms=TERMS)


@every_op
def test_vmap_over_nothing(rng: Rng, op: TestedOp) -> None:
    in_axes = [0] * len(op.operands)
    xs = [jnp.asarray(np.asarray(x)[:0]) for x in batched(rng, op, in_axes)]
    fn = jax.vmap(compiled(op, KERNEL))
    got = jax.jit(fn)(*xs)
    assert_close(got, jax.vmap(compiled(op, "xla"))(*xs))
    grads = jax.grad(weighted(fn, got), op.argnums)(*xs)
    assert_close(grads, tuple(xs[i] for i in op.argnums))


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


@pytest.mark.slow
@pytest.mark.parametrize(("op", "mix"), in_turn(EVERY_OP, ["all-some", "some-others", "all-all"]))
def test_vmap_of_grad_and_grad_of_vmap(rng: Rng, op: TestedOp, mix: str) -> None:
    in_axes = nested_mixes(op)[mix][-1]
    xs = batched(rng, op, in_axes)
    kernel, reference = (compiled(op, implementation) for implementation in (KERNEL, "xla"))
    weights = random_cotangents(rng, jax.eval_shape(loop(reference, in_axes), *xs))
    mapped = weighted(jax.vmap(kernel, in_axes), weights)

    def grad(f: Any) -> Callable[..., Any]:
        return lambda ws, *xs: jax.grad(weighted(f, ws), op.argnums)(*xs)

    got = jax.jit(jax.vmap(grad(kernel), (0, *in_axes)))(weights, *xs)
    grad_of_vmap = jax.jit(jax.grad(mapped, op.argnums))(*xs)
    one = jax.jit(grad(reference))
    each = loop(
        lambda *xs: one(xs[: len(op.results)], *xs[len(op.results) :]),
        [0] * len(op.results) + list(in_axes),
    )
    want = each(*weights, *xs)
    assert_close(got, want, terms=TERMS)
    want = tuple(
        x.sum(0) if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(want, in_axes, strict=False)
    )
    assert_close(grad_of_vmap, want, terms=TERMS)
