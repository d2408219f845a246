"""Every op under jit over sharded arrays: what stays split, what is gathered, the same results."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pallas_ops
from tests import h200
from tests.ops import (
    OPS,
    TERMS,
    Layout,
    TestedOp,
    compiled,
    cpu_mesh,
    every_op,
    pullback,
    random_weights,
    specs,
    with_pullback,
    words,
)
from tests.shards import assert_sharded, place, run, summing
from tests.support import assert_close, in_turn, on_host, random_array, value_and_vjp

Rng = np.random.Generator


def layouts(op: TestedOp) -> list[Layout]:
    """One axis, each pair of them, and one over both axes of the mesh."""
    one: list[Layout] = [{op.split[0]: "x"}]
    two: list[Layout] = [{a: "x", b: "y"} for a, b in itertools.combinations(op.split, 2)]
    return [*one, *two, {op.split[0]: ("x", "y")}]


# Kernels are interpreted, which takes long to compile, in the first layout of each op.
LAYOUTS = [
    (op, layout, None if i else "interpret") for op in OPS for i, layout in enumerate(layouts(op))
]
WHOLE = [(op, {op.split[0]: "y", axis: "x"}) for op in OPS for axis in op.unsharded]


@pytest.mark.parametrize(("op", "type_"), in_turn(OPS, [AxisType.Auto, AxisType.Explicit]))
def test_arrays_that_were_made_before_the_mesh(rng: Rng, op: TestedOp, type_: AxisType) -> None:
    """On no device in particular; the program is on all of the mesh."""
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    with jax.set_mesh(cpu_mesh(type_)):
        out, got = value_and_vjp(compiled(op, None), xs, weights)
    assert_close((out, *got[: op.num_floating]), (want, *grads[: op.num_floating]), terms=TERMS)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "layout", "implementation"), LAYOUTS, ids=words)
def test_split_axes_stay_split(rng: Rng, op: TestedOp, layout: Layout, implementation: Any) -> None:
    mesh = cpu_mesh()
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    xs = place(mesh, xs, op.operands, layout)
    weights = place(mesh, weights, op.results, layout)

    primal, collectives = run(compiled(op, None), *xs)
    assert collectives == {}
    (out, got), collectives = run(with_pullback(op, compiled(op, implementation)), weights, xs)
    assert collectives.keys() == summing(op, layout)
    for each in primal, out:
        assert_close(each, want, terms=TERMS)
        assert_sharded(each, op.results, mesh, layout)
    assert_close(got, grads[: op.num_floating], terms=TERMS)
    assert_sharded(got, op.operands[: op.num_floating], mesh, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "layout"), WHOLE, ids=words)
def test_other_axes_are_gathered(rng: Rng, op: TestedOp, layout: Layout) -> None:
    mesh = cpu_mesh()
    xs = op.even_arguments(rng)
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    xs = place(mesh, xs, op.operands, layout)
    weights = place(mesh, weights, op.results, layout)
    out, collectives = run(compiled(op, None), *xs)
    assert collectives.keys() == {"all-gather"}
    assert_close(out, want, terms=TERMS)
    assert all(x.sharding.spec[0] == "y" for x in out)
    got, _ = run(pullback(op, compiled(op, None)), weights, xs)
    assert_close(got, grads[: op.num_floating], terms=TERMS)


def merged(op: TestedOp) -> list[Any]:
    """Kernels of shards are interpreted in the files of the ops, which takes long to compile."""
    (axis,) = op.merged
    cases: list[tuple[Layout, int, AxisType]] = [
        ({axis: "x"}, 3, AxisType.Explicit),
        ({op.split[0]: "y", axis: "x"}, 1, AxisType.Auto),
        ({axis: ("y", "x")}, 1, AxisType.Auto),
    ]
    return [
        pytest.param(op, *case, id=f"{words(op)}-{words(case[0])}-{case[2].name}") for case in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "layout", "n", "kind"),
    [case for op in OPS for case in merged(op)],
)
def test_parts_of_an_axis_are_merged_in_one_exchange(
    rng: Rng, op: TestedOp, layout: Layout, n: int, kind: AxisType
) -> None:
    """Of the results; with gradients, the sum of those of what all shards have."""
    mesh = cpu_mesh(kind)
    xs = op.arguments(rng, **(dict(b=8, n=n) | dict.fromkeys(op.merged, 32)))
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    with jax.set_mesh(mesh):
        xs = place(mesh, xs, op.operands, layout)
        weights = place(mesh, weights, op.results, layout)
        out, of_results = run(compiled(op, None), *xs)
        got, of_all = run(pullback(op, compiled(op, None)), weights, xs)
    assert sum(of_results.values()) == 1
    assert_close(out, want, terms=TERMS)
    assert_sharded(got, op.operands[: op.num_floating], mesh, layout)
    if summing(op, layout):
        of_all.pop("all-reduce", 0)
    assert sum(of_all.values()) <= op.exchanges
    assert_close(got, grads[: op.num_floating], terms=TERMS)


@pytest.mark.slow
def test_parts_of_a_cache_without_lengths(rng: Rng) -> None:
    """Where shards need some: several queries, a window; under vmap, and with all of the digits."""
    op, mesh = OPS[0], cpu_mesh()
    layout = {"m": "x"}
    for n, window in ((3, None), (1, 9)):
        fn = partial(pallas_ops.tpa_decode, implementation="interpret", window=window)
        xs = on_host(op.arguments(rng, jnp.bfloat16, n=n, m=32)[:6])
        placed = place(mesh, xs, op.operands[:6], layout)
        want = pallas_ops.tpa_decode(*xs, window=window)
        out, collectives = run(fn, *placed)
        assert collectives == {"all-gather": 1}
        assert_close(out, want, terms=TERMS)
        in_axes = (0, *(None,) * 5)
        out, collectives = run(jax.vmap(fn, in_axes), np.stack([xs[0], xs[0] + xs[0]]), *placed[1:])
        assert collectives == {"all-gather": 1}
        assert_close(out[0], want, terms=TERMS)


@pytest.mark.slow
def test_a_mesh_axis_that_a_reshape_cuts_in_two(rng: Rng) -> None:
    """Half of it splits one axis, half another; such halves have no name, so both are gathered."""
    mesh = Mesh(np.array(jax.devices()[:8]), "x")
    whole, split = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), (None, None, "x")))
    x, weights = random_array(rng, (2, 6, 8)), random_array(rng, (2, 6, 4, 2))

    def fn(x: jax.Array, implementation: Any) -> jax.Array:
        return pallas_ops.logcumsumexp(x.reshape(2, 6, 4, 2), axis=1, implementation=implementation)

    want = value_and_vjp(partial(fn, implementation="xla"), (x,), weights)
    for implementation in ("interpret", None):
        run = jax.jit(
            lambda x, w, i=implementation: value_and_vjp(partial(fn, implementation=i), (x,), w)
        )
        assert_close(run(jax.device_put(x, split), jax.device_put(weights, whole)), want)


@pytest.mark.parametrize("implementation", ["interpret", None])
def test_output_features_split_further_than_in_two(rng: Rng, implementation: Any) -> None:
    """cos and sin are two halves of lrpe_cosine's features, which 4 devices cut once more."""
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    split = NamedSharding(mesh, PartitionSpec(None, None, None, "x"))
    x, theta, weights = (random_array(rng, s) for s in ((2, 6, 2, 8), (2, 8), (2, 6, 2, 16)))
    fn = partial(pallas_ops.lrpe_cosine, theta=theta, implementation=implementation)
    want = value_and_vjp(partial(fn, implementation="xla"), (x,), weights)
    out = jax.jit(fn, out_shardings=split)(x)
    grads = jax.jit(lambda x, w: jax.vjp(fn, x)[1](w))(x, jax.device_put(weights, split))
    assert_close((out, grads), want)
    assert_sharded((out,), ("b n h e",), mesh, {"e": "x"})


