"""lrpe_cosine and md_lrpe_cosine with the sequence sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops import LrpeCosineConfig
from tests import h200, shards
from tests.support import assert_close, case, in_turn, on_host, random_array

Rng = np.random.Generator
Fn = Callable[..., jax.Array]


def spec(layout: str = "BNHD", names: Any = "x") -> P:
    return P(None, names) if layout == "BNHD" else P(None, None, names)


def by_name(fn: Fn, mesh: Mesh, names: Any = "x", layout: str = "BNHD", **kwargs: Any) -> Fn:
    of = spec(layout, names)
    run: Fn = jax.shard_map(
        partial(fn, axis_name=names), mesh=mesh, in_specs=(of, P()), out_specs=of, **kwargs
    )
    return run


def pulled(fn: Fn) -> Callable[..., Any]:
    return jax.jit(shards.with_pullback(fn, 2))


def arrays(rng: Rng, n: int, layout: str = "BNHD", width: tuple[int, int] = (3, 4)) -> Any:
    """x, theta and a cotangent."""
    x, do = random_array(rng, (2, n, 3, 4)), random_array(rng, (2, n, 3, 8))
    if layout == "BHND":
        x, do = x.swapaxes(1, 2), do.swapaxes(1, 2)
    return x, random_array(rng, width), do


CASES = [
    case(count=1, length=5, act="softmax", axis=1),
    case(count=2, length=7),
    case(count=3, length=5, act="softmax", axis=1, layout="BNHD", offset=5),
    case(count=3, length=5, act="softmax", axis=2, layout="BHND", width=(1, 4)),
    case(count=8, length=3, act="silu", width=(1, 1), offset=np.array([3, 8])),
    case(count=8, length=1, act="softmax", axis=1, width=(3, 2)),
    case(count=3, length=4, act="softmax", axis=-1, layout="BHND", offset=np.array([0, 2])),
]


@pytest.mark.parametrize(("options", "implementation"), in_turn(CASES, [None, "interpret", "xla"]))
def test_as_on_one_device(rng: Rng, options: dict[str, Any], implementation: Any) -> None:
    """By name, with and without the replication check, and by jit; theta's gradient is summed."""
    options = dict(options)
    mesh, n = shards.line(options["count"]), options.pop("count") * options.pop("length")
    layout, width = options.setdefault("layout", "BNHD"), options.pop("width", (3, 4))
    xs = on_host(arrays(rng, n, layout, width))
    fn = partial(pallas_ops.lrpe_cosine, **options, implementation=implementation)
    want = pulled(partial(fn, implementation="xla"))(*xs)
    assert_close(pulled(by_name(fn, mesh, layout=layout))(*xs), want, terms=64)
    if implementation is None:
        unchecked = by_name(fn, mesh, layout=layout, check_vma=False)
        assert_close(pulled(unchecked)(*xs), want, terms=64)
    specs = spec(layout), P(), spec(layout)
    assert_close(pulled(fn)(*shards.placed(mesh, xs, specs)), want, terms=64)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_softmax_of_large_and_missing_numbers(rng: Rng, implementation: Any) -> None:
    """A shard of -inf has no part in the sum; one that is alone in its range has all of it."""
    mesh, (x, theta, do) = shards.line(4), arrays(rng, 12)
    fn = partial(pallas_ops.lrpe_cosine, act="softmax", axis=1, implementation=implementation)
    of_shards, whole = pulled(by_name(fn, mesh)), pulled(partial(fn, implementation="xla"))
    for y in (x.at[:, 3:6].set(-jnp.inf), x.at[:, 6:9].add(1e4), x.at[0, 4, 1].set(jnp.nan)):
        assert_close(of_shards(y, theta, do), whole(y, theta, do), terms=64)


