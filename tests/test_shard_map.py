"""Every op inside `jax.shard_map`, its replication check on; tpa_decode with its cache split."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import h200
from tests.ops import (
    OPS,
    TERMS,
    TPA_DECODE,
    Arrays,
    Layout,
    TestedOp,
    compiled,
    cpu_mesh,
    every_op,
    pullback,
    random_weights,
    specs,
    weighted,
    words,
)
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    in_float64,
    on_host,
    random_array,
    random_cotangents,
    value_and_vjp,
)

Rng = np.random.Generator


def mapped(op: TestedOp, layout: Layout, fn: Any = None) -> Callable[..., Any]:
    """The op on each device's part; operands without a split axis are replicated."""
    run: Callable[..., Any] = jax.shard_map(
        fn or compiled(op, "interpret"),
        mesh=cpu_mesh(),
        in_specs=specs(op.operands, layout),
        out_specs=specs(op.results, layout),
    )
    return run


def layouts(op: TestedOp) -> list[Layout]:
    """Splits that all results take part in."""
    axes = [axis for axis in op.split if all(axis in a.split() for a in op.results)]
    return [{axes[0]: "x"}, dict(zip(axes, "xy", strict=False))]


# Kernels are interpreted, which takes long to compile, in the first layout of each op.
LAYOUTS = [
    (op, layout, None if i else "interpret") for op in OPS for i, layout in enumerate(layouts(op))
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "layout", "implementation"), LAYOUTS, ids=words)
def test_gradients_outside_and_inside(
    rng: Rng, op: TestedOp, layout: Layout, implementation: Any
) -> None:
    """Either way, replicated operands get the sum of the devices' gradients."""
    fn = compiled(op, implementation)
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    out, got = value_and_vjp(mapped(op, layout, fn), xs, weights)
    assert_close(out, want, terms=TERMS)
    assert_close(got[: op.num_floating], grads[: op.num_floating], terms=TERMS)

    inside = jax.shard_map(
        pullback(op, compiled(op, None)),
        mesh=cpu_mesh(),
        in_specs=(specs(op.results, layout), specs(op.operands, layout)),
        out_specs=specs(op.operands[: op.num_floating], layout),
    )
    assert_close(jax.jit(inside)(weights, xs), grads[: op.num_floating], terms=TERMS)


@pytest.mark.slow
@every_op
def test_grad_of_grad(rng: Rng, op: TestedOp) -> None:
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    directions = tuple(random_array(rng, xs[i].shape) for i in op.argnums)
    got, want = (
        jax.jit(
            jax.grad(weighted(jax.grad(weighted(fn, weights), op.argnums), directions), op.argnums)
        )(*xs)
        for fn in (mapped(op, layouts(op)[-1]), compiled(op, "xla"))
    )
    assert_close(got, want, terms=TERMS)


@pytest.mark.slow
@every_op
def test_vmap_outside_and_inside(rng: Rng, op: TestedOp) -> None:
    layout = {op.split[0]: "x"}
    xs, ys = op.even_arguments(rng), op.even_arguments(rng)
    pairs = tuple(np.stack([x, y]) for x, y in zip(xs, ys, strict=True))
    want = jax.vmap(compiled(op, "xla"))(*pairs)
    assert_close(jax.jit(jax.vmap(mapped(op, layout)))(*pairs), want, terms=TERMS)

    def inside(*xs: jax.Array) -> Arrays:
        """The first operand alone is mapped over."""
        first = jnp.stack([xs[0], 2 * xs[0]])
        fn = jax.vmap(compiled(op, None), [0, *(None,) * (len(xs) - 1)])
        return tuple(x[1] for x in fn(first, *xs[1:]))

    got = jax.jit(mapped(op, layout, inside))(*xs)
    assert_close(got, compiled(op, "xla")(2 * xs[0], *xs[1:]), terms=TERMS)


@every_op
def test_of_some_mesh_axes(rng: Rng, op: TestedOp) -> None:
    """The others are left to XLA, which does not gather for what is `jax.numpy`."""
    layout = {op.split[0]: "x"}
    outs = specs(op.results, layout)
    run = jax.shard_map(
        compiled(op, None),
        mesh=cpu_mesh(),
        in_specs=specs(op.operands, layout),
        out_specs=outs,
        axis_names={"x"},
    )
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    out, got = value_and_vjp(jax.jit(run), xs, weights)
    assert_close(out, want, terms=TERMS)
    assert_close(got[: op.num_floating], grads[: op.num_floating], terms=TERMS)


