"""Products of tiles keep the bits that they say they keep."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import launch
from pallas_ops.ops.tpa_decode.matmul import dot, scaled_dot
from tests.support import random_array

PIECES = [(jnp.bfloat16, 2, 2.0**-16), (jnp.bfloat16, 3, 0.0), (jnp.float16, 3, 0.0)]


@pytest.mark.parametrize(("dtype", "pieces", "error"), PIECES)
@pytest.mark.parametrize("left", [False, True])
def test_a_float32_side_is_the_sum_of_bfloat16_pieces(
    rng: np.random.Generator, left: bool, dtype: Any, pieces: Literal[2, 3], error: float
) -> None:
    x = random_array(rng, (64, 64)) * 2.0 ** rng.integers(-40, 40, (64, 64)).astype(np.float32)
    one = jnp.eye(64, dtype=dtype)
    with launch.interpreted(True):
        got = dot(x, one, pieces=pieces) if left else dot(one, x, pieces=pieces)
    assert (np.abs(got - x) <= error * np.abs(x)).all()


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("left", [False, True])
def test_products_with_float16_keep_21_bits(
    rng: np.random.Generator, left: bool, pieces: Literal[2, 3]
) -> None:
    """As TF32's three do: results of float16 have three bits more than those of bfloat16."""
    x, factor = random_array(rng, (64, 64)), random_array(rng, (64,), jnp.float16)
    with launch.interpreted(True):
        diagonal = jnp.diag(factor)
        got = dot(x, diagonal, pieces=pieces) if left else dot(diagonal, x.T, pieces=pieces).T
    want = np.asarray(x, np.float64) * np.asarray(factor, np.float64)
    assert (np.abs(got - want) <= 2.0**-20 * np.abs(want)).all()


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("left", [False, True])
def test_scaled_products_with_float16_keep_23_bits(
    rng: np.random.Generator, left: bool, size: int | None
) -> None:
    """Whatever the size of a row is, but for what is small beside its largest number."""
    scale = rng.integers(-60, 60, (64, 1)) + rng.integers(-9, 9, (64, 16))
    x, one = random_array(rng, (64, 16)) * 2.0 ** scale.astype(np.float32), jnp.eye(16)
    x = x.at[5].set(0)
    a, b = (x, one) if size is None else (jnp.tile(x, 2), jnp.tile(one, (2, 1)))
    b = b.astype(jnp.float16)
    with launch.interpreted(True):
        got = scaled_dot(a, b, size=size) if left else scaled_dot(b.T, a.T, size=size).T
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(got - x) <= 2.0**-23 * np.abs(x) + 2.0**-39 * largest).all()


def test_a_product_is_added_to_what_is_there(rng: np.random.Generator) -> None:
    a, b = random_array(rng, (16, 32), jnp.bfloat16), random_array(rng, (32, 16))
    acc = random_array(rng, (16, 16))
    with launch.interpreted(True):
        got = dot(a, b, acc, pieces=3)
    want = np.asarray(acc, np.float64) + np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
