"""chunk_cumsum_decay with its axis sharded: what chunks that span shards pass on, and no more."""

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
from pallas_ops import ChunkCumsumDecayConfig
from pallas_ops.core.partition import call
from pallas_ops.ops.chunk_cumsum_decay import vjp
from pallas_ops.ops.chunk_cumsum_decay.config import Params
from tests import h200, shards
from tests.chunk_cumsum_decay import truth
from tests.support import assert_close, kernel_implementation, on_host, random_array

KERNEL = kernel_implementation()
Rng = np.random.Generator
SPEC = P(None, "x")


def pulled(names: Any = None, mesh: Mesh | None = None, **kwargs: Any) -> Callable[..., Any]:
    """Of x, bounds and a cotangent: the sums, and the gradient of x."""

    def run(x: jax.Array, bounds: jax.Array | None, do: jax.Array) -> Any:
        def fn(x: jax.Array, *bounds: jax.Array) -> jax.Array:
            of = bounds[0] if bounds else None
            return pallas_ops.chunk_cumsum_decay(x, cu_seqlens=of, axis_name=names, **kwargs)

        others = () if bounds is None else (bounds,)
        over: Any = fn
        if mesh is not None:
            ins = (P(None, names), *(P() for _ in others))
            over = jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=P(None, names))
        out, pull = jax.vjp(lambda x: over(x, *others), x)
        return out, *pull(do)

    return jax.jit(run)


def one_device(
    x: Any, bounds: Any, do: Any, *, scale: Any = None, dtype: Any = None, **options: Any
) -> Any:
    """The sums and the gradient of x, in float64."""
    del dtype
    given = None if bounds is None else [*map(int, bounds)]
    size = 1.0 if scale is None else scale
    return tuple(size * y for y in truth(x, do, bounds=given, **options))


def a_call(rng: Rng, *, sizes: tuple[int, ...] = (1, 2, 3, 8)) -> tuple[int, int, dict[str, Any]]:
    """Shards, their length and options; chunks are aligned, or span shards, or end within them."""
    count, n = int(rng.choice(sizes)), int(rng.integers(1, 8))
    whole = count * n
    chunk_sizes = [1, 2, 3, n, 2 * n, n + 1, whole, int(rng.integers(1, whole + 3))]
    options = dict(
        chunk_size=int(rng.choice(chunk_sizes)),
        reverse=bool(rng.integers(2)),
        shift=(None, "chunk", "sequence")[rng.integers(3)],
        scale=(None, -0.5)[rng.integers(2)],
    )
    return count, n, options


