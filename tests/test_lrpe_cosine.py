"""lrpe_cosine: reference against a loop, kernels against the reference, gradients, laws."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import pallas_ops
from pallas_ops import LrpeCosineConfig
from pallas_ops.ops.lrpe_cosine import config as launch_config
from pallas_ops.ops.lrpe_cosine import kernel as launchers
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_float64,
    in_turn,
    kernel_implementation,
    random_array,
    random_cotangents,
    value_and_vjp,
)

KERNEL = kernel_implementation()
BLOCK = LrpeCosineConfig(variant="block", block_n=2, block_d=16, num_parts=2, num_warps=1)
Rng = np.random.Generator

CASES = [
    case(width=10),
    case(width=10, heads=1, act="silu"),
    case(width=1, act="sigmoid", layout="BHND"),
    case(width=4, act="relu", layout="BHND"),
    case(width=10, act="softmax", axis=-1),
    case(width=3, heads=1, act="softmax", axis=3, layout="BHND"),
    case(width=10, act="softmax", axis=1),
    case(width=1, act="softmax", axis=-2, layout="BHND", n=36),  # 18 tiles: not whole bunches
]
HALVES = [
    case(width=10, dtype=jnp.bfloat16),
    case(width=1, act="sigmoid", layout="BHND", dtype=jnp.float16),
    case(width=10, act="softmax", axis=-1, dtype=jnp.bfloat16),
    case(width=10, act="softmax", axis=1, dtype=jnp.float16),
]


def inputs(
    rng: Rng,
    *,
    width: int,
    heads: int = 3,
    b: int = 2,
    n: int = 37,
    layout: str = "BNHD",
    dtype: Any = jnp.float32,
    **options: Any,
) -> tuple[tuple[jax.Array, jax.Array], dict[str, Any]]:
    """x and theta, and the keywords."""
    sizes = dict(B=b, N=n, H=3, D=10)
    x = random_array(rng, tuple(sizes[letter] for letter in layout), dtype)
    return (x, random_array(rng, (heads, width))), dict(layout=layout, **options)


def reference(**options: Any) -> Any:
    return jax.jit(partial(pallas_ops.reference.lrpe_cosine, **options))


def kernel(**options: Any) -> Any:
    return jax.jit(partial(pallas_ops.lrpe_cosine, implementation=KERNEL, **options))


def loop(
    x: Any, theta: Any, positions: Any, *, layout: str, act: str = "none", axis: int | None = None
) -> npt.NDArray[np.float64]:
    """The definition, a number at a time, in float64; positions [B, N]."""
    x, theta = np.asarray(x, np.float64), np.asarray(theta, np.float64)
    if act == "softmax":
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        x = e / e.sum(axis=axis, keepdims=True)
    acts = {"relu": lambda v: max(v, 0), "sigmoid": lambda v: 1 / (1 + np.exp(-v))}
    acts["silu"] = lambda v: v / (1 + np.exp(-v))
    d = x.shape[-1]
    out = np.zeros((*x.shape[:-1], 2 * d))
    for i, j, k, f in np.ndindex(x.shape):
        n, h = (j, k) if layout == "BNHD" else (k, j)
        row = theta[h % len(theta)]
        angle = 0 if 1 < len(row) <= f else float(positions[i, n]) * row[f % len(row)]
        a = acts.get(act, float)(x[i, j, k, f])
        out[i, j, k, f], out[i, j, k, d + f] = a * np.cos(angle), a * np.sin(angle)
    return out


# Reference


@pytest.mark.parametrize("settings", CASES)
def test_reference_is_the_loop(rng: Rng, settings: dict[str, Any]) -> None:
    xs, options = inputs(rng, **settings | dict(n=5))
    want = loop(*xs, 7 + np.tile(np.arange(5), (2, 1)), **options)
    assert_close(reference(offset=7, **options)(*xs), want, terms=10)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_the_phase_is_right_where_a_float32_product_loses_it(rng: Rng, implementation: Any) -> None:
    """Within 1e-5 up to 2**24 positions and |theta| of 4."""
    position = jnp.asarray(rng.integers(2**23, 2**24 + 1, 64), jnp.int32)
    theta = jnp.asarray(rng.uniform(-4, 4, (1, 32)), jnp.float32)
    ones = jnp.ones((1, 64, 1, 32))
    run = partial(pallas_ops.lrpe_cosine, implementation=implementation)
    got = np.asarray(jax.jit(run)(ones, theta, positions=position), np.float64)
    want = loop(ones, theta, np.asarray(position)[None], layout="BNHD")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    naive = jnp.cos(position.astype(jnp.float32)[:, None] * theta)
    assert np.abs(naive - want[0, :, 0, :32]).max() > 1e-3


# Forward and gradient


@pytest.mark.parametrize("settings", CASES + HALVES)
def test_kernels_are_as_good_as_the_reference(rng: Rng, monkeypatch: Any, settings: Any) -> None:
    """Output and both gradients; in float32, sums over the sequence have several parts."""
    xs, options = inputs(rng, **settings)
    if "dtype" not in settings:
        for module in (launch_config, launchers):
            monkeypatch.setattr(module, "choose_walk", lambda *_: BLOCK)
    cotangents = random_cotangents(rng, jax.eval_shape(reference(**options), *xs))
    got = value_and_vjp(kernel(**options), xs, cotangents)
    own = value_and_vjp(reference(**options), xs, cotangents)
    wide = partial(pallas_ops.reference.lrpe_cosine, **options)
    truth = in_float64(lambda xs, dout: value_and_vjp(wide, xs, dout), xs, cotangents)
    assert_as_good_as_reference(got, own, truth)


CONFIGS = [
    case(block_n=4, block_d=16),
    case(block_n=4, block_d=4),
    case(block_n=8, block_d=16, cache_angles=True, width=1),
    case(variant="block", block_n=4, block_d=8, num_parts=3, num_stages=2),
    case(variant="block", block_n=16, block_d=16, cache_angles=True),
    case(variant="block", block_n=2, block_d=16, num_parts=2, act="softmax", axis=1),
]


@pytest.mark.parametrize(("settings", "where"), in_turn(CONFIGS, ["shared", "each"]))
def test_every_config_gives_the_same(rng: Rng, settings: dict[str, Any], where: str) -> None:
    """Output and gradients, of which theta's has a launch of its own."""
    launch = dict(settings)
    xs, _ = inputs(rng, width=launch.pop("width", 4), b=3)
    offset = jnp.asarray([3, 100, 0] if where == "each" else 7, jnp.int32)
    dout = random_array(rng, (3, 37, 3, 20))
    options = dict(offset=offset, act=launch.pop("act", "silu"), axis=launch.pop("axis", None))
    run = kernel(config=LrpeCosineConfig(**launch), **options)
    out, (dx, dtheta) = value_and_vjp(run, xs, dout)
    want, (of_x, of_theta) = value_and_vjp(reference(**options), xs, dout)
    assert_close((out, dx), (want, of_x), terms=4)
    assert_close(dtheta, of_theta, terms=60)