@pytest.mark.slow
def test_several_mesh_axes_and_a_cache_of_angles(rng: Rng) -> None:
    mesh = Mesh(np.reshape(jax.devices("cpu"), (4, 2)), ("x", "y"))
    x, theta, do = on_host(arrays(rng, 16))
    config = LrpeCosineConfig(variant="block", block_n=4, block_d=4, cache_angles=True)
    fn = partial(
        pallas_ops.lrpe_cosine, act="softmax", axis=1, config=config, implementation="interpret"
    )
    want = pulled(partial(pallas_ops.lrpe_cosine, act="softmax", axis=1))(x, theta, do)
    assert_close(pulled(by_name(fn, mesh, ("y", "x")))(x, theta, do), want, terms=64)


def test_given_positions_are_the_shards_own(rng: Rng) -> None:
    mesh, (x, theta, do) = shards.line(4), arrays(rng, 12)
    places = 100 * random_array(rng, (12,))

    def fn(x: jax.Array, theta: jax.Array, places: jax.Array, **kwargs: Any) -> jax.Array:
        options: Any = dict(positions=places, act="softmax", axis=1)
        return pallas_ops.lrpe_cosine(x, theta, **options, **kwargs)

    over = jax.shard_map(
        partial(fn, axis_name="x"),
        mesh=mesh,
        in_specs=(spec(), P(), P("x")),
        out_specs=spec(),
    )
    got, want = (jax.jit(shards.with_pullback(f, 3))(x, theta, places, do) for f in (over, fn))
    assert_close(got, want, terms=64)


@pytest.mark.parametrize("implementation", ["xla", "interpret", None])
@pytest.mark.parametrize("given", [False, True])
def test_grids_by_name(rng: Rng, given: bool, implementation: Any) -> None:
    """Rows of the grid, and the prefix tokens, end within shards; positions are the shard's own."""
    mesh, (x, theta, do) = shards.line(8), arrays(rng, 16)
    grid = jnp.indices((2, 5)).reshape(2, -1).T
    places = jnp.concatenate([jnp.full((6, 2), 7), grid]) / 2  # those of the prefix count as 0

    def fn(x: jax.Array, theta: jax.Array, places: jax.Array, **kwargs: Any) -> jax.Array:
        where: Any = dict(shape=None, positions=places) if given else dict(shape=(2, 5))
        options: Any = dict(num_prefix_tokens=6, act="softmax", axis=1, **where, **kwargs)
        return pallas_ops.md_lrpe_cosine(x, theta, **options)

    run = partial(fn, axis_name="x", implementation=implementation)
    over = jax.shard_map(run, mesh=mesh, in_specs=(spec(), P(), P("x")), out_specs=spec())
    got, want = (jax.jit(shards.with_pullback(f, 3))(x, theta, places, do) for f in (over, fn))
    assert_close(got, want, terms=64)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", None])
def test_second_derivatives_and_vmap(rng: Rng, implementation: Any) -> None:
    mesh, (x, theta, do) = shards.line(4), arrays(rng, 8)
    fn = partial(pallas_ops.lrpe_cosine, act="softmax", axis=-3, implementation=implementation)

    def mapped(x: jax.Array, theta: jax.Array, **kwargs: Any) -> jax.Array:
        return jax.vmap(partial(fn, **kwargs), (0, None))(x[:, None], theta)[:, 0]

    def second(fn: Any) -> Any:
        loss: Any = lambda *xs: (do * jnp.sin(fn(*xs))).sum()  # noqa: E731
        grads = jax.grad(loss, (0, 1))
        return jax.jit(jax.grad(lambda *xs: sum((g**2).sum() for g in grads(*xs)), (0, 1)))(
            x, theta
        )

    assert_close(second(by_name(mapped, mesh)), second(mapped), terms=256)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_grids_and_types(rng: Rng, kind: AxisType) -> None:
    """By jit, on a grid with prefix tokens, rows of which end within shards."""
    mesh, (x, theta, do) = shards.line(8, kind), arrays(rng, 32)
    grid = partial(pallas_ops.md_lrpe_cosine, shape=(5, 6), num_prefix_tokens=2, act="silu")
    flat = partial(pallas_ops.lrpe_cosine, act="softmax", axis=1)
    for fn, of_kernel in ((grid, True), (flat, kind == AxisType.Explicit)):
        want = pulled(fn)(x, theta, do)
        for implementation in (None, "interpret")[: 1 + of_kernel]:
            run = pulled(partial(fn, implementation=implementation))
            with jax.set_mesh(mesh):
                placed = shards.placed(mesh, (x, theta, do), (spec(), P(), spec()))
                program, text = shards.compiled(run, *placed)
                got = program(*placed)
            assert_close(got, want, terms=64)
            assert got[0].sharding.spec[1] == got[1][0].sharding.spec[1] == "x"
            found = shards.exchanges(text)
            assert max(map(max, found.values())) <= 8 * 2 * x[:, 0].size