def some_bounds(rng: Rng, whole: int) -> jax.Array | None:
    if rng.integers(2):
        return None
    return jnp.asarray(np.sort(rng.integers(0, whole + 1, rng.integers(1, 5))), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_as_on_one_device(rng: Rng, seed: int, implementation: Any) -> None:
    """Random calls, by name and by jit."""
    del seed  # it is part of what `rng` comes from
    for _ in range(2 if implementation is None else 1):
        count, n, options = a_call(rng)
        bounds, mesh = some_bounds(rng, count * n), shards.line(count)
        x, do = (on_host(random_array(rng, (2, count * n, 3))) for _ in range(2))
        want = one_device(x, bounds, do, **options)
        options["implementation"] = implementation
        assert_close(pulled("x", mesh, **options)(x, bounds, do), want, terms=64)
        placed, ct = shards.placed(mesh, (x, do), (SPEC, SPEC))
        assert_close(pulled(**options)(placed, bounds, ct), want, terms=64)


@pytest.mark.parametrize(("value", "reverse"), [(np.nan, True), (np.inf, False)])
def test_nan_and_inf_stay_in_their_chunk(rng: Rng, value: float, reverse: bool) -> None:
    mesh, x = shards.line(8), random_array(rng, (2, 40, 3))
    for at, chunk_size, shift in ((0, 7, None), (13, 20, "chunk"), (39, 40, "sequence")):
        y = x.at[0, at, 1].set(value)
        options: Any = dict(chunk_size=chunk_size, reverse=reverse, shift=shift)
        with np.errstate(invalid="ignore"):
            want = one_device(y, None, x, **options)
        assert_close(pulled("x", mesh, **options)(y, None, x), want, terms=64)


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_several_mesh_axes_and_dtypes(rng: Rng, names: tuple[str, ...]) -> None:
    """Sums over many shards lose nothing to 16 bits on their way; the last axis."""
    mesh = Mesh(np.reshape(jax.devices("cpu"), (4, 2)), ("x", "y"))
    x, do = on_host((random_array(rng, (2, 48), jnp.bfloat16), random_array(rng, (2, 48))))
    for options in (dict(chunk_size=48), dict(chunk_size=5, shift="sequence")):
        options |= dict(axis=-1, dtype=jnp.float32)
        want = one_device(x, None, do, **options)
        assert_close(pulled(names, mesh, **options)(x, None, do), want, terms=48)


def test_a_scale_that_is_an_array(rng: Rng) -> None:
    mesh, x, scale = shards.line(8), random_array(rng, (2, 40, 3)), jnp.float32(0.3)

    def loss(scale: jax.Array, x: jax.Array, names: Any = None) -> jax.Array:
        fn: Any = partial(pallas_ops.chunk_cumsum_decay, chunk_size=9, axis_name=names)
        if names is None:
            return jnp.sin(fn(x, scale=scale)).sum()
        over: Any = jax.shard_map(
            lambda x, s: fn(x, scale=s), mesh=mesh, in_specs=(SPEC, P()), out_specs=SPEC
        )
        out: jax.Array = over(x, scale)
        return jnp.sin(out).sum()

    got, want = (jax.jit(jax.grad(partial(loss, names=names), (0, 1))) for names in ("x", None))
    assert_close(got(scale, x), want(scale, x), terms=64)


@pytest.mark.slow
def test_second_derivatives_and_vmap(rng: Rng) -> None:
    mesh, x = shards.line(4), random_array(rng, (2, 12, 3))
    fn = partial(pallas_ops.chunk_cumsum_decay, axis=0, chunk_size=5, shift="sequence")
    over = jax.shard_map(
        jax.vmap(partial(fn, axis_name="x")), mesh=mesh, in_specs=SPEC, out_specs=SPEC
    )

    def second(fn: Any) -> Any:
        loss: Any = lambda x: jnp.sin(fn(x)).sum()  # noqa: E731
        return jax.jit(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))

    (placed,) = shards.placed(mesh, (x,), (SPEC,))
    want = second(jax.vmap(fn))(x)
    assert_close(second(over)(x), want, terms=64)
    assert_close(second(jax.vmap(fn))(placed), want, terms=64)


def test_explicit_types(rng: Rng) -> None:
    mesh = shards.line(8, AxisType.Explicit)
    x, do = (random_array(rng, (2, 40, 3)) for _ in range(2))
    for bounds in (None, jnp.array([3, 17, 39])):
        options: Any = dict(chunk_size=12, shift="sequence", reverse=True)
        want = one_device(x, bounds, do, **options)
        with jax.set_mesh(mesh):
            placed, ct = shards.placed(mesh, (x, do), (SPEC, SPEC))
            got = pulled(**options)(placed, bounds, ct)
        assert got[0].sharding.spec[1] == got[1].sharding.spec[1] == "x"
        assert_close(got, want, terms=64)


EXCHANGES = [
    (dict(chunk_size=64), {}),
    (dict(chunk_size=128, shift="chunk"), {}),
    (dict(chunk_size=64, shift="sequence"), {"collective-permute": 2}),
    (dict(chunk_size=48), {"collective-permute": 2}),
    (dict(chunk_size=256), {"all-gather": 2}),
    (dict(chunk_size=1024, shift="sequence"), {"all-gather": 2}),
]


@pytest.mark.parametrize(("options", "want"), EXCHANGES, ids=str)
def test_no_exchange_is_larger_than_the_totals(
    rng: Rng, options: dict[str, Any], want: dict[str, int]
) -> None:
    """Forward and backward, on eight CPUs."""
    b, n, c = 2, 1024, 3
    x, mesh = random_array(rng, (b, n, c)), shards.line(8)
    placed = shards.placed(mesh, (x, x), (SPEC, SPEC))
    for fn, xs in ((pulled("x", mesh, **options), (x, x)), (pulled(**options), placed)):
        found = shards.exchanges(shards.compiled(fn, xs[0], None, xs[1])[1])
        assert {kind: len(sizes) for kind, sizes in found.items()} == want
        assert max(map(max, found.values()), default=0) <= 8 * b * c