def test_extremes_stay_where_they_are(rng: Rng) -> None:
    """In features, tokens or columns; -inf and huge ranges are ordinary for a softmax."""
    (x, theta), _ = inputs(rng, width=10)
    x = x.at[0, 3, 1, 2].set(jnp.nan).at[1, 5, 0].set(-jnp.inf).at[1, :4].set(-jnp.inf)
    x = x.at[1, 9].multiply(1e4)
    for options in (dict(act="relu"), dict(act="softmax", axis=1), dict(act="softmax", axis=3)):
        for config in (None, BLOCK) if options.get("axis") == 1 else (None,):
            got, want = kernel(config=config, **options)(x, theta), reference(**options)(x, theta)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_that_nobody_asked_for_cost_nothing(rng: Rng) -> None:
    """Without an activation, x's gradient saves no array but theta; both take one pass."""
    (x, theta), _ = inputs(rng, width=10)
    run = partial(pallas_ops.lrpe_cosine, implementation=KERNEL)
    dx = jax.vjp(lambda x: run(x, theta), x)[1]
    dtheta = jax.vjp(lambda theta: run(x, theta), theta)[1]
    both = jax.vjp(run, x, theta)[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(dx)) <= theta.size
    for pull, name in ((dx, "backward"), (dtheta, "theta"), (both, "gradients")):
        pulled = str(jax.make_jaxpr(pull)(jnp.ones((2, 37, 3, 20))))
        assert set(re.findall(r"name='lrpe_cosine_(\w+)'", pulled)) == {name}