@pytest.mark.parametrize(("names", "order"), [("xy", 1), ("yx", -1)])
def test_names_of_two_mesh_axes_on_one_array_axis(rng: Rng, names: str, order: int) -> None:
    """The major one first, over devices in any order; the result stays split so."""
    devices = np.array(jax.devices("cpu")[:8][::order]).reshape(2, 4)
    mesh, layout = Mesh(devices, ("x", "y")), {"b": tuple(names)}
    x = random_array(rng, (8, 5, 2))
    fn = partial(pallas_ops.logcumsumexp, axis=1, implementation="interpret")
    out, collectives = run(fn, *place(mesh, (x,), ("b n c",), layout))
    assert collectives == {}
    assert_close(out, fn(x))
    assert_sharded((out,), ("b n c",), mesh, layout)


def test_gspmd(rng: Rng) -> None:
    """Shardy's predecessor, which a flag of JAX still chooses."""
    mesh, layout = cpu_mesh(), {"b": "x", "c": "y"}
    x = random_array(rng, (4, 5, 4))
    fn = partial(pallas_ops.logcumsumexp, axis=1, implementation="interpret")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        out, collectives = run(fn, *place(mesh, (x,), ("b n c",), layout))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert collectives == {}
    assert_close(out, fn(x))
    assert_sharded((out,), ("b n c",), mesh, layout)


@every_op
def test_vmap(rng: Rng, op: TestedOp) -> None:
    mesh = cpu_mesh()
    pairs = zip(op.even_arguments(rng), op.even_arguments(rng), strict=True)
    xs = tuple(map(np.stack, pairs))
    want = jax.jit(jax.vmap(compiled(op, "xla")))(*xs)
    layout = dict(v="y") | {op.split[1]: "x"}
    operands, results = (tuple(f"v {a}" for a in axes) for axes in (op.operands, op.results))
    xs = place(mesh, xs, operands, layout)
    out, collectives = run(jax.vmap(compiled(op, None)), *xs)
    assert collectives == {}
    assert_close(out, want, terms=TERMS)
    assert_sharded(out, results, mesh, layout)


# Compiled for eight H200s

H200S = [(op, dict(zip(op.split[:2], "xy", strict=True))) for op in OPS]
H200S += [(op, {op.split[-1]: "x"}) for op in OPS if op.split[-1] not in op.split[:2]]


@pytest.mark.parametrize(("op", "layout"), H200S, ids=words)
def test_h200s_only_sum_gradients(op: TestedOp, layout: Layout) -> None:
    mesh = h200.h200_mesh(x=4, y=2)
    xs = op.structs(jnp.bfloat16, c=64)  # logcumsumexp of wide tiles takes twice as long
    ins, outs = specs(op.operands, layout), specs(op.results, layout)

    both, weights, count = with_pullback(op, op.fn), jax.eval_shape(op.fn, *xs), len(outs)
    program = h200.compile_for_h200(
        lambda *ys: both(ys[:count], ys[count:]), *weights, *xs, mesh=mesh, specs=outs + ins
    )
    assert program.collectives.keys() == summing(op, layout)
    assert any(f".entry pallas_ops_{op.name}(" in text for text in program.ptx)
