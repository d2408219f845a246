"""md_lrpe_cosine: the grid's loop, the one-dimensional op, laws."""

import math
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
Rng = np.random.Generator
GRID = jnp.stack(jnp.unravel_index(jnp.arange(15), (3, 5)), axis=-1)  # the indices of its points

GRIDS = [
    case(shape=(7,), width=10),
    case(shape=(3, 5), width=5, prefix=2),
    case(shape=(2, 3, 4), width=4, heads=1, layout="BHND", act="silu"),
    case(shape=(3, 1, 2, 2), width=3, prefix=1, act="softmax", axis=-1),
    case(shape=(5, 5), width=8, prefix=3, act="softmax", axis=1),
]


def inputs(
    rng: Rng,
    *,
    shape: tuple[int, ...],
    width: int,
    prefix: int = 0,
    heads: int = 3,
    layout: str = "BNHD",
    dtype: Any = jnp.float32,
    **options: Any,
) -> tuple[tuple[jax.Array, jax.Array], dict[str, Any]]:
    """x and theta, and the keywords."""
    sizes = dict(B=2, N=prefix + math.prod(shape), H=3, D=10)
    x = random_array(rng, tuple(sizes[letter] for letter in layout), dtype)
    options |= dict(shape=shape, num_prefix_tokens=prefix, layout=layout)
    return (x, random_array(rng, (heads, width))), options


def reference(**options: Any) -> Any:
    return jax.jit(partial(pallas_ops.reference.md_lrpe_cosine, **options))


def kernel(**options: Any) -> Any:
    return jax.jit(partial(pallas_ops.md_lrpe_cosine, implementation=KERNEL, **options))


def loop(
    x: Any, theta: Any, *, shape: tuple[int, ...], num_prefix_tokens: int, layout: str
) -> npt.NDArray[np.float64]:
    """The definition without an activation, a number at a time, in float64."""
    x, theta = np.asarray(x, np.float64), np.asarray(theta, np.float64)
    d, width = x.shape[-1], theta.shape[1]
    out = np.zeros((*x.shape[:-1], 2 * d))
    for i, j, k, f in np.ndindex(x.shape):
        n, h = (j, k) if layout == "BNHD" else (k, j)
        point = np.unravel_index(max(0, n - num_prefix_tokens), shape)
        angle = point[f // width] * theta[h % len(theta), f % width]
        angle = 0 if n < num_prefix_tokens else angle
        out[i, j, k, f] = x[i, j, k, f] * np.cos(angle)
        out[i, j, k, d + f] = x[i, j, k, f] * np.sin(angle)
    return out


@pytest.mark.parametrize("settings", GRIDS)
def test_reference_is_the_loop(rng: Rng, settings: dict[str, Any]) -> None:
    xs, options = inputs(rng, **settings)
    for name in ("act", "axis"):
        options.pop(name, None)
    assert_close(reference(**options)(*xs), loop(*xs, **options), terms=4)


@pytest.mark.parametrize(
    ("settings", "dtype", "cache", "spread"),
    in_turn(
        GRIDS,
        [
            pytest.param(jnp.float32, None, False, id="default"),
            pytest.param(jnp.float32, False, False, id="float32"),
            pytest.param(jnp.bfloat16, True, False, id="bfloat16-cached"),
            pytest.param(jnp.float32, False, True, id="float32-spread"),
        ],
    ),
)
def test_kernels_are_as_good_as_the_reference(
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    dtype: Any,
    cache: bool | None,
    spread: bool,
) -> None:
    """Output and both gradients, with angles recomputed and cached, and theta spread.

    By default the gradients are one pass.
    """
    if spread:
        monkeypatch.setattr(launch_config, "SPREAD_ELEMENTS", 0)
    sequence = settings.get("axis") == 1
    launch: Any = dict(variant="block", block_n=16) if sequence else dict(block_n=4)
    config = None if cache is None else LrpeCosineConfig(block_d=16, cache_angles=cache, **launch)
    xs, options = inputs(rng, **settings, dtype=dtype)
    cotangents = random_cotangents(rng, jax.eval_shape(reference(**options), *xs))
    got = value_and_vjp(kernel(config=config, **options), xs, cotangents)
    own = value_and_vjp(reference(**options), xs, cotangents)
    wide = partial(pallas_ops.reference.md_lrpe_cosine, **options)
    truth = in_float64(partial(value_and_vjp, wide), xs, cotangents)
    assert_as_good_as_reference(got, own, truth)


@pytest.mark.parametrize("width", [4, 1])
def test_one_axis_is_lrpe_cosine(rng: Rng, width: int) -> None:
    xs, options = inputs(rng, shape=(7,), width=width)
    got = kernel(**options)(*xs)
    assert_close(got, jax.jit(partial(pallas_ops.lrpe_cosine, implementation=KERNEL))(*xs))


def test_prefix_tokens_do_not_turn(rng: Rng) -> None:
    (x, theta), options = inputs(rng, shape=(3, 5), width=5, prefix=2, act="silu")
    out = kernel(**options)(x, theta)
    assert_close(out[:, :2, :, :10], jax.nn.silu(x[:, :2]))
    assert (out[:, :2, :, 10:] == 0).all()
    positions = jnp.pad(GRID, ((2, 0), (0, 0))) + 1  # the prefix's count as 0
    moved = kernel(positions=positions, **options)(x, theta)
    assert_close(moved[:, :2], out[:, :2])


def test_given_positions_are_the_grid(rng: Rng) -> None:
    xs, options = inputs(rng, shape=(3, 5), width=5)
    positions = GRID
    want = kernel(**options)(*xs)
    each = jnp.stack([positions, positions]).astype(jnp.float32)
    for given, shape in ((positions, None), (each, (3, 5))):
        assert_close(kernel(**options | dict(positions=given, shape=shape))(*xs), want)


def test_a_permuted_grid_permutes(rng: Rng) -> None:
    """Tokens may come in any order, if each brings its position."""
    (x, theta), options = inputs(rng, shape=(3, 5), width=5)
    order = jnp.asarray(rng.permutation(15))
    positions = GRID[order]
    got = kernel(positions=positions, shape=None)(x[:, order], theta)
    assert_close(got, kernel(**options)(x, theta)[:, order])


def test_swapped_axes_swap(rng: Rng) -> None:
    """On the transposed grid, the features' halves change places."""
    (x, theta), options = inputs(rng, shape=(3, 5), width=5)
    swapped = x.reshape(2, 3, 5, 3, 2, 5).swapaxes(1, 2)[..., ::-1, :].reshape(2, 15, 3, 10)
    got = kernel(**options | dict(shape=(5, 3)))(swapped, theta)
    want = kernel(**options)(x, theta).reshape(2, 3, 5, 3, 2, 2, 5)
    assert_close(got, want.swapaxes(1, 2)[..., ::-1, :].reshape(2, 15, 3, 20))
