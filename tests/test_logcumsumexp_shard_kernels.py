"""logcumsumexp's kernels for shards, alone and as H200s launch them; names that are refused."""

import collections
import dataclasses
import functools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops import LogcumsumexpConfig, Residuals
from pallas_ops.core.partition import call
from pallas_ops.ops.logcumsumexp.config import Params
from pallas_ops.ops.logcumsumexp.vjp import op
from tests import h200, shards
from tests.support import assert_close, kernel_implementation, on_host, random_array

KERNEL = kernel_implementation()
Rng = np.random.Generator
SEQUENCE = P(None, "x")


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "reverse"), [(1, False), (1, True), (2, True)])
def test_kernels_of_a_shard(rng: Rng, axis: int, reverse: bool) -> None:
    """Emulated or on a GPU: the totals of both passes, and a scan that starts from a pair."""
    pair = 1e4 + random_array(rng, (2, 40)), 1 + random_array(rng, (2, 40)) ** 2
    params = Params(axis=axis, reverse=reverse, block_n=16)

    @functools.cache
    def reference(name: str) -> Any:
        return jax.jit(partial(op(name, axis, 2 - axis, 16).reference, params=params))

    for config in (
        None,
        LogcumsumexpConfig(block_n=16, block_c=2, block_exact=8, num_segments=2),
    ):
        for x in (random_array(rng, (2, 40, 40)), 1e4 * random_array(rng, (2, 40, 40))):
            do, saved = random_array(rng, x.shape), reference("saving")(x, *pair)[2:]
            for name, operands in (
                ("totals", (x,)),
                ("forward", (x, *pair)),
                ("backward_totals", (x, do, *saved)),
            ):
                chosen = dataclasses.replace(params, config=config)
                one = op(name, axis, 2 - axis, 16)
                got: Any = call(one, *operands, implementation=KERNEL, params=chosen)
                want = reference(name)(*operands)
                if name == "totals":  # pairs of other pivots
                    got, want = (p + jnp.log(t) for p, t in (got, want))
                assert_close(got, want, terms=64)


@pytest.mark.slow
@pytest.mark.parametrize("has_state", [False, True])
def test_h200s_launch_no_kernel_twice(has_state: bool) -> None:
    """They exchange states of shards alone: one pair backward, and one more by jit."""
    count, b = (8, 2) if has_state else (2, 1)  # axes of size 1 are written in other ways
    x = jax.ShapeDtypeStruct((b, 65536, 64), jnp.bfloat16)
    mesh = h200.h200_mesh(x=count)
    # Compiles in a third of the time.
    config = LogcumsumexpConfig(block_n=4, block_c=8, num_segments=64, num_warps=1)
    for axis_name in (None, "x"):
        fn: Any = partial(pallas_ops.logcumsumexp, axis=1, axis_name=axis_name, config=config)
        given: tuple[Any, ...] = (x,)
        specs: tuple[P, ...] = (SEQUENCE,)
        if has_state:
            fn = lambda x, s, fn=fn: fn(x, initial_state=s)  # noqa: E731
            given, specs = (x, jax.ShapeDtypeStruct((b, 1, 64), jnp.float32)), (SEQUENCE, P())
        if axis_name is not None:
            fn = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=SEQUENCE)
        program = h200.compile_for_h200(
            shards.with_pullback(fn, len(given)), *given, x, mesh=mesh, specs=(*specs, SEQUENCE)
        )
        launches = collections.Counter(re.findall(r'name = "(pallas_ops_\w+)"', program.hlo))
        assert launches.pop("pallas_ops_segments") == 2
        names = ("logcumsumexp", "logcumsumexp_backward")
        expected = {f"pallas_ops_{n}{k}": 1 for n in names for k in ("", "_totals")}
        assert launches == expected
        exchanges = shards.exchanges(program.hlo)
        assert exchanges.keys() == {"all-gather"}
        assert len(exchanges["all-gather"]) == 2 if axis_name else 3
        assert max(exchanges["all-gather"]) <= 8 * 3 * 2 * 64


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("z", ValueError, "axis_name is 'z'; accepted: None, or a mesh axis of the"),
        (("x", "z"), ValueError, r"axis_name is \('x', 'z'\); accepted: None, or a mesh axis of"),
        ((), TypeError, r"axis_name is \(\); accepted: None, a str or a tuple of them"),
        (0, TypeError, "axis_name is 0; accepted: None, a str or a tuple of them"),
    ],
)
def test_names_that_are_refused(name: Any, error: Any, message: str) -> None:
    fn: Any = lambda x: pallas_ops.logcumsumexp(x, axis_name=name)  # noqa: E731
    with pytest.raises(error, match=message):
        fn(jnp.ones(8))
    with pytest.raises(error, match=message):
        shards.mapped(fn, shards.line(8), P("x"), P("x"))(jnp.ones(8))