@pytest.mark.slow
@pytest.mark.parametrize(("options", "want"), EXCHANGES[3:5], ids=str)
def test_nor_on_h200s(options: dict[str, Any], want: dict[str, int]) -> None:
    b, n, c = 2, 1024, 3
    x, mesh = jax.ShapeDtypeStruct((b, n, c), jnp.float32), h200.h200_mesh(x=8)
    for fn in (pulled("x", mesh, **options), pulled(**options)):
        run = lambda x, do, fn=fn: fn(x, None, do)  # noqa: E731
        program = h200.compile_for_h200(run, x, x, mesh=mesh, specs=(SPEC, SPEC))
        found = shards.exchanges(program.hlo)
        assert found.keys() == want.keys()
        assert max(map(max, found.values()), default=0) <= 8 * b * c


@pytest.mark.slow
def test_packed_sequences_exchange_totals_alone(rng: Rng) -> None:
    x, mesh, bounds = random_array(rng, (2, 1024, 3)), shards.line(8), jnp.array([5, 300, 1000])
    for chunk_size, kind in ((64, "collective-permute"), (200, "all-gather")):
        fn = pulled("x", mesh, chunk_size=chunk_size)
        found = shards.exchanges(shards.compiled(fn, x, bounds, x)[1])
        assert found.keys() == {kind}
        assert max(found[kind]) <= 8 * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "reverse"), [(1, False), (1, True), (2, True)])
def test_kernels_start_from_a_carry(rng: Rng, axis: int, reverse: bool) -> None:
    """Emulated or on a GPU: a part of an axis whose sequences begin before it and end after it."""
    x, carry = random_array(rng, (2, 40, 40)), random_array(rng, (2, 40))
    sums = vjp.op("chunk_cumsum_decay", axis, 2 - axis)
    same: Any = dict(axis=axis, reverse=reverse, scale=0.5, dtypes=("float32", "float32"))
    for edges, chunk_size, shift, config in (
        (None, 16, "chunk", None),
        (None, 40, "sequence", ChunkCumsumDecayConfig(block_n=4, num_segments=3)),
        ([-9, -7, 12, 12, 47, 60], 7, "sequence", None),
        ([-9, 5, 9, 40, 40], 100, None, None),
    ):
        operands = x, None if edges is None else jnp.array(edges), carry
        options = same | dict(chunk_size=chunk_size, shift=shift, config=config)
        for shift_result in (False, True) if shift == "sequence" else (False,):
            params = Params(shift_result=shift_result, **options)
            (want,) = jax.jit(partial(sums.reference, params=params))(*operands)
            (got,) = call(sums, *operands, implementation=KERNEL, params=params)
            assert_close(got, want, terms=64)


def test_shards_of_nothing() -> None:
    fn = partial(pallas_ops.chunk_cumsum_decay, chunk_size=5, shift="sequence", axis_name="x")
    over = shards.mapped(fn, shards.line(8), SPEC, SPEC)
    assert jax.jit(jax.grad(lambda x: over(x).sum()))(jnp.ones((2, 0, 3))).shape == (2, 0, 3)


def test_names_that_are_refused() -> None:
    with pytest.raises(ValueError, match="axis_name is 'z'; accepted: None, or a mesh axis of the"):
        pallas_ops.chunk_cumsum_decay(jnp.ones((2, 8)), axis_name="z")


def test_the_axis_of_a_vmap_has_no_gradient_outside_of_it() -> None:
    """With chunks that span its shards."""
    sums: Any = partial(pallas_ops.chunk_cumsum_decay, axis=0, chunk_size=2)
    over = jax.vmap(partial(sums, axis_name="i"), axis_name="i")
    assert over(jnp.ones((2, 3))).ravel().tolist() == sums(jnp.ones(6)).tolist()
    with pytest.raises(ValueError, match=r"axis_name is \('i',\); accepted: None, or a mesh axis"):
        jax.grad(lambda x: over(x).sum())(jnp.ones((2, 3)))
