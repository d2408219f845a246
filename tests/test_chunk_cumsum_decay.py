"""chunk_cumsum_decay: reference and kernels against a loop, laws, refusals, config."""

import functools
import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import pallas_ops
from pallas_ops import ChunkCumsumDecayConfig
from pallas_ops.ops.chunk_cumsum_decay.config import Sizes, choose
from tests import h200
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    kernel_implementation,
    random_array,
)

KERNEL = kernel_implementation()
Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]
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


def sums(
    x: Any,
    *,
    axis: int = 1,
    chunk_size: int = 128,
    reverse: bool = False,
    shift: str | None = None,
    bounds: Sequence[int] | None = None,
    transposed: bool = False,
) -> Float64:
    """The definition, in float64, as a matrix; transposed, from cotangents to gradients."""
    y = np.moveaxis(np.asarray(x).astype(np.float64), axis, 0)
    matrix = np.zeros((len(y), len(y)), bool)
    for low, high in itertools.pairwise([0, len(y)] if bounds is None else bounds):
        for start in range(low, high, chunk_size):
            stop = min(start + chunk_size, high)
            first, last = (start, stop) if shift == "chunk" else (low, high)
            for i in range(start, stop):
                for j in range(i, stop) if reverse else range(start, i + 1):
                    source = j + (1 if reverse else -1) * (shift is not None)
                    if first <= source < last:
                        matrix[i, source] = True
    rows = matrix.T if transposed else matrix
    return np.moveaxis(np.stack([y[row].sum(axis=0) for row in rows]), 0, axis)


@functools.cache
def pulled(implementation: Any = None, **kwargs: Any) -> Any:
    """Of x, cotangent and bounds: output and gradient, compiled."""

    def call(x: jax.Array, do: jax.Array, bounds: jax.Array | None = None) -> Any:
        fn = partial(pallas_ops.chunk_cumsum_decay, implementation=implementation, **kwargs)
        out, pull = jax.vjp(partial(fn, cu_seqlens=bounds), x)
        return out, *pull(do)

    return jax.jit(call)


def truth(x: Any, do: Any, **kwargs: Any) -> tuple[Float64, Float64]:
    return sums(x, **kwargs), sums(do, transposed=True, **kwargs)


