"""chunk_cumsum_decay: reference and kernels against a loop, laws."""

import itertools
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import ChunkCumsumDecayConfig
from tests.chunk_cumsum_decay import Rng, arguments, pulled, sums, truth
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_turn,
    kernel_implementation,
    random_array,
    value_and_vjp,
)

KERNEL = kernel_implementation()
MODES = [
    case(reverse=reverse, shift=shift)
    for reverse, shift in itertools.product([False, True], [None, "chunk", "sequence"])
]
every_mode = pytest.mark.parametrize("mode", MODES)
SHAPES = [
    case(shape=(40,), axis=0, chunk_size=7),
    case(shape=(3, 37), axis=-1, chunk_size=3),
    case(shape=(2, 130, 3), axis=1, chunk_size=100),
    case(shape=(2, 3, 17, 2), axis=-2, chunk_size=128),
    case(shape=(2, 6, 3, 2, 3), axis=1, chunk_size=1),
]


# Reference


@every_mode
@pytest.mark.parametrize("case", SHAPES)
def test_reference_is_the_loop(rng: Rng, case: dict[str, Any], mode: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"} | mode
    xs = arguments(rng, case["shape"])
    assert_close(pulled("xla", **options)(*xs), truth(*xs, **options), terms=case["chunk_size"])


@pytest.mark.slow
def test_references_have_the_ops_arguments(rng: Rng) -> None:
    options: dict[str, Any] = dict(
        axis=-1,
        chunk_size=3,
        reverse=True,
        shift="chunk",
        scale=-2,
        dtype="float16",
        cu_seqlens=jnp.asarray([1, 5, 7]),
    )
    x = random_array(rng, (3, 8))
    reference = pallas_ops.reference.chunk_cumsum_decay
    op = partial(pallas_ops.chunk_cumsum_decay, implementation="xla")
    got, want = (jax.jit(partial(f, **options))(x) for f in (reference, op))
    assert_close(got, want)


# Forward and gradient


@pytest.mark.parametrize(("case", "mode"), in_turn(SHAPES, MODES))
def test_kernel_is_the_loop(rng: Rng, case: dict[str, Any], mode: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"} | mode
    xs = arguments(rng, case["shape"])
    own = pulled("xla", **options)(*xs)
    assert_as_good_as_reference(pulled(KERNEL, **options)(*xs), own, truth(*xs, **options))


DTYPES = [
    case(dtype=jnp.bfloat16),
    case(dtype=jnp.float16),
    case(dtype=jnp.bfloat16, out=jnp.float32),
    case(dtype=jnp.float32, out=jnp.bfloat16),
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_dtypes_are_as_good_as_the_reference(rng: Rng, axis: int, dtypes: dict[str, Any]) -> None:
    options = dict(axis=axis, chunk_size=20, scale=0.3)
    out_dtype = dtypes.get("out", dtypes["dtype"])
    x, _ = arguments(rng, (40, 40), dtypes["dtype"])
    do, _ = arguments(rng, (40, 40), out_dtype)
    got = pulled(KERNEL, dtype=dtypes.get("out"), **options)(x, do)
    assert (got[0].dtype, got[1].dtype) == (out_dtype, x.dtype)
    own = pulled("xla", dtype=dtypes.get("out"), **options)(x, do)
    want = tuple(0.3 * y for y in truth(x, do, axis=axis, chunk_size=20))
    assert_as_good_as_reference(got, own, want, floor=1e-6)


CONFIGS = [
    case(axis=0, block_n=8, block_c=4, num_steps=4),
    case(axis=0, block_n=32, block_c=2, num_chunks=2, num_steps=8, num_warps=2),
    case(axis=0, block_n=4, block_c=2, num_chunks=4, num_stages=3),
    case(axis=0, block_n=16, block_c=8, num_chunks=2, num_steps=16),
    case(axis=1, block_n=8, num_chunks=2, num_stages=2),
    case(axis=1, block_n=32, num_chunks=4),
    case(axis=1, block_n=32, num_steps=4),
]


@pytest.mark.parametrize(("config", "mode"), in_turn(CONFIGS, MODES[2:4] + MODES[5:]))
def test_every_config_is_the_loop(rng: Rng, config: dict[str, Any], mode: dict[str, Any]) -> None:
    axis = config["axis"]
    options: dict[str, Any] = dict(axis=axis, chunk_size=19, **mode)
    chosen = ChunkCumsumDecayConfig(**{k: v for k, v in config.items() if k != "axis"})
    xs = arguments(rng, (45, 3) if axis == 0 else (3, 45))
    got = pulled(KERNEL, config=chosen, **options)(*xs)
    assert_as_good_as_reference(got, pulled("xla", **options)(*xs), truth(*xs, **options))


@every_mode
@pytest.mark.parametrize("case", [case(shape=(2, 45, 3), axis=1), case(shape=(3, 45), axis=-1)])
def test_segments_are_the_loop(rng: Rng, case: dict[str, Any], mode: dict[str, Any]) -> None:
    """Of one chunk, with NaN and infinities acting from where they are on."""
    options: dict[str, Any] = dict(axis=case["axis"], chunk_size=45, scale=0.5, **mode)
    chosen = ChunkCumsumDecayConfig(block_n=8, num_chunks=4, num_segments=3)
    x, do = (np.array(y) for y in arguments(rng, case["shape"]))
    x[0, 20], x[1, 17], x[1, 40] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = tuple(
            0.5 * y for y in truth(x, do, **{k: v for k, v in options.items() if k != "scale"})
        )
    assert_close(pulled(KERNEL, config=chosen, **options)(x, do), want, terms=45)


PACKED = [[0, 13, 13, 14, 40], [5, 9, 20, 30, 33], [0, 0, 0, 0, 0], [40, 40, 40, 40, 40]]


@pytest.mark.parametrize(("mode", "axis"), in_turn(MODES, [0, 1]))
@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_packed_sequences_compile_once(
    rng: Rng, implementation: Any, axis: int, mode: dict[str, Any]
) -> None:
    """What is around them is zero, whatever is there, and gets no gradient."""
    options: dict[str, Any] = dict(axis=axis, chunk_size=6, **mode)
    x, do = arguments(rng, (40, 3) if axis == 0 else (3, 40))
    fn = pulled(implementation, **options)
    for bounds in PACKED:
        around = [*range(bounds[0]), *range(bounds[-1], 40)]
        spoilt = x.at[jnp.asarray(around, int)].set(jnp.nan) if axis == 0 else x
        got = fn(spoilt, do, jnp.asarray(bounds, jnp.int32))
        assert_close(got, truth(x, do, bounds=bounds, **options), terms=6, scale=2.0)
    assert fn._cache_size() == 1


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_gradient_of_a_scale_knows_nothing_of_what_is_left_out(
    rng: Rng, implementation: Any
) -> None:
    """NaN after the last sequence, and where a shift drops it."""
    x, do = arguments(rng, (40, 3))
    options: dict[str, Any] = dict(axis=0, chunk_size=6, shift="chunk")
    sums = truth(x, do, bounds=[0, 12, 30], **options)[0]

    def scaled(scale: jax.Array) -> jax.Array:
        spoilt = x.at[jnp.asarray([5, 11, 29, 30, 39])].set(jnp.nan)
        return pallas_ops.chunk_cumsum_decay(
            spoilt, scale=scale, cu_seqlens=[0, 12, 30], implementation=implementation, **options
        )

    out, (grad,) = value_and_vjp(jax.jit(scaled), (jnp.float32(0.7),), do)
    assert_close(out, 0.7 * sums, terms=6, scale=2.0)
    assert_close(grad, (do * sums).sum(), terms=120, scale=10.0)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
@hypothesis.given(bounds=st.lists(st.integers(0, 40), min_size=5, max_size=5), seed=st.integers(0))
def test_packed_anyhow(implementation: Any, bounds: list[int], seed: int) -> None:
    """And where bounds descend, they stay where they were."""
    options: dict[str, Any] = dict(axis=0, chunk_size=6, reverse=True, shift="sequence")
    xs = arguments(np.random.default_rng(seed), (40, 3))
    got = pulled(implementation, **options)(*xs, jnp.asarray(bounds, jnp.int32))
    ascending = list(itertools.accumulate(bounds, max))
    assert_close(got, truth(*xs, bounds=ascending, **options), terms=6, scale=2.0)


@pytest.mark.parametrize("config", CONFIGS[::2])
def test_packed_longer_than_a_block(rng: Rng, config: dict[str, Any]) -> None:
    axis = config["axis"]
    options: dict[str, Any] = dict(axis=axis, chunk_size=37, reverse=True)
    chosen = ChunkCumsumDecayConfig(**{k: v for k, v in config.items() if k != "axis"})
    xs = arguments(rng, (45, 3) if axis == 0 else (3, 45))
    bounds = [1, 3, 42, 43]
    got = pulled(KERNEL, config=chosen, **options)(*xs, jnp.asarray(bounds))
    assert_close(got, truth(*xs, bounds=bounds, **options), terms=37, scale=2.0)


@every_mode
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_specials_stay_in_their_chunk(
    rng: Rng, implementation: Any, axis: int, mode: dict[str, Any]
) -> None:
    options: dict[str, Any] = dict(axis=axis, chunk_size=6, **mode)
    x, do = (np.array(y) for y in arguments(rng, (40, 4)))
    x[[9, 17, 22, 23, 39], [0, 1, 2, 2, 3]] = np.nan, np.inf, np.inf, -np.inf, np.nan
    do[[2, 30], [0, 1]] = np.nan, np.inf
    xs = tuple(jnp.asarray(np.moveaxis(y, 0, axis)) for y in (x, do))
    with np.errstate(invalid="ignore"):
        want = truth(*xs, **options)
    assert_close(pulled(implementation, **options)(*xs), want, terms=6)


# Laws


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_small_suffixes_survive_large_prefixes(rng: Rng, implementation: Any, axis: int) -> None:
    x, do = (jnp.abs(y) + 0.1 for y in arguments(rng, (96, 2)))
    x = x.at[:90].multiply(1e30)
    xs = tuple(jnp.moveaxis(y, 0, axis) for y in (x, do))
    out, _ = pulled(implementation, axis=axis, chunk_size=96, reverse=True)(*xs)
    want = sums(xs[0], axis=axis, chunk_size=96, reverse=True)
    assert_close(out, want, terms=96, scale=0.0)


def test_gradients_of_gradients(rng: Rng) -> None:
    x, weight = arguments(rng, (2, 20, 3))

    def twice(implementation: Any) -> Any:
        def once(x: jax.Array) -> jax.Array:
            fn = partial(pallas_ops.chunk_cumsum_decay, implementation=implementation)
            return jnp.sin(fn(x, chunk_size=6, shift="sequence", scale=0.5)).sum()

        return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(once)(x), weight)))(x)

    assert_close(twice(KERNEL), twice("xla"), terms=36)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
@pytest.mark.parametrize("bounds", [None, [0, 0]])
def test_an_axis_of_size_zero(shape: tuple[int, ...], bounds: Any) -> None:
    for axis in range(len(shape)):
        out = pallas_ops.chunk_cumsum_decay(jnp.zeros(shape), axis=axis, cu_seqlens=bounds)
        assert out.shape == shape
