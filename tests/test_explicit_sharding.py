"""Every op over arrays whose types say how they are split (`AxisType.Explicit`)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_ops
from tests.ops import (
    OPS,
    TERMS,
    Arrays,
    Layout,
    TestedOp,
    compiled,
    cpu_mesh,
    pullback,
    random_weights,
    specs,
)
from tests.shards import assert_sharded, place, run, summing
from tests.support import assert_close, in_turn, random_array, value_and_vjp

Rng = np.random.Generator
EXPLICIT = [(op, whole) for op in OPS for whole in (False, True) if op.unsharded or not whole]


@pytest.mark.parametrize(("op", "whole"), EXPLICIT, ids=lambda x: getattr(x, "name", str(x)))
def test_types_say_how_explicit_axes_are_split(rng: Rng, op: TestedOp, whole: bool) -> None:
    """In the midst of a program over a mesh of explicit axes, the default of `jax.make_mesh`."""
    mesh = cpu_mesh(AxisType.Explicit)
    axes = op.split[0], op.unsharded[0] if whole else op.split[1]
    layout = dict(zip(axes, "xy", strict=True))
    kept = {axis: name for axis, name in layout.items() if axis in op.split}
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    _, want = value_and_vjp(compiled(op, "xla"), xs, weights)

    def fn(*xs: jax.Array) -> Arrays:
        out = compiled(op, "interpret")(2 * xs[0], *xs[1:])
        for x, spec in zip(out, specs(op.results, kept), strict=True):
            assert jax.typeof(x).sharding.spec == spec
        return tuple(x / 2 for x in out)

    with jax.set_mesh(mesh):
        xs = place(mesh, (xs[0] / 2, *xs[1:]), op.operands, layout)
        weights = place(mesh, weights, op.results, kept)
        got, collectives = run(pullback(op, fn), weights, xs)
    assert_close((got[0], *(2 * x for x in got[1:])), want[: op.num_floating], terms=TERMS)
    assert_sharded(got, op.operands[: op.num_floating], mesh, layout)
    assert whole or collectives.keys() == summing(op, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "implementation"),
    [({"b": "x", "h": "y"}, None), ({"n": "x"}, "xla")],
    ids=["split", "merged"],
)
@pytest.mark.parametrize(
    "fn",
    [
        partial(pallas_ops.logcumsumexp, axis=1),
        lambda x, **kwargs: pallas_ops.lrpe_cosine(x, jnp.ones((2, 4)), **kwargs),
        pallas_ops.chunk_cumsum_decay,
        partial(pallas_ops.chunk_cumsum_decay, cu_seqlens=[0, 3, 8]),
    ],
)
def test_references_keep_explicit_types(
    rng: Rng, fn: Any, implementation: Any, layout: Layout
) -> None:
    """Alone, and as the derivative of a kernel's derivative."""
    mesh, x = cpu_mesh(AxisType.Explicit), random_array(rng, (4, 8, 2, 4))

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(fn(x, implementation=implementation) ** 2)

    def second(x: jax.Array) -> jax.Array:
        ddx: jax.Array = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)
        return ddx

    want = jax.jit(second)(x)
    with jax.set_mesh(mesh):
        (x,) = place(mesh, (x,), ("b n h d",), layout)
        got = jax.jit(second)(x)
    assert_close(got, want, terms=TERMS)
    assert_sharded((got,), ("b n h d",), mesh, layout)


