"""Every op over several devices: what stays sharded, what is gathered, and that it is all the same."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import h200
from tests.ops import OPS, Arrays, TestedOp, compiled, every_op, spec
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    in_float64,
    random_array,
    random_cotangents,
    value_and_vjp,
)

TERMS = 64  # more than are added up at these sizes
Rng = np.random.Generator
Layout = Mapping[str, Any]  # from axes to mesh axes


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.reshape(jax.devices("cpu"), (4, 2)), ("x", "y"))


def evenly(op: TestedOp, rng: Rng) -> tuple[jax.Array, ...]:
    """Operands whose axes can be split over all devices."""
    return op.arguments(rng, **dict.fromkeys(op.split + op.whole, 8))


def place(mesh: Mesh, xs: Arrays, axes: tuple[str, ...], layout: Layout) -> Arrays:
    shardings = tuple(NamedSharding(mesh, spec(a, layout)) for a in axes)
    return jax.device_put(xs, shardings)


def pullback(fn: Callable[..., Any], num: int) -> Callable[..., Any]:
    """The gradients of the first `num` of (cotangents, operands)."""
    return lambda weights, xs: jax.vjp(lambda *ys: fn(*ys, *xs[num:]), *xs[:num])[1](weights)


def run(fn: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]]:
    """The result, and the collectives that it took."""
    program = jax.jit(fn).lower(*args).compile()
    text = program.as_text()
    assert text is not None
    return program(*args), dict(h200.count_collectives(text))


def assert_sharded(xs: Arrays, axes: tuple[str, ...], mesh: Mesh, layout: Layout) -> None:
    for x, a in zip(xs, axes, strict=True):
        want = NamedSharding(mesh, spec(a, layout))
        assert x.sharding.is_equivalent_to(want, x.ndim), f"{a}: {x.sharding}"


# jit over sharded arrays


def layouts(op: TestedOp) -> list[Layout]:
    one: list[Layout] = [{axis: "x"} for axis in op.split]
    two: list[Layout] = [{a: "x", b: "y"} for a, b in itertools.combinations(op.split, 2)]
    return [*one, *two, {op.split[0]: ("x", "y")}]


LAYOUTS = [(op, layout) for op in OPS for layout in layouts(op)]
WHOLE = [(op, {op.split[0]: "y", axis: "x"}) for op in OPS for axis in op.whole]


def words(x: Any) -> str:
    if isinstance(x, TestedOp):
        return x.name
    return "-".join(f"{axis}_{''.join(names)}" for axis, names in x.items())


@pytest.mark.parametrize(("op", "layout"), LAYOUTS, ids=words)
def test_split_axes_stay_split(rng: Rng, mesh: Mesh, op: TestedOp, layout: Layout) -> None:
    xs = evenly(op, rng)
    weights = random_cotangents(rng, jax.eval_shape(op.fn, *xs))
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    xs = place(mesh, xs, op.operands, layout)
    weights = place(mesh, weights, op.results, layout)

    out, collectives = run(compiled(op, "interpret"), *xs)
    assert collectives == {}
    assert_close(out, want, terms=TERMS)
    assert_sharded(out, op.results, mesh, layout)

    got, collectives = run(pullback(compiled(op, "interpret"), op.num_floating), weights, xs)
    assert_close(got, grads[: op.num_floating], terms=TERMS)
    assert_sharded(got, op.operands[: op.num_floating], mesh, layout)
    shared = any(axis not in op.operands[i].split() for axis in layout for i in op.argnums)
    assert collectives.keys() == ({"all-reduce"} if shared else set())


@pytest.mark.parametrize(("op", "layout"), WHOLE, ids=words)
def test_other_axes_are_gathered(rng: Rng, mesh: Mesh, op: TestedOp, layout: Layout) -> None:
    xs = evenly(op, rng)
    weights = random_cotangents(rng, jax.eval_shape(op.fn, *xs))
    want = value_and_vjp(compiled(op, "xla"), xs, weights)
    xs = place(mesh, xs, op.operands, layout)
    weights = place(mesh, weights, op.results, layout)
    out, collectives = run(compiled(op, "interpret"), *xs)
    assert collectives.keys() == {"all-gather"}
    assert_close(out, want[0], terms=TERMS)
    assert all(x.sharding.spec[0] == "y" for x in out)
    got, _ = run(pullback(compiled(op, "interpret"), op.num_floating), weights, xs)
    assert_close(got, want[1][: op.num_floating], terms=TERMS)


@every_op
def test_vmap_of_a_sharded_op(rng: Rng, mesh: Mesh, op: TestedOp) -> None:
    xs = tuple(jnp.stack(pair) for pair in zip(evenly(op, rng), evenly(op, rng), strict=True))
    want = jax.vmap(compiled(op, "xla"))(*xs)
    layout = dict(v="y") | {op.split[1]: "x"}
    operands, results = (tuple(f"v {a}" for a in axes) for axes in (op.operands, op.results))
    xs = place(mesh, xs, operands, layout)
    out, collectives = run(jax.vmap(compiled(op, "interpret")), *xs)
    assert collectives == {}
    assert_close(out, want, terms=TERMS)
    assert_sharded(out, results, mesh, layout)


# shard_map


def mapped(op: TestedOp, mesh: Mesh, layout: Layout, fn: Any = None) -> Callable[..., Any]:
    """The op on each device's part; operands without a split axis are replicated."""
    return jax.shard_map(
        fn or compiled(op, "interpret"),
        mesh=mesh,
        in_specs=tuple(spec(a, layout) for a in op.operands),
        out_specs=tuple(spec(a, layout) for a in op.results),
    )