@pytest.mark.parametrize("act", ["none", "silu"])
def test_a_jitted_function_has_the_gradients_asked_for(rng: Rng, act: Any) -> None:
    """Also if others were asked for before: JAX keeps something of those."""
    (x, theta), _ = inputs(rng, width=10, n=2)
    dout = random_array(rng, (2, 2, 3, 20))
    run, own = kernel(act=act), reference(act=act)

    def mapped(*xs: jax.Array) -> jax.Array:
        each: jax.Array = jax.lax.map(lambda xs: run(*xs), jax.tree.map(lambda x: x[None], xs))
        return each[0]

    def gradient(fn: Any, argnums: tuple[int, ...]) -> Any:
        return jax.grad(lambda *xs: jnp.vdot(fn(*xs), dout), argnums)(x, theta)

    for fn, argnums in ((mapped, (0, 1)), (run, (1,)), (run, (0,)), (run, (0, 1))):
        assert_close(gradient(fn, argnums), gradient(own, argnums), terms=60)


def test_real_positions_have_a_gradient(rng: Rng) -> None:
    xs, _ = inputs(rng, width=10, b=2)
    positions, dout = random_array(rng, (2, 37)), random_array(rng, (2, 37, 3, 20))

    def gradient(fn: Any) -> Any:
        return value_and_vjp(lambda positions: fn(*xs, positions=positions), (positions,), dout)[1]

    assert_close(gradient(kernel()), gradient(reference()), terms=60)


# Laws


def test_offset_is_a_prefix_dropped_and_a_position_array(rng: Rng) -> None:
    (x, theta), _ = inputs(rng, width=10, act="silu")
    longer = jnp.concatenate([jnp.ones_like(x[:, :5]), x], axis=1)
    run = kernel(act="silu")
    want = run(longer, theta)[:, 5:]
    at = 5 + jnp.arange(37)
    for where in (dict(offset=5), dict(offset=jnp.asarray([5, 5])), dict(positions=at)):
        assert_close(run(x, theta, **where), want, scale=1.0)
    assert_close(run(x, theta, positions=jnp.stack([at, at]).astype(jnp.float32)), want, scale=1.0)


def test_pairs_keep_their_length(rng: Rng) -> None:
    (x, theta), _ = inputs(rng, width=10)
    out = kernel(offset=1000)(x, theta)
    assert_close(out[..., :10] ** 2 + out[..., 10:] ** 2, x**2)


def test_no_heads_is_one_head(rng: Rng) -> None:
    (x, theta), _ = inputs(rng, width=10, heads=1)
    assert_close(kernel()(x[:, :, 0], theta), kernel()(x[:, :, :1], theta)[:, :, 0], scale=1.0)


def test_grad_of_grad(rng: Rng) -> None:
    xs, options = inputs(rng, width=10, n=3, act="silu")

    def second(fn: Any) -> Any:
        first = jax.grad(lambda *xs: jnp.sum(fn(*xs, **options) ** 3))
        return jax.jit(jax.grad(lambda *xs: jnp.vdot(first(*xs), xs[0]), (0, 1)))(*xs)

    interpreted = partial(pallas_ops.lrpe_cosine, implementation=KERNEL)
    assert_close(second(interpreted), second(pallas_ops.reference.lrpe_cosine), terms=1000)