def arguments(rng: Rng, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return random_array(rng, shape, dtype), random_array(rng, shape, dtype)


# Reference


@every_mode
@pytest.mark.parametrize("case", SHAPES)
def test_reference_is_the_loop(rng: Rng, case: dict[str, Any], mode: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"} | mode
    xs = arguments(rng, case["shape"])
    assert_close(pulled("xla", **options)(*xs), truth(*xs, **options), terms=case["chunk_size"])


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
    want = pallas_ops.chunk_cumsum_decay(x, implementation="xla", **options)
    assert_close(pallas_ops.reference.chunk_cumsum_decay(x, **options), want)


# Forward and gradient


@every_mode
@pytest.mark.parametrize("case", SHAPES)
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


@pytest.mark.parametrize("mode", MODES[2:4] + MODES[5:])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_the_loop(rng: Rng, config: dict[str, Any], mode: dict[str, Any]) -> None:
    axis = config["axis"]
    options: dict[str, Any] = dict(axis=axis, chunk_size=19, **mode)
    chosen = ChunkCumsumDecayConfig(**{k: v for k, v in config.items() if k != "axis"})
    xs = arguments(rng, (45, 3) if axis == 0 else (3, 45))
    got = pulled(KERNEL, config=chosen, **options)(*xs)
    assert_as_good_as_reference(got, pulled("xla", **options)(*xs), truth(*xs, **options))


PACKED = [[0, 13, 13, 14, 40], [5, 9, 20, 30, 33], [0, 0, 0, 0, 0], [40, 40, 40, 40, 40]]


@every_mode
@pytest.mark.parametrize("axis", [0, 1])
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


# Refusals

REFUSED = [
    (dict(x=jnp.zeros((2, 3), jnp.int32)), TypeError, "x.dtype is 'int32'; accepted: bfloat16"),
    (dict(x=jnp.zeros(3)), ValueError, r"axis is 1 and x.shape \(3,\); accepted: -x.ndim <= axis"),
    (dict(axis=1.0), TypeError, "axis is 1.0; accepted: an int"),
    (dict(chunk_size=0), ValueError, "chunk_size is 0; accepted: an int >= 1"),
    (dict(chunk_size=True), ValueError, "chunk_size is True; accepted: an int >= 1"),
    (dict(reverse=1), TypeError, "reverse is 1; accepted: True or False"),
    (dict(shift="left"), ValueError, "shift is 'left'; accepted: None, 'chunk', 'sequence'"),
    (dict(scale="1"), TypeError, "scale is '1'; accepted: a Python or NumPy real number"),
    (dict(scale=float("inf")), ValueError, "scale is inf; accepted: None or a finite number"),
    (dict(dtype="int8"), TypeError, "dtype is 'int8'; accepted: None, bfloat16"),
    (dict(dtype="half-ish"), TypeError, "dtype is .*half-ish.*; accepted: None, bfloat16"),
    (dict(cu_seqlens=jnp.zeros(2)), TypeError, "cu_seqlens.dtype is 'float32'; accepted: integers"),
    (dict(cu_seqlens=jnp.zeros((2, 2), int)), ValueError, r"cu_seqlens.shape is \(2, 2\)"),
    (dict(cu_seqlens=jnp.zeros(0, int)), ValueError, r"cu_seqlens.shape is \(0,\).*\(S \+ 1,\)"),
    (dict(chunk_size=jnp.ones(())), ValueError, r"chunk_size is Array.*; accepted: an int >= 1"),
    (dict(implementation="cuda"), ValueError, "implementation is 'cuda'; accepted: None, 'triton'"),
    (dict(config=3), TypeError, "config is 3; accepted: None or a ChunkCumsumDecayConfig"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals_say_what_would_be_accepted(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: pallas_ops.chunk_cumsum_decay(**({"x": jnp.zeros((2, 3))} | change)))


def test_a_traced_scale_is_refused() -> None:
    with pytest.raises(TypeError, match=r"scale is .*to scale by a traced value"):
        jax.eval_shape(lambda x: pallas_ops.chunk_cumsum_decay(x, scale=x[0, 0]), jnp.zeros((2, 3)))


def test_float64_runs_the_reference_and_is_refused_as_a_kernel(rng: Rng) -> None:
    with jax.enable_x64(True):
        xs = arguments(rng, (9, 2), jnp.float64)
        assert_close(pulled(axis=0, chunk_size=4)(*xs), truth(*xs, axis=0, chunk_size=4))
        for x, dtype in ((xs[0], None), (jnp.zeros((9, 2), jnp.float32), "float64")):
            with pytest.raises(ValueError, match="'triton', whose kernel does not take float64"):
                pallas_ops.chunk_cumsum_decay(x, dtype=dtype, implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_n=24), "block_n is 24; accepted: a power of two"),
        (dict(num_warps=0), "num_warps is 0; accepted: an int >= 1"),
        (dict(num_steps=8), "num_steps is 8; accepted: at most block_n, 4"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkCumsumDecayConfig(**({"block_n": 4} | change))


# Config


@pytest.mark.parametrize("c", [1, 2, 64, 2048, 10**6])
@pytest.mark.parametrize("chunk_size", [1, 3, 100, 128, 5000])
@pytest.mark.parametrize("b", [1, 16])
def test_choice_fills_lanes_and_card(b: int, chunk_size: int, c: int) -> None:
    s = Sizes(b=b, n=32768, c=c, chunks=-(-32768 // chunk_size), chunk_size=chunk_size, itemsize=2)
    config = choose(s)
    elements = config.block_n * config.block_c * config.num_chunks
    assert elements <= 128 * 32 * config.num_warps
    programs = -(-c // config.block_c) * -(-b * s.chunks // config.num_chunks)
    assert config.num_chunks == 1 or programs >= 32 * 132


H200 = [
    case(shape=(16, 32768, 2048)),
    case(shape=(16, 32768, 2048), dtype=jnp.float32),
    case(shape=(16, 32768, 2048), reverse=True, shift="sequence"),
    case(shape=(16, 32768, 16)),
    case(shape=(4, 1024, 16), reverse=True),
    case(shape=(16, 32768, 2048), chunk_size=1000),
    case(shape=(2048, 32768), chunk_size=128, reverse=True),
    case(shape=(2048, 32768), chunk_size=3),
    case(shape=(999, 1001), axis=0, chunk_size=100, shift="chunk"),
    case(shape=(16, 32768, 2048), packed=True, shift="sequence"),
]


@pytest.mark.parametrize("case", H200)
def test_compiles_for_h200_without_copies(case: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k not in ("shape", "packed")}
    x = jax.ShapeDtypeStruct(case["shape"], jnp.bfloat16)
    do = jax.ShapeDtypeStruct(case["shape"], options.get("dtype", jnp.bfloat16))
    bounds = [jax.ShapeDtypeStruct((65,), jnp.int32)] * ("packed" in case)
    fn = partial(pulled, implementation=None, **options)()
    program = h200.compile_for_h200(fn, x, do, *bounds)
    ours = [kernel for kernel in program.kernels if kernel.name.startswith("pallas_ops")]
    assert len(ours) == 2
    assert all(kernel.spill_bytes <= 32 for kernel in ours)
    assert program.memory.temp_size_in_bytes < 2**20


def test_offsets_beyond_two_to_the_31() -> None:
    """Between rows, and within one that is longer than the card can hold."""
    for shape, stride in (((33, 2**20, 128), 2**27), ((1, 2**26 + 1, 128), 2 * 128)):
        fn = pulled(None, chunk_size=100)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        texts = h200.compile_for_h200(fn, x, x).ptx
        assert len(texts) == 2
        assert all(re.search(rf"mul\.wide\.[su]32\s.*, {stride};", text) for text in texts)
