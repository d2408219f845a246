"""What chunk_cumsum_decay refuses, its launches, what they compile to, and shardings."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops import ChunkCumsumDecayConfig
from pallas_ops.core import card, implementations, launch
from pallas_ops.ops.chunk_cumsum_decay.config import Params, Plan, choose
from pallas_ops.ops.chunk_cumsum_decay.reference import edges_of
from pallas_ops.ops.chunk_cumsum_decay.tiles import Chunks
from pallas_ops.scan.view import Sizes, View
from tests import h200, shards
from tests.chunk_cumsum_decay import Rng, arguments, pulled, truth
from tests.support import assert_close, case, on_host, random_array

# Refusals

REFUSED = [
    (dict(x=jnp.zeros((2, 3), jnp.int32)), TypeError, "x.dtype is 'int32'; accepted: bfloat16"),
    (dict(x=jnp.zeros(3)), ValueError, r"axis is 1 and x.shape \(3,\); accepted: -x.ndim <= axis"),
    (dict(axis=1.0), TypeError, "axis is 1.0; accepted: an int"),
    (dict(chunk_size=0), ValueError, "chunk_size is 0; accepted: an int >= 1"),
    (dict(chunk_size=True), TypeError, "chunk_size is True; accepted: an int >= 1"),
    (dict(reverse=1), TypeError, "reverse is 1; accepted: True or False"),
    (dict(shift="left"), ValueError, "shift is 'left'; accepted: None, 'chunk', 'sequence'"),
    (
        dict(shift=np.array(["chunk", "chunk"])),
        ValueError,
        r"shift is an array <U5\[2\]; accepted: None",
    ),
    (dict(implementation=np.array(["xla", "xla"])), ValueError, "implementation is an array <U3"),
    (dict(x=jax.random.key(0)), TypeError, "x.dtype is 'key<fry>'; accepted: bfloat16"),
    (dict(cu_seqlens=jax.random.split(jax.random.key(0), 2)), TypeError, "dtype is 'key<fry>'"),
    (dict(scale=1e39), ValueError, r"scale is 1e\+39; accepted: None or a finite number"),
    (dict(scale="1"), TypeError, "scale is '1'; accepted: None, a real number"),
    (dict(scale=np.float32), TypeError, "scale is <class .*>; accepted: None, a real number"),
    (dict(scale=float("inf")), ValueError, "scale is inf; accepted: None or a finite number"),
    (dict(dtype="int8"), TypeError, "dtype is 'int8'; accepted: None, bfloat16"),
    (dict(dtype=jax.dtypes.prng_key), TypeError, "dtype is .*key.*; accepted: None, bfloat16"),
    (dict(dtype="half-ish"), TypeError, "dtype is .*half-ish.*; accepted: None, bfloat16"),
    (dict(cu_seqlens=jnp.zeros(2)), TypeError, "cu_seqlens.dtype is 'float32'; accepted: integers"),
    (dict(cu_seqlens=jnp.zeros((2, 2), int)), ValueError, r"cu_seqlens.shape is \(2, 2\)"),
    (dict(cu_seqlens=jnp.zeros(0, int)), ValueError, r"cu_seqlens.shape is \(0,\).*\(S \+ 1,\)"),
    (dict(chunk_size=jnp.ones(())), TypeError, r"chunk_size is an array float32\[\]; accepted"),
    (dict(x=None), TypeError, "x is None; accepted: an array"),
    (dict(dtype="float99"), TypeError, "dtype is 'float99'; accepted: None, bfloat16"),
    (dict(dtype=np.float16(1)), TypeError, r"dtype is '1\.0'; accepted: None, bfloat16"),
    (dict(scale=jax.ShapeDtypeStruct((), "float32")), TypeError, r"scale is .*\[\]; accepted: an"),
    (dict(cu_seqlens=[]), ValueError, r"cu_seqlens.shape is \(0,\); accepted: \(S \+ 1,\)"),
    (dict(implementation="cuda"), ValueError, "implementation is 'cuda'; accepted: None, 'triton'"),
    (
        dict(config=ChunkCumsumDecayConfig(block_n=8, num_segments=2), chunk_size=2),
        ValueError,
        "num_segments is 2; accepted: 1",
    ),
    (dict(config=3), TypeError, "config is 3; accepted: None or a ChunkCumsumDecayConfig"),
    (
        dict(config=ChunkCumsumDecayConfig(block_n=8), implementation="xla"),
        ValueError,
        "are both given",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals_say_what_would_be_accepted(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    fn = partial(pallas_ops.chunk_cumsum_decay, x=jnp.zeros((2, 3)))
    for equal in (dict(chunk_size=1), dict(axis=1), dict(reverse=True)):  # these are remembered
        jax.eval_shape(partial(fn, **equal))
    with pytest.raises(error, match=message):
        jax.eval_shape(partial(fn, **change))


def test_float64_runs_the_reference_and_is_refused_as_a_kernel(rng: Rng) -> None:
    with jax.enable_x64(True):
        xs = arguments(rng, (9, 2), jnp.float64)
        assert_close(pulled(axis=0, chunk_size=4)(*xs), truth(*xs, axis=0, chunk_size=4))
        for x, dtype in ((xs[0], None), (jnp.zeros((9, 2), jnp.float32), "float64")):
            with pytest.raises(ValueError, match="'triton', whose kernel does not take float64"):
                pallas_ops.chunk_cumsum_decay(x, dtype=dtype, implementation="triton")


@pytest.mark.parametrize("dtype", [float, "float64", jnp.float64])
def test_float64_is_float32_without_x64(rng: Rng, dtype: Any) -> None:
    xs = arguments(rng, (9, 2))
    options: dict[str, Any] = dict(axis=0, chunk_size=4)
    assert_close(pulled("interpret", dtype=dtype, **options)(*xs), truth(*xs, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_n=24), "block_n is 24; accepted: a power of two"),
        (dict(num_warps=0), "num_warps is 0; accepted: an int from 1 to 32"),
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
    s = Sizes(b=b, n=32768, c=c, size=chunk_size, count=-(-32768 // chunk_size), itemsize=2)
    config = choose(s, card.H200)
    elements = config.block_n * config.block_c * config.num_chunks
    assert elements <= 128 * 32 * config.num_warps
    programs = -(-c // config.block_c) * -(-b * s.count // config.num_chunks)
    assert config.num_chunks == 1 or programs >= 32 * 132


def test_few_programs_sum_a_chunk_in_segments() -> None:
    for b, n, c, count in ((1, 131072, 16, 1024), (1, 131072, 2048, 66), (8, 4096, 16, 32)):
        s = Sizes(b=b, n=n, c=c, size=n, count=1, itemsize=2)
        assert choose(s, card.H200).num_segments == count
        assert choose(dataclasses.replace(s, count=2), card.H200).num_segments == 1


def test_few_tall_chunks_are_one_tile_each() -> None:
    s = Sizes(b=1, n=4096, c=16, size=1000, count=4, itemsize=2)
    few, many = choose(s, card.H200), choose(dataclasses.replace(s, b=64), card.H200)
    assert (few.block_n, few.block_c) == (1024, 1)
    assert many.block_n < 1000 < many.block_n * 16


H200 = [
    case(shape=(1, 131072, 16), chunk_size=131072, reverse=True, shift="sequence"),
    case(shape=(2, 100001), chunk_size=100001, axis=1, shift="chunk"),
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
    case(shape=(999, 32768, 100), packed=True, chunk_size=2, dtype=jnp.float32),
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
    for shape, stride in (((33, 2**20, 128), 2**27), ((1, 2**26 + 1, 128), 128)):
        fn = pulled(None, chunk_size=100)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        texts = h200.compile_for_h200(fn, x, x).ptx
        assert len(texts) == 2
        assert all(re.search(rf"mul\.wide\.[su]32\s.*, {stride};", text) for text in texts)


def test_counts_to_two_to_the_31() -> None:
    """A chunk that would end beyond it ends with the axis."""
    n, chunk_size = implementations.LONGEST, 2**30
    s = Sizes(b=1, n=n, c=1, size=chunk_size, count=2, itemsize=2)
    view = View(s=s, reverse=False, block_n=128, block_c=1, num_ranges=2, num_steps=1)
    config = ChunkCumsumDecayConfig(block_n=128, num_chunks=2)
    params = Params(axis=1, chunk_size=chunk_size, dtypes=("float32", "float32"))
    plan = Plan(view=view, c=config, params=params)

    def kernel(stop_ref: Any) -> None:
        stop_ref[...] = Chunks(plan, None).stop.reshape(2)

    stops = jax.ShapeDtypeStruct((2,), jnp.int32)
    with launch.interpreted(True):
        (stop,) = launch.launch(
            kernel,
            name="stops",
            grid=view.grid,
            out_shape=[stops],
            num_warps=1,
        )
    assert stop.tolist() == [chunk_size, n]


@pytest.mark.filterwarnings("ignore:.* runs as jax.numpy. 4294967296 rows")
def test_more_rows_than_it_counts_run_the_reference() -> None:
    fn = jax.vmap(partial(pallas_ops.chunk_cumsum_decay, axis=-1))
    for rows, is_kernel in ((2**14, True), (2**16, False)):
        x = jax.ShapeDtypeStruct((2**16, rows, 3), jnp.bfloat16)
        text = h200.lower_for_cuda(fn, x).as_text()
        assert ("pallas_ops_chunk_cumsum_decay" in text) == is_kernel


@pytest.mark.parametrize("reverse", [False, True])
def test_a_shift_where_only_the_result_is_sharded(rng: Rng, reverse: bool) -> None:
    """As `jax.numpy`, which XLA partitions by itself, and as an export of one device."""
    x, mesh = on_host(random_array(rng, (1, 16, 1))), shards.line(2)
    fn: Any = partial(
        pallas_ops.chunk_cumsum_decay, chunk_size=4, shift="sequence", reverse=reverse
    )
    exported = jax.export.export(jax.jit(fn), platforms=["cpu"])(x)
    (placed,) = shards.placed(mesh, (x,), (P(),))
    for run in (partial(fn, implementation="xla"), exported.call):
        got = jax.jit(run, out_shardings=NamedSharding(mesh, P(None, "x")))(placed)
        assert_close(got, fn(x), terms=4)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64, np.uint64])
def test_bounds_are_clipped_in_their_own_dtype(dtype: Any) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    with jax.enable_x64(True):
        edges = edges_of(jnp.asarray(np.array([least, 3, most], dtype)), 200)
    np.testing.assert_array_equal(edges, [0, 0, 3, min(most, 200), 200])


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_every_device_takes_all_bounds(rng: Rng, implementation: Any) -> None:
    mesh = shards.line(4, AxisType.Explicit)
    x, bounds = on_host((random_array(rng, (2, 16, 8)), np.array([0, 3, 9, 14], np.int32)))
    fn: Any = partial(pallas_ops.chunk_cumsum_decay, chunk_size=5, implementation=implementation)
    with jax.set_mesh(mesh):
        placed = shards.placed(mesh, (x, bounds), (P(None, None, "x"), P("x")))
        got = fn(placed[0], cu_seqlens=placed[1])
    assert_close(got, fn(x, cu_seqlens=bounds), terms=16)
