"""Products of tiles keep the bits that they say they keep."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import launch
from pallas_ops.ops.tpa_decode.matmul import dot, dot_in_float16, dot_in_slots
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


@pytest.mark.parametrize(("dtype", "pieces"), [(jnp.bfloat16, 3), (jnp.float16, 2)])
@pytest.mark.parametrize("left", [False, True])
def test_slots_hold_all_bits(
    rng: np.random.Generator, left: bool, dtype: Any, pieces: Literal[2, 3]
) -> None:
    x = random_array(rng, (64, 16)) * 2.0 ** rng.integers(-40, 40, (64, 16)).astype(np.float32)
    a, b = jnp.tile(x, 2), jnp.tile(jnp.eye(16, dtype=dtype), (2, 1))
    with launch.interpreted(True):
        options: Any = dict(pieces=pieces, size=16)
        got = dot_in_slots(a, b, **options) if left else dot_in_slots(b.T, a.T, **options).T
    np.testing.assert_array_equal(got, x)


def test_float16_weights_keep_23_bits(rng: np.random.Generator) -> None:
    """All but what is small beside the largest float16 number."""
    x = random_array(rng, (64, 64), scale=2.0**12)
    x = jnp.clip(x * 2.0 ** -rng.integers(0, 40, (64, 64)).astype(np.float32), -65500, 65500)
    acc = random_array(rng, (64, 64))
    with launch.interpreted(True):
        got = dot_in_float16(x, jnp.eye(64, dtype=jnp.float16), 0 * acc)
        added = dot_in_float16(x, jnp.zeros((64, 64), jnp.float16), acc)
    assert (np.abs(got - x) <= 2.0**-23 * np.abs(x) + 2.0**-25).all()
    np.testing.assert_array_equal(added, acc)


def test_a_product_is_added_to_what_is_there(rng: np.random.Generator) -> None:
    a, b = random_array(rng, (16, 32), jnp.bfloat16), random_array(rng, (32, 16))
    acc = random_array(rng, (16, 16))
    with launch.interpreted(True):
        got = dot(a, b, acc, pieces=3)
    want = np.asarray(acc, np.float64) + np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