def test_the_axis_of_a_vmap_has_no_gradient_outside_of_it() -> None:
    fn: Any = lambda x: pallas_ops.logcumsumexp(x, axis=0, axis_name="i")  # noqa: E731
    over = jax.vmap(fn, axis_name="i")
    assert over(jnp.ones((2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match=r"axis_name is \('i',\); accepted: None, or a mesh axis"):
        jax.grad(lambda x: over(x).sum())(jnp.ones((2, 3)))


def test_passes_may_be_sharded_in_different_ways(rng: Rng) -> None:
    """Where constraints disagree, XLA splits the axis in 4 going forward, and in 2 backward."""
    mesh = Mesh(np.reshape(jax.devices("cpu"), (2, 4)), ("x", "y"))
    x, do = on_host([random_array(rng, (8, 1024, 16)) for _ in range(2)])

    def gradient(x: jax.Array, *, is_sharded: bool = False) -> jax.Array:
        out, pull = jax.vjp(partial(pallas_ops.logcumsumexp, axis=1), x)
        if is_sharded:
            out = lax.with_sharding_constraint(out, NamedSharding(mesh, P(None, "y", "x")))
        dx: jax.Array = pull(do * jnp.sin(out))[0]
        return dx

    over = jax.jit(partial(gradient, is_sharded=True), out_shardings=NamedSharding(mesh, SEQUENCE))
    got = over(jax.device_put(x, NamedSharding(mesh, P())))
    assert_close(got, jax.jit(gradient)(x), terms=1024)


def test_what_is_recomputed_may_be_sharded_in_another_way(rng: Rng) -> None:
    """Saved where the axis is split; the input that is computed again is split along the batch."""
    mesh, xs = shards.line(8), on_host([random_array(rng, (128, 8, 8)) for _ in range(2)])

    def gradient(x: jax.Array, do: jax.Array, split: Any = lambda x, *_: x) -> jax.Array:
        @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*Residuals))
        def layer(x: jax.Array) -> jax.Array:
            out = pallas_ops.logcumsumexp(jnp.sin(x), axis=1, implementation="interpret")
            return split(out, None, "x")

        out, pull = jax.vjp(layer, split(x))
        return split(pull(split(do * jnp.sin(out), "x"))[0], "x")

    def split(x: jax.Array, *names: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*names)))

    got = jax.jit(partial(gradient, split=split))(*shards.placed(mesh, xs, (P(), P())))
    assert_close(got, jax.jit(gradient)(*xs), terms=8)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (12, {"implementation": "interpret", "clip": 1.0, "reverse": True}),
        (24, {"reverse": True}),
        (32, {"reverse": True}),
        (24, {"clip": 1.0}),
        (5, {"reverse": True}),  # not every shard has the beginning of a tile
        (16, {"implementation": "interpret", "reverse": True}),
    ],
)
def test_shards_save_the_states_of_the_whole_axis(
    rng: Rng, length: int, options: dict[str, Any]
) -> None:
    """Wherever the tiles begin, with numbers of all kinds; no NaN where none was given."""
    mesh, options = shards.line(8), dict(options)
    implementation = options.pop("implementation", None)
    params = Params(axis=1, block_n=16, **options)
    run: Any = jax.jit(
        partial(call, op("saving", 1, 1, 16), implementation=implementation, params=params)
    )
    x, start = (
        np.array(10 * random_array(rng, s), np.float32) for s in ((2, 8 * length, 6), (2, 6))
    )
    x[:, : 3 * length, 0] = -np.inf
    for column, number in enumerate((np.inf, -np.inf, np.nan), 1):
        x[1, 5 * length + 3, column] = number
    placed = *shards.placed(mesh, (x, start), (SEQUENCE, P())), None
    got, want = (
        (out, final, p + jnp.log(t), last_p + jnp.log(last_t))
        for out, final, p, t, last_p, last_t in (run(*placed), run(x, start, None))
    )
    assert_close(got, want, terms=8 * length)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_explicit_types_of_states(rng: Rng, implementation: Any) -> None:
    """Of four tiles, sharded like x; the differentiated gradient reads them too."""
    mesh, xs = shards.line(4, AxisType.Explicit), on_host([random_array(rng, (1, 512, 16))] * 2)

    def second(x: jax.Array, do: jax.Array) -> Any:
        fn = partial(pallas_ops.logcumsumexp, axis=1, reverse=True, implementation=implementation)
        out, pull = jax.vjp(lambda x, do: jax.vjp(fn, x)[1](do)[0], x, do)
        return out, pull(jnp.cos(out))

    want = jax.jit(second)(*xs)
    with jax.set_mesh(mesh):
        got = jax.jit(second)(*shards.placed(mesh, xs, (SEQUENCE, SEQUENCE)))
    assert_close(got, want, terms=512)


def test_no_nan_is_saved() -> None:
    """JAX looks for them in what a program returns, and that is what is saved as well."""
    (x,) = shards.placed(shards.line(8), (np.ones((2, 64, 3), np.float32),), (SEQUENCE,))
    with jax.debug_nans(True):
        grad = jax.grad(lambda x: pallas_ops.logcumsumexp(x, axis=1).sum())(x)
    assert not jnp.isnan(grad).any()


def test_shards_of_an_empty_axis() -> None:
    fn = partial(pallas_ops.logcumsumexp_with_state, axis=1, axis_name="x")
    run = shards.mapped(fn, shards.line(2), SEQUENCE, (SEQUENCE, P()))
    out, state = run(jnp.zeros((2, 0, 3)))
    assert out.shape == (2, 0, 3)
    assert (state == -jnp.inf).all()