def free_layouts(op: TestedOp) -> list[Layout]:
    """Splits that all results take part in."""
    axes = [axis for axis in op.split if all(axis in a.split() for a in op.results)]
    return [{axis: "x"} for axis in axes] + [dict(zip(axes, "xy", strict=False))]


FREE = [(op, layout) for op in OPS for layout in free_layouts(op)]


@pytest.mark.parametrize(("op", "layout"), FREE, ids=words)
def test_shard_map(rng: Rng, mesh: Mesh, op: TestedOp, layout: Layout) -> None:
    """The gradient is taken outside, and inside: there, replicated operands get their sum."""
    xs = evenly(op, rng)
    weights = random_cotangents(rng, jax.eval_shape(op.fn, *xs))
    want = value_and_vjp(compiled(op, "xla"), xs, weights)
    got = value_and_vjp(mapped(op, mesh, layout), xs, weights)
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][: op.num_floating], want[1][: op.num_floating], terms=TERMS)

    inside = jax.shard_map(
        pullback(compiled(op, "interpret"), op.num_floating),
        mesh=mesh,
        in_specs=tuple(tuple(spec(a, layout) for a in axes) for axes in (op.results, op.operands)),
        out_specs=tuple(spec(a, layout) for a in op.operands[: op.num_floating]),
    )
    assert_close(jax.jit(inside)(weights, xs), want[1][: op.num_floating], terms=TERMS)


@every_op
def test_vmap_and_shard_map(rng: Rng, mesh: Mesh, op: TestedOp) -> None:
    layout = {op.split[0]: "x"}
    xs, ys = evenly(op, rng), evenly(op, rng)
    pairs = tuple(jnp.stack([x, y]) for x, y in zip(xs, ys, strict=True))
    want = jax.vmap(compiled(op, "xla"))(*pairs)
    assert_close(jax.jit(jax.vmap(mapped(op, mesh, layout)))(*pairs), want, terms=TERMS)

    def inside(*xs: jax.Array) -> Arrays:
        """The first operand alone is mapped over."""
        first = jnp.stack([xs[0], 2 * xs[0]])
        fn = jax.vmap(compiled(op, "interpret"), [0, *(None,) * (len(xs) - 1)])
        return tuple(x[1] for x in fn(first, *xs[1:]))

    got = jax.jit(mapped(op, mesh, layout, inside))(*xs)
    assert_close(got, compiled(op, "xla")(2 * xs[0], *xs[1:]), terms=TERMS)


