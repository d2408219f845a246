"""logcumsumexp with its axis sharded: one exchange of states a pass, exact as on one device."""

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
from tests import shards
from tests.logcumsumexp import arguments, assert_exact, loop
from tests.support import assert_close, case, on_host, random_array

Rng = np.random.Generator
SEQUENCE = P(None, "x")
NAMES = (SEQUENCE, P(), SEQUENCE, P())  # x, initial state and cotangents
RESULTS = ((SEQUENCE, P()), (SEQUENCE, P()))


def run(*xs: jax.Array, **kwargs: Any) -> Any:
    """Output, final state, and the gradients of x and of the initial state."""

    def fn(x: jax.Array, initial: jax.Array) -> Any:
        return pallas_ops.logcumsumexp_with_state(x, axis=1, initial_state=initial, **kwargs)

    return shards.with_pullback(fn, 2)(*xs)


def by_name(mesh: Mesh, *, check_vma: bool = True, **kwargs: Any) -> Callable[..., Any]:
    def fn(x: jax.Array, initial: jax.Array) -> Any:
        return pallas_ops.logcumsumexp_with_state(
            x, axis=1, initial_state=initial, axis_name=mesh.axis_names, **kwargs
        )

    names = P(None, mesh.axis_names)
    over = jax.shard_map(
        fn, mesh=mesh, in_specs=(names, P()), out_specs=(names, P()), check_vma=check_vma
    )
    return jax.jit(shards.with_pullback(over, 2))


def flat(results: Any) -> tuple[Any, ...]:
    (out, final), (dx, dinitial) = results
    return out, final, dx, dinitial