def test_h200s_run_kernels_over_some_mesh_axes() -> None:
    mesh, spec = h200.h200_mesh(x=2, y=2), P("x", "y")
    x = jax.ShapeDtypeStruct((4, 4096, 64), jnp.bfloat16)
    fn = partial(pallas_ops.logcumsumexp, axis=1, axis_name="y")
    run = jax.shard_map(
        fn, mesh=mesh, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"}
    )
    program = h200.compile_for_h200(run, x, mesh=mesh, specs=(spec,))
    assert any(".entry pallas_ops_logcumsumexp" in text for text in program.ptx)


# tpa_decode with its cache split over devices

CACHE_SPECS = specs(TPA_DECODE.operands, {"m": "x"})


def over_the_cache(fn: Callable[..., Any], mesh: Mesh | None = None) -> Callable[..., Any]:
    run: Callable[..., Any] = jax.shard_map(
        fn, mesh=mesh or cpu_mesh(), in_specs=CACHE_SPECS, out_specs=(P(), P())
    )
    return run


def decode(*xs: jax.Array, **kwargs: Any) -> Any:
    return pallas_ops.tpa_decode_with_lse(*xs[:6], lengths=xs[6], **kwargs)


def decode_all(*xs: jax.Array, **kwargs: Any) -> Any:
    return pallas_ops.tpa_decode_with_lse(*xs[:6], **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "window", "implementation"),
    [(1, None, "interpret"), (3, None, None), (1, 9, None), (3, 13, "interpret")],
)
def test_lengths_count_over_a_split_cache(
    rng: Rng, n: int, window: int | None, implementation: Any
) -> None:
    """Shards are empty, partly filled and full; gradients are taken outside and inside."""
    lengths = np.array([0, 3, 8, 29, 99], np.int32)
    xs = on_host((*TPA_DECODE.arguments(rng, b=5, n=n, m=32)[:6], lengths))
    weights = on_host(random_cotangents(rng, jax.eval_shape(decode, *xs)))
    want, grads = value_and_vjp(partial(decode, implementation="xla", window=window), xs, weights)
    fn = partial(decode, axis_name="x", implementation=implementation, window=window)
    out, got = value_and_vjp(over_the_cache(fn), xs, weights)
    assert_close(out, want, terms=TERMS)
    assert_close(got[:6], grads[:6], terms=TERMS)

    inside = jax.shard_map(
        pullback(TPA_DECODE, partial(decode, axis_name="x", window=window)),
        mesh=cpu_mesh(),
        in_specs=((P(), P()), CACHE_SPECS),
        out_specs=CACHE_SPECS[:6],
    )
    assert_close(jax.jit(inside)(weights, xs), grads[:6], terms=TERMS)


@pytest.mark.slow
def test_split_cache_loses_no_precision(rng: Rng) -> None:
    xs = on_host(TPA_DECODE.arguments(rng, jnp.bfloat16, n=3, m=32))
    fn = partial(decode_all, axis_name="x", implementation="interpret")
    own = decode_all(*xs, implementation="xla")
    truth = in_float64(decode_all, *xs)
    assert_as_good_as_reference(jax.jit(over_the_cache(fn))(*xs), own, truth)


@pytest.mark.slow
def test_a_mesh_axis_is_named_once() -> None:
    """XLA ends the process otherwise (JAX 0.12)."""
    sums = partial(pallas_ops.logcumsumexp, axis_name=("x", "x"))
    mapped = jax.shard_map(sums, mesh=cpu_mesh(), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"'x'\); accepted: each mesh axis once"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), "float32"))


def test_without_the_replication_check_gradients_are_the_same(rng: Rng) -> None:
    xs = on_host(TPA_DECODE.arguments(rng, b=5, n=3, m=32))
    weights = on_host(random_cotangents(rng, jax.eval_shape(decode, *xs)))
    want = value_and_vjp(partial(decode, implementation="xla"), xs, weights)
    fn = partial(decode, axis_name="x", implementation="interpret")
    unchecked = jax.shard_map(
        fn, mesh=cpu_mesh(), in_specs=CACHE_SPECS, out_specs=(P(), P()), check_vma=False
    )
    out, grads = value_and_vjp(unchecked, xs, weights)
    assert_close((out, grads[:6]), (want[0], want[1][:6]), terms=TERMS)


@pytest.mark.slow
def test_h200s_merge_a_split_cache_in_one_exchange() -> None:
    mesh = h200.h200_mesh(x=8)
    xs = TPA_DECODE.structs(jnp.bfloat16)
    size = sum(x.size * x.dtype.itemsize for x in xs)
    for fn in (over_the_cache(partial(decode, axis_name="x"), mesh), decode):
        program = h200.compile_for_h200(fn, *xs, mesh=mesh, specs=CACHE_SPECS)
        assert program.collectives == {"all-gather": 1}
        assert any(".entry pallas_ops_tpa_decode(" in text for text in program.ptx)
        assert program.memory.argument_size_in_bytes < size / 7
