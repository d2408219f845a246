"""The hardware's approximations keep the error bounds that they promise."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import fastmath, launch
from pallas_ops.ops.lrpe_cosine import angles as lrpe_angles
from tests import h200
from tests.support import EPS32, kernel_implementation, to_float64

INTERPRETED = kernel_implementation() == "interpret"
Rng = np.random.Generator


def mapped(fn: Callable[..., jax.Array], *xs: jax.Array) -> jax.Array:
    """`fn` of arrays of 1,024 numbers, in a kernel."""

    def kernel(*refs: Any) -> None:
        refs[-1][...] = fn(*(ref[...] for ref in refs[:-1]))

    return launch.launch(
        kernel,
        *xs,
        name="map",
        grid=(1,),
        out_shape=[jax.ShapeDtypeStruct((1024,), jnp.float32)],
        num_warps=1,
    )[0]


def run(fn: Callable[..., jax.Array], *xs: Any) -> Any:
    with launch.interpreted(INTERPRETED):
        return to_float64(jax.jit(partial(mapped, fn))(*(jnp.asarray(x, jnp.float32) for x in xs)))


def spread(rng: Rng) -> Any:
    """Numbers of all normal sizes."""
    return np.exp2(rng.uniform(-125, 125, 1024)).astype(np.float32)


@pytest.mark.skipif(INTERPRETED, reason="XLA for CPUs takes them for 0")
def test_denormal_numbers_are_kept() -> None:
    x = np.full(1024, 2.0**-130, np.float32)
    np.testing.assert_array_equal(run(lambda x: x + x, x), 2 * to_float64(x))


def test_larger_drops_nan(rng: Rng) -> None:
    x = rng.standard_normal(1024).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(run(lambda x: fastmath.fmax(x, 0.5), x), np.fmax(x, 0.5))


def test_exp2_is_within_2_ulp(rng: Rng) -> None:
    """On a card; XLA for CPUs rounds x log(2) before it takes exp."""
    x = rng.uniform(-125, 127, 1024).astype(np.float32)
    want = np.exp2(x.astype(np.float64))
    allowed = EPS32 * want * (2 + INTERPRETED * np.abs(x))
    assert (np.abs(run(fastmath.exp2, x) - want) <= allowed).all()


def test_log2_is_within_its_bounds(rng: Rng) -> None:
    x = spread(rng)
    got, want = run(fastmath.log2, x), np.log2(x.astype(np.float64))
    far = np.abs(want) > 1
    np.testing.assert_allclose(got[far], want[far], rtol=2 * EPS32)
    x = rng.uniform(0.5, 2, 1024).astype(np.float32)
    want = np.log2(x.astype(np.float64))
    np.testing.assert_allclose(run(fastmath.log2, x), want, rtol=0, atol=2.0**-22)


def test_reciprocal_is_within_an_ulp(rng: Rng) -> None:
    x = spread(rng) * rng.choice(np.asarray([-1, 1], np.float32), 1024)
    np.testing.assert_allclose(run(fastmath.reciprocal, x), 1 / x.astype(np.float64), rtol=EPS32)


def test_multiply_add(rng: Rng) -> None:
    x, y = rng.standard_normal((2, 1024)).astype(np.float32)
    want = x.astype(np.float64) * np.float32(0.3) + y
    got = run(lambda x, y: fastmath.multiply_add(x, 0.3, y), x, y)
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * EPS32)


def angles(rng: Rng) -> tuple[Any, Any, Any]:
    """Positions up to 2**24, frequencies up to 4, and their products in float64."""
    position = rng.integers(-(2**24), 2**24, 1024, endpoint=True).astype(np.float32)
    theta = (rng.uniform(-4, 4, 1024) * 10.0 ** rng.uniform(-6, 0, 1024)).astype(np.float32)
    theta[:512] = rng.uniform(-4, 4, 512)
    return position, theta, position.astype(np.float64) * theta


def test_angles_are_right_at_any_position(rng: Rng) -> None:
    position, theta, angle = angles(rng)

    def sincos(which: int, position: jax.Array, theta: jax.Array) -> jax.Array:
        turn = lrpe_angles.remainder(position, *lrpe_angles.frequency(theta))
        return lrpe_angles.sincos(turn)[which]

    for which, want in enumerate((np.sin(angle), np.cos(angle))):
        got = run(partial(sincos, which), position, theta)
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)


@pytest.mark.parametrize("sincos", [lrpe_angles.sincos, lrpe_angles.precise_sincos])
def test_the_instructions_for_angles_are_right(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, sincos: Any
) -> None:
    """Those of a card, emulated one by one, with sines as exact as can be."""

    def emulated(instruction: str, *xs: Any) -> jax.Array:
        wide = [np.asarray(x, np.float32).astype(np.float64) for x in xs]
        kind = instruction.partition(".")[0]
        of: dict[str, Any] = {"mul": np.multiply, "sin": np.sin, "cos": np.cos}
        of["fma"] = lambda x, y, z: x * y + z
        return jnp.asarray(of[kind](*wide).astype(np.float32))

    for module in (fastmath, lrpe_angles):
        monkeypatch.setattr(module, "ptx", emulated)
    position, theta, angle = angles(rng)
    turn = lrpe_angles.remainder(jnp.asarray(position), *lrpe_angles.frequency(jnp.asarray(theta)))
    assert jnp.abs(turn).max() <= 2
    assert jnp.abs(turn[np.abs(angle) < 2 * np.pi * 1000]).max() <= 1
    for got, want in zip(sincos(turn), (np.sin(angle), np.cos(angle)), strict=True):
        np.testing.assert_allclose(to_float64(got), want, rtol=0, atol=2e-6)


def test_precise_sincos(rng: Rng) -> None:
    turn = rng.uniform(-2, 2, 1024).astype(np.float32)
    angle = 2 * np.pi * turn.astype(np.float64)
    for which, want in enumerate((np.sin(angle), np.cos(angle))):
        got = run(lambda turn, which=which: lrpe_angles.precise_sincos(turn)[which], turn)
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-23)


@pytest.mark.parametrize("jit", [True, False])
def test_turns_lose_nothing_to_fusion(rng: Rng, jit: bool) -> None:
    """XLA for CPUs fuses products with sums where it compiles several operations at once."""
    position, theta, angle = angles(rng)
    turns = jax.jit(lrpe_angles.turns) if jit else lrpe_angles.turns
    off = to_float64(turns(jnp.asarray(position), jnp.asarray(theta))) - angle / (2 * np.pi)
    assert np.abs(off - np.round(off)).max() < 2.0**-21


def test_turns_have_a_gradient(rng: Rng) -> None:
    position, theta = (jnp.asarray(x) for x in rng.standard_normal((2, 8)).astype(np.float32))
    tangents = jax.jvp(lrpe_angles.turns, (position, theta), (theta, position))[1]
    np.testing.assert_allclose(2 * np.pi * tangents, theta**2 + position**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "of_minus_infinity", "of_zero", "of_infinity"),
    [
        (fastmath.exp2, 0, 1, np.inf),
        (fastmath.log2, np.nan, -np.inf, np.inf),
        (fastmath.reciprocal, 0, np.inf, 0),
    ],
)
def test_what_is_special_stays_so(
    fn: Any, of_minus_infinity: Any, of_zero: Any, of_infinity: Any
) -> None:
    x = np.resize(np.asarray([-np.inf, 0, np.inf, np.nan], np.float32), 1024)
    want = np.resize([of_minus_infinity, of_zero, of_infinity, np.nan], 1024)
    np.testing.assert_array_equal(run(fn, x), want)


def test_one_instruction_each() -> None:
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    for fn, instruction in (
        (fastmath.exp2, "ex2.approx.ftz.f32"),
        (fastmath.log2, "lg2.approx.ftz.f32"),
        (fastmath.reciprocal, "rcp.approx.ftz.f32"),
        (lambda x: fastmath.multiply_add(x, 0.5, x), "fma.rn.f32"),
    ):
        program = h200.compile_for_h200(partial(mapped, fn), x)
        assert program.ptx[0].count(instruction) == 32


def test_rounding_by_a_sum_is_left_alone() -> None:
    """A compiler that did algebra would take what is added and subtracted for nothing."""
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def turns(x: jax.Array) -> jax.Array:
        return lrpe_angles.remainder(x, x, x)

    for fn in (turns, lambda x: lrpe_angles.precise_sincos(x)[0]):
        program = h200.compile_for_h200(partial(mapped, fn), x)
        assert len(re.findall(r"(add|sub)\.(rn\.)?f32", program.ptx[0])) == 32