RANGES: dict[str, Callable[[Rng, int], Any]] = {
    "plain": lambda rng, n: rng.standard_normal((n, 3)),
    "wide": lambda rng, n: 1e4 * rng.standard_normal((n, 3)),
    "large": lambda rng, n: 1e4 + rng.standard_normal((n, 3)),
    "falling": lambda rng, n: -np.sort(1e3 * rng.standard_normal((n, 3)), axis=0),
    "empty": lambda rng, n: np.where(
        (np.arange(n) < n * 5 // 8)[:, None], -np.inf, rng.standard_normal((n, 3))
    ),
    "gap": lambda rng, n: np.where(
        (abs(np.arange(n) - n // 2) < n // 3)[:, None], -np.inf, rng.standard_normal((n, 3))
    ),
    "nothing": lambda rng, n: np.full((n, 3), -np.inf),
}


@pytest.mark.parametrize(
    "options",
    [
        case(count=1, length=5),
        case(count=2, length=7),
        case(count=3, length=5, reverse=True),
        case(count=8, length=3),
        case(count=8, length=1, reverse=True),
        case(count=3, length=600, reverse=True),  # by jit, shards' states are saved
        case(count=2, length=700),
        case(count=3, length=5, implementation="interpret", reverse=True),
        case(count=3, length=5, implementation="xla", reverse=True),
    ],
)
def test_exact_for_every_range(rng: Rng, options: dict[str, Any]) -> None:
    """By name and by jit, against float64."""
    kwargs = {k: options[k] for k in ("implementation", "reverse") if k in options}
    mesh, n = shards.line(options["count"]), options["count"] * options["length"]
    named, plain = by_name(mesh, **kwargs), jax.jit(lambda *xs: run(*xs, **kwargs))
    for name, make in RANGES.items():
        _, initial, do, dfinal = on_host(arguments(rng, (1, n, 3), 1))
        x = np.asarray(make(rng, n), np.float32)[None]
        state = np.full_like(initial, -np.inf) if name in ("empty", "nothing") else initial
        xs = x, state, do, dfinal
        want = loop(*xs, axis=1, reverse=options.get("reverse", False))
        assert_exact(flat(named(x, state, (do, dfinal))), want, do, 1)
        placed = shards.placed(mesh, xs, NAMES)
        assert_exact(flat(plain(*placed[:2], placed[2:])), want, do, 1)


@pytest.mark.parametrize(("value", "reverse"), [(np.nan, True), (np.inf, False)])
def test_nan_and_inf_act_from_their_position_on(rng: Rng, value: float, reverse: bool) -> None:
    """In results as in gradients, those of one device."""
    mesh = shards.line(8)
    x, initial, do, dfinal = arguments(rng, (2, 24, 3), 1)
    one, named = jax.jit(lambda *xs: run(*xs, reverse=reverse)), by_name(mesh, reverse=reverse)
    for at in (0, 13, 23):
        y = x.at[0, at, 1].set(value)
        want, got = (fn(y, initial, (do, dfinal)) for fn in (one, named))
        assert_close(got, want, terms=24)
        before = got[0][0][0, at + 1 :] if reverse else got[0][0][0, :at]
        assert np.isfinite(before).all()


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_several_mesh_axes_and_clip(rng: Rng, names: tuple[str, ...]) -> None:
    """The first is the major one; clipped numbers have no gradient; any axis, bfloat16."""
    mesh = Mesh(np.reshape(jax.devices("cpu"), (4, 2)), ("x", "y"))
    spec = P(None, None, names)

    def fn(x: jax.Array, initial: jax.Array, axis_name: Any = None) -> Any:
        return pallas_ops.logcumsumexp_with_state(
            x, initial_state=initial, clip=1.0, axis_name=axis_name
        )

    over = jax.shard_map(
        partial(fn, axis_name=names),
        mesh=mesh,
        in_specs=(spec, P()),
        out_specs=(spec, P()),
    )
    xs = on_host(arguments(rng, (2, 3, 32), 2, jnp.bfloat16))
    want, got = (jax.jit(shards.with_pullback(f, 2))(*xs[:2], xs[2:]) for f in (fn, over))
    assert_close(got, want, terms=32)


def test_without_the_replication_check_gradients_are_the_same(rng: Rng) -> None:
    xs = arguments(rng, (2, 24, 3), 1)
    want, got = (
        fn(*xs[:2], xs[2:]) for fn in (jax.jit(run), by_name(shards.line(8), check_vma=False))
    )
    assert_close(got, want, terms=24)


def test_gradients_inside_shard_map(rng: Rng) -> None:
    """The initial state's is that of the whole sequence, and the same on all shards."""
    mesh, xs = shards.line(8), arguments(rng, (2, 24, 3), 1)
    want = jax.jit(run)(*xs[:2], xs[2:])
    inside = shards.mapped(partial(run, axis_name="x"), mesh, (*NAMES[:2], NAMES[2:]), RESULTS)
    assert_close(inside(*xs[:2], xs[2:]), want, terms=24)


def test_a_state_a_shard_enters_the_first(rng: Rng) -> None:
    mesh, (x, initial, *_) = shards.line(8), arguments(rng, (2, 24, 3), 1)
    fn = lambda x, s: pallas_ops.logcumsumexp(  # noqa: E731
        x, axis=1, initial_state=s, axis_name="x"
    )
    others = random_array(rng, (2, 7, 3))
    states = jnp.concatenate([initial, others], axis=1)
    got = shards.mapped(fn, mesh, (P(None, "x"), P(None, "x")), P(None, "x"))
    want = pallas_ops.logcumsumexp(x, axis=1, initial_state=initial)
    assert_close(got(x, states), want, terms=24)
    grad = jax.jit(jax.grad(lambda s: got(x, s).sum()))(states)
    assert not grad[:, 1:].any()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", None])
def test_second_derivatives_and_vmap(rng: Rng, implementation: Any) -> None:
    mesh, x = shards.line(4), random_array(rng, (2, 12, 3))
    weights = random_array(rng, (2, 12, 3))

    def fn(x: jax.Array, axis_name: Any = None) -> jax.Array:
        run: Any = lambda x: pallas_ops.logcumsumexp(  # noqa: E731
            x, axis=0, axis_name=axis_name, implementation=implementation
        )
        out: jax.Array = jax.vmap(run)(x)
        return out

    def second(fn: Any) -> Any:
        loss: Any = lambda x: (weights * jnp.sin(fn(x))).sum()  # noqa: E731
        return jax.jit(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))

    over = jax.shard_map(
        lambda x: fn(x, "x"), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")
    )
    assert_close(jax.jit(over)(x), jax.jit(fn)(x), terms=12)
    want = second(fn)(x)
    assert_close(second(over)(x), want, terms=64)
    (placed,) = shards.placed(mesh, (x,), (P(None, "x"),))
    assert_close(second(fn)(placed), want, terms=64)


@pytest.mark.parametrize("reverse", [False, True])
def test_second_derivatives_of_kernels(rng: Rng, reverse: bool) -> None:
    """The gradients of an output add up to 1, whatever x is. Kernels choose pivots of their own."""
    fn = partial(
        pallas_ops.logcumsumexp, axis_name="x", reverse=reverse, implementation="interpret"
    )
    over = shards.mapped(fn, shards.line(4), P("x"), P("x"))
    first = jax.grad(lambda x: over(x).sum())
    second = jax.jit(jax.grad(lambda x: first(x).sum()))(random_array(rng, (64,)))
    assert jnp.abs(second).max() < 1e-5


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_second_derivatives_where_shards_save_states(rng: Rng, implementation: Any) -> None:
    """Under jit: there are more tiles than shards, so the states of all shards are saved."""
    mesh, shape = shards.line(2), (1, 1024, 16)
    xs = tuple(random_array(rng, shape) for _ in range(3))

    def second(implementation: Any, x: jax.Array, do: jax.Array, dx: jax.Array) -> Any:
        fn = partial(pallas_ops.logcumsumexp, axis=1, implementation=implementation)
        pull = jax.vjp(fn, x)[1]
        of_do = jax.vjp(pull, do)[1]((dx,))
        out, pull = jax.vjp(lambda x, do: jax.vjp(fn, x)[1](do)[0], x, do)
        return of_do, out, pull(dx)

    placed = shards.placed(mesh, xs, (P(None, "x"),) * 3)
    got, want = (
        jax.jit(partial(second, i))(*y) for i, y in ((implementation, placed), ("xla", xs))
    )
    assert_close(got, want, terms=64)


def test_explicit_types(rng: Rng) -> None:
    """Results and gradients are split as x is."""
    mesh, xs = shards.line(8, AxisType.Explicit), arguments(rng, (2, 24, 3), 1)
    want = jax.jit(run)(*xs[:2], xs[2:])
    with jax.set_mesh(mesh):
        placed = shards.placed(mesh, xs, NAMES)
        got = jax.jit(run)(*placed[:2], placed[2:])
    assert got[0][0].sharding.spec[1] == got[1][0].sharding.spec[1] == "x"
    assert_close(got, want, terms=24)


@pytest.mark.slow
def test_no_exchange_is_larger_than_the_states(rng: Rng) -> None:
    """On eight CPUs; on H200s, in `test_logcumsumexp_shard_kernels`."""
    b, n, c = 2, 1024, 3
    xs = arguments(rng, (b, n, c), 1)
    largest, args = 8 * 3 * b * c, (*xs[:2], xs[2:])
    named = by_name(shards.line(8))
    of_named = shards.exchanges(shards.compiled(named, *args)[1])
    assert of_named.keys() == {"all-gather"}
    assert len(of_named["all-gather"]) == 2
    placed = shards.placed(shards.line(8), xs, NAMES)
    of_plain = shards.exchanges(shards.compiled(run, *placed[:2], placed[2:])[1])
    assert of_plain.keys() == {"all-gather"}
    assert max(of_named["all-gather"] + of_plain["all-gather"]) <= largest