def attend(q: jax.Array, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    return pallas_ops.tpa_decode(q, a, a, None, b, b, **options)


PAGES: Any = dict(lengths=np.array([8, 5, 0, 1]), page_table=np.arange(8).reshape(4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize(
    ("fn", "shapes", "layouts"),
    [
        (
            lambda x, s, **kwargs: pallas_ops.logcumsumexp(x, initial_state=s, **kwargs),
            {"b n": (4, 8), "": ()},
            ({"b": "x"}, {}),
        ),
        (
            attend,
            {"b n h d": (4, 1, 2, 4), "b m h": (4, 8, 2), "b m d": (4, 8, 4)},
            ({"b": "y"}, {"m": "x"}, {"m": "x"}),
        ),
        (
            partial(attend, **PAGES),
            {"b n h d": (4, 1, 2, 4), "p s h": (8, 4, 2), "p s d": (8, 4, 4)},
            ({"b": "x"}, {}, {"p": "y"}),
        ),
    ],
    ids=["state", "cache", "pages"],
)
def test_references_of_operands_that_are_split_differently(
    rng: Rng, fn: Any, implementation: Any, shapes: dict[str, Any], layouts: tuple[Layout, ...]
) -> None:
    """Alone, and as the derivative of a derivative."""
    mesh, xs = cpu_mesh(AxisType.Explicit), [random_array(rng, x) for x in shapes.values()]

    def loss(*xs: jax.Array) -> jax.Array:
        return jnp.square(fn(*xs, implementation=implementation)).sum()

    def first(*xs: jax.Array) -> Any:
        return jax.grad(loss, tuple(range(len(xs))))(*xs)

    def second(*xs: jax.Array) -> Any:
        total = lambda *xs: sum(jnp.square(x).sum() for x in first(*xs))  # noqa: E731
        return first(*xs), jax.grad(total)(*xs)

    want = jax.jit(second)(*xs)
    with jax.set_mesh(mesh):
        arrays = [
            place(mesh, (x,), (axes,), layout)[0]
            for x, axes, layout in zip(xs, shapes, layouts, strict=True)
        ]
        got = jax.jit(second)(*arrays)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), terms=TERMS)
    for x, axes, layout in zip(got[0], shapes, layouts, strict=True):
        assert_sharded((x,), (axes,), mesh, layout)


@pytest.mark.parametrize(
    ("theta", "implementation"),
    in_turn([(1, 8), (1, 1), (2, 8), (2, 4)], ["xla", "interpret", None]),
)
def test_features_that_explicit_axes_split(
    rng: Rng, theta: tuple[int, int], implementation: Any
) -> None:
    """lrpe_cosine gathers them, and its output and gradient are split as x is."""
    mesh, layout, axes = cpu_mesh(AxisType.Explicit), {"b": "y", "d": "x"}, ("b n h d",)
    x, angles = random_array(rng, (4, 6, 2, 8)), random_array(rng, theta)
    weights = random_array(rng, (4, 6, 2, 16))
    ops = [partial(pallas_ops.lrpe_cosine, theta=angles)]
    if theta[1] > 1:
        ops.append(partial(pallas_ops.md_lrpe_cosine, theta=angles, shape=(2, 3)))
    for op in ops:
        want = value_and_vjp(partial(op, implementation="xla"), (x,), weights)
        with jax.set_mesh(mesh):
            xs, ws = place(mesh, (x,), axes, layout), place(mesh, (weights,), axes, layout)
            out, grads = value_and_vjp(partial(op, implementation=implementation), xs, ws[0])
        assert_close((out, grads), want)
        assert_sharded((out, *grads), axes * 2, mesh, layout)


@pytest.mark.parametrize(("prefix", "implementation"), in_turn([0, 1], ["xla", "interpret", None]))
def test_angles_that_explicit_axes_split(rng: Rng, prefix: int, implementation: Any) -> None:
    """Positions split along the sequence, theta along its features; with all gradients."""
    mesh = cpu_mesh(AxisType.Explicit)
    x, theta, positions = (random_array(rng, s) for s in ((2, 8, 2, 8), (2, 4), (8, 2)))
    weights = random_array(rng, (2, 8, 2, 16))
    fn = partial(
        pallas_ops.md_lrpe_cosine,
        shape=None,
        num_prefix_tokens=prefix,
        implementation=implementation,
    )

    def run(x: jax.Array, theta: jax.Array, positions: jax.Array, weights: jax.Array) -> Any:
        call = lambda x, theta, positions: fn(x, theta, positions=positions)  # noqa: E731
        return value_and_vjp(call, (x, theta, positions), weights)

    want = run(x, theta, positions, weights)
    with jax.set_mesh(mesh):
        axes, layout = ("b n h d", "h e", "n k"), {"e": "y", "n": "x"}
        xs = place(mesh, (x, theta, positions), axes, layout)
        (ws,) = place(mesh, (weights,), ("b n h d",), layout)
        got = jax.jit(run)(*xs, ws)
    assert_close(got, want)
    assert_sharded(got[1], axes, mesh, layout)


def test_two_meshes_are_refused(rng: Rng) -> None:
    """One of automatic axes, beside one of explicit axes."""
    x = random_array(rng, (4, 5, 2))
    (x,) = place(cpu_mesh(), (x,), ("b n c",), {"b": "x"})
    (state,) = place(cpu_mesh(AxisType.Explicit), (x[:, :1],), ("b n c",), {"c": "y"})
    with pytest.raises(ValueError, match=r"operands are sharded over the meshes .*; accepted: one"):
        pallas_ops.logcumsumexp(x, axis=1, initial_state=state)


def test_gradient_of_what_is_not_saved_is_sharded_like_it(rng: Rng) -> None:
    """Explicitly: lrpe_cosine without an activation keeps the type of x, and not x."""
    mesh, layout = cpu_mesh(AxisType.Explicit), {"b": "x", "h": "y"}
    x, theta = random_array(rng, (4, 3, 2, 4)), random_array(rng, (2, 4))

    def loss(implementation: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(pallas_ops.lrpe_cosine(x, theta, implementation=implementation) ** 3)

    want = jax.grad(partial(loss, "xla"))(x)
    with jax.set_mesh(mesh):
        (x,) = place(mesh, (x,), ("b n h d",), layout)
        got = jax.jit(jax.grad(partial(loss, "interpret")))(x)
    assert_close(got, want)
    assert_sharded((got,), ("b n h d",), mesh, layout)


@pytest.mark.parametrize(("op", "type_"), in_turn(OPS, [AxisType.Explicit, AxisType.Auto]))
def test_export_over_a_mesh(rng: Rng, op: TestedOp, type_: AxisType) -> None:
    """Of explicit axes as it is, of automatic ones in a `jax.shard_map`; and back."""
    mesh, layout = cpu_mesh(type_), {op.split[0]: ("x", "y")}
    xs = op.even_arguments(rng)
    want = compiled(op, "xla")(*xs)
    with jax.set_mesh(mesh):
        xs = place(mesh, xs, op.operands, layout)
        fn = op.fn
        if type_ == AxisType.Auto:
            of_operands, of_results = (specs(axes, layout) for axes in (op.operands, op.results))
            fn = jax.shard_map(fn, in_specs=of_operands, out_specs=of_results)
        exported = jax.export.export(
            jax.jit(fn),
            platforms=("cpu", "cuda"),
            disabled_checks=pallas_ops.DISABLE_JAX_EXPORT_CHECKS,
        )(*xs)
        assert f"pallas_ops_{op.name}".encode() in exported.mlir_module_serialized
        loaded = jax.export.deserialize(exported.serialize())
        assert_close(jax.jit(loaded.call)(*xs), want, terms=TERMS)