# tpa_decode with its cache split over devices


(TPA_DECODE,) = (op for op in OPS if op.name == "tpa_decode")
CACHE_SPECS = tuple(spec(axes, {"m": "x"}) for axes in TPA_DECODE.operands)


def over_the_cache(mesh: Mesh, fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(fn, mesh=mesh, in_specs=CACHE_SPECS, out_specs=(P(), P()))


def decode(*xs: jax.Array, **kwargs: Any) -> Any:
    return pallas_ops.tpa_decode_with_lse(*xs[:6], lengths=xs[6], **kwargs)


@pytest.mark.parametrize("n", [1, 3])
def test_cache_split_over_devices(rng: Rng, mesh: Mesh, n: int) -> None:
    xs = (*TPA_DECODE.arguments(rng, b=5, n=n, m=32)[:6], jnp.asarray([0, 3, 8, 29, 99], jnp.int32))
    weights = random_cotangents(rng, jax.eval_shape(decode, *xs))
    want = value_and_vjp(partial(decode, implementation="xla"), xs, weights)
    fn = partial(decode, axis_name="x", implementation="interpret")
    got = value_and_vjp(over_the_cache(mesh, fn), xs, weights)
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][:6], want[1][:6], terms=TERMS)


def test_cache_split_over_devices_without_lengths(rng: Rng, mesh: Mesh) -> None:
    xs = TPA_DECODE.arguments(rng, jnp.bfloat16, n=3, m=32)

    def full(*xs: jax.Array, **kwargs: Any) -> Any:
        return pallas_ops.tpa_decode_with_lse(*xs[:6], **kwargs)

    own = full(*xs, implementation="xla")
    truth = in_float64(full, *xs)
    fn = partial(full, axis_name="x", implementation="interpret")
    assert_as_good_as_reference(jax.jit(over_the_cache(mesh, fn))(*xs), own, truth, floor=2e-6)


# Compiled for eight H200s


H200S = [(op, dict(zip(op.split[:2], "xy", strict=False))) for op in OPS]
H200S += [(op, {op.split[-1]: "x"}) for op in OPS]


@pytest.mark.parametrize(("op", "layout"), H200S, ids=words)
def test_h200s_only_sum_gradients(op: TestedOp, layout: Layout) -> None:
    mesh = h200.h200_mesh(x=4, y=2)
    xs = op.structs(jnp.bfloat16)
    weights = jax.eval_shape(op.fn, *xs)
    ins, outs = (tuple(spec(a, layout) for a in axes) for axes in (op.operands, op.results))
    program = h200.compile_for_h200(op.fn, *xs, mesh=mesh, specs=ins)
    assert program.collectives == {}
    assert f"pallas_ops_{op.name}" in {kernel.name for kernel in program.kernels}

    def grads(*args: Any) -> Any:
        weights, xs = args[: len(outs)], args[len(outs) :]
        return pullback(op.fn, op.num_floating)(weights, xs)

    program = h200.compile_for_h200(grads, *weights, *xs, mesh=mesh, specs=outs + ins)
    assert program.collectives.keys() == {"all-reduce"}


def test_h200s_merge_a_split_cache_by_sums() -> None:
    mesh = h200.h200_mesh(x=8)
    fn = over_the_cache(mesh, partial(decode, axis_name="x"))
    xs = TPA_DECODE.structs(jnp.bfloat16)
    program = h200.compile_for_h200(fn, *xs, mesh=mesh, specs=CACHE_SPECS)
    assert program.collectives.keys() == {"all-reduce"}
    assert program.memory.argument_size_in_bytes < sum(x.size * x.dtype.itemsize for x in xs) / 7