EXCHANGES = [
    (dict(), {}, {"all-reduce"}),
    (dict(act="softmax", axis=1), {"all-gather"}, {"all-gather", "all-reduce"}),
]


@pytest.mark.parametrize(("options", "forward", "both"), EXCHANGES, ids=["none", "softmax"])
def test_no_exchange_is_larger_than_the_sums(
    rng: Rng, options: dict[str, Any], forward: set[str], both: set[str]
) -> None:
    """A pivot and a total per feature; backward a sum per feature, and theta's gradient."""
    x, theta, do = arrays(rng, 64)
    fn, largest = partial(pallas_ops.lrpe_cosine, **options), 8 * 2 * x[:, 0].size
    mesh = h200.h200_mesh(x=8)
    for run in (fn, by_name(fn, mesh)):
        specs = spec(), P(), spec()
        program = h200.compile_for_h200(run, x, theta, mesh=mesh, specs=specs[:2])
        assert program.collectives.keys() == set(forward)
        program = h200.compile_for_h200(pulled(run), x, theta, do, mesh=mesh, specs=specs)
        found = shards.exchanges(program.hlo)
        assert found.keys() == both
        assert max(map(max, found.values())) <= largest
        assert any(".entry pallas_ops_lrpe_cosine" in text for text in program.ptx)


def test_shards_of_nothing() -> None:
    fn: Any = partial(pallas_ops.lrpe_cosine, act="softmax", axis=1, axis_name="x")
    over = shards.mapped(fn, shards.line(4), (spec(), P()), spec())
    assert over(jnp.ones((2, 0, 3, 4)), jnp.ones((1, 4))).shape == (2, 0, 3, 8)


def test_names_that_are_refused() -> None:
    with pytest.raises(ValueError, match="axis_name is 'z'; accepted: None, or a mesh axis of the"):
        pallas_ops.lrpe_cosine(jnp.ones((2, 8, 1, 4)), jnp.ones((1, 4)), axis_name="z")


@pytest.mark.parametrize(
    ("shape", "prefix", "accepted"),
    [((8,), 0, r"sizes with num_prefix_tokens \+ prod\(shape\) = N of 4 shards = 32"),
     (None, 33, "at most N of 4 shards = 32")],
)  # fmt: skip
def test_sizes_of_the_whole_sequence(shape: Any, prefix: int, accepted: str) -> None:
    options: Any = dict(shape=shape, num_prefix_tokens=prefix, axis_name="x")
    if shape is None:
        options["positions"] = jnp.ones((8, 1))
    fn = partial(pallas_ops.md_lrpe_cosine, **options)
    with pytest.raises(ValueError, match=f"num_prefix_tokens .*{prefix}; accepted: {accepted}"):
        shards.mapped(fn, shards.line(4), (spec(), P()), spec())(
            jnp.ones((2, 32, 1, 4)), jnp.ones((1, 4))
        )


def test_the_axis_of_a_vmap_has_no_gradient_outside_of_it() -> None:
    fn: Any = lambda x: pallas_ops.lrpe_cosine(x, jnp.ones((1, 2)), axis_name="i")  # noqa: E731
    over = jax.vmap(fn, axis_name="i")
    assert over(jnp.ones((2, 1, 3, 1, 2))).shape == (2, 1, 3, 1, 4)
    with pytest.raises(ValueError, match=r"axis_name is \('i',\); accepted: None, or a mesh axis"):
        jax.grad(lambda x: over(x).sum())(jnp.ones((2, 1, 3, 1, 2)))
