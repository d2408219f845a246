"""Launches fit every card that we support, and who has none of them is told.

`pytest -m cards` compiles every case for every card; without the marker a sample is compiled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from tests import h200
from tests.ops import TestedOp, every_op

Struct = jax.ShapeDtypeStruct
CARDS = ("A100", "A10", "L4", "H200", "B200", "RTX PRO 6000")  # sm_80, 86, 89, 90, 100, 120
NONE = "accepted: implementation=None or 'xla', which run jax.numpy"


def array(*shape: int, dtype: Any = "bfloat16") -> Struct:
    return Struct(shape, jnp.dtype(dtype))


def factors(
    b: int, m: int, h: int, r: int, d: int, *, n: int = 1, ranks: int = 1, **dtype: Any
) -> tuple[Struct, ...]:
    """Those of tpa_decode."""
    a, c = array(b, m, ranks, h, **dtype), array(b, m, ranks, d, **dtype)
    return array(b, n, h, r, **dtype), a, a, array(b, n, r, d, **dtype), c, c


def paged(*xs: Any) -> jax.Array:
    return pallas_ops.tpa_decode(*xs[:6], lengths=xs[6], page_table=xs[7])


def in_pages(size: int, aq: Struct, *xs: Struct, dtype: Any) -> tuple[Struct, ...]:
    """The same in a pool, with features of a dtype, lengths and a page table."""
    b, m = xs[0].shape[:2]

    def pool(x: Struct, dtype: Any = "bfloat16") -> Struct:
        return array(b * m // size, size, *x.shape[2:], dtype=dtype)

    ak, av, bq, bk, bv = xs
    cache = pool(ak), pool(av), bq, pool(bk, dtype), pool(bv, dtype)
    return aq, *cache, array(b, dtype="int32"), array(b, m // size, dtype="int32")


rows, columns = (partial(pallas_ops.logcumsumexp, axis=axis) for axis in (-1, 1))
chunks = partial(pallas_ops.chunk_cumsum_decay, chunk_size=128)
rotated = pallas_ops.lrpe_cosine
# The largest rows of the benchmarks, and awkward sizes; whether kernels spill on an H200 as well.
CASES: dict[str, tuple[Callable[..., Any], tuple[Struct, ...], bool]] = {
    "decode": (pallas_ops.tpa_decode, factors(32, 32768, 32, 16, 128), False),
    "decode T6": (pallas_ops.tpa_decode, factors(16, 16384, 47, 6, 64, ranks=2), True),
    "decode T6, two tiles": (pallas_ops.tpa_decode, factors(16, 4096, 78, 6, 64, ranks=2), True),
    "decode wide": (pallas_ops.tpa_decode, factors(2, 4096, 78, 31, 256), True),
    "decode f32": (pallas_ops.tpa_decode, factors(2, 512, 32, 16, 256, dtype="float32"), True),
    "decode f16": (
        pallas_ops.tpa_decode,
        factors(2, 100, 9, 5, 40, n=3, ranks=2, dtype="float16"),
        True,
    ),
    "decode pages": (
        paged,
        in_pages(64, *factors(32, 32768, 32, 16, 128), dtype="bfloat16"),
        False,
    ),
    "decode int8": (
        paged,
        in_pages(256, *factors(32, 32768, 32, 16, 128), dtype="int8"),
        False,
    ),
    "columns": (columns, (array(12, 32768, 2048),), False),
    "few columns": (columns, (array(1, 131072, 64),), False),
    "columns f32": (columns, (array(3, 1000, 2047, dtype="float32"),), False),
    "rows": (rows, (array(12 * 2048, 32768),), False),
    "rows f16": (partial(rows, reverse=True), (array(999, 2047, dtype="float16"),), False),
    "chunks": (chunks, (array(16, 32768, 2048),), False),
    "chunks of rows": (partial(chunks, reverse=True), (array(99, 4095, dtype="float32"),), False),
    "one chunk": (partial(chunks, chunk_size=2**20), (array(1, 2**20, 16),), False),
    "rotated": (rotated, (array(12, 32768, 12, 128), array(12, 128, dtype="float32")), False),
    "softmax over tokens": (
        partial(rotated, act="softmax", axis=1),
        (array(12, 32768, 12, 128), array(12, 128, dtype="float32")),
        False,
    ),
    "softmax over features": (
        partial(rotated, act="softmax", axis=3),
        (array(2, 1000, 3, 2047, dtype="float32"), array(3, 2047, dtype="float32")),
        False,
    ),
}
SAMPLE = {
    ("A100", "decode"),
    ("A10", "chunks of rows"),
    ("H200", "decode pages"),
    ("A100", "decode int8"),
    ("L4", "decode T6"),
    ("L4", "softmax over features"),
    ("B200", "few columns"),
    ("RTX PRO 6000", "rows f16"),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if (name, case) in SAMPLE else pytest.mark.cards)
        for name in CARDS
        for case in CASES
    ],
)
@pytest.mark.filterwarnings("ignore:tpa_decode.* runs as jax.numpy")
def test_forward_and_gradient_compile(name: str, case: str) -> None:
    """Without a refusal of shared memory, and without spills (a few bytes are none).

    Cards whose products (`mma`) take both sides from registers spill in tpa_decode's gradient.
    """
    fn, xs, spills = CASES[case]
    spills |= case == "decode" and name not in ("H200", "B200")
    with h200.instead(f"NVIDIA {name}") as gpu:
        program = compiled(fn, xs)
    assert all(f".target sm_{gpu.capability}" in text for text in program.ptx)
    ours = [kernel for kernel in program.kernels if kernel.name.startswith("pallas_ops")]
    assert spills or (ours and max(kernel.spill_bytes for kernel in ours) <= 64)


def compiled(fn: Callable[..., Any], xs: Any) -> h200.Program:
    """Both passes; of tpa_decode the forward pass alone where no kernel has the gradient."""
    lowered = h200.lower_for_h200(h200.with_gradient(fn), *xs)
    text = lowered.as_text()
    if "pallas_ops_tpa_decode" in text and "pallas_ops_tpa_decode_backward" not in text:
        lowered = h200.lower_for_h200(fn, *xs)
    return h200.compile_lowered(lowered)


SM_100 = [
    factors(1, 256, 47, 6, 64, n=2, ranks=2, dtype="float16"),
    factors(1, 256, 78, 6, 64, ranks=2, dtype="float16"),
    factors(4, 40, 64, 1, 128, ranks=4, dtype="float16"),
    factors(16, 40, 24, 2, 96, n=3, ranks=2),
    factors(1, 512, 96, 8, 128, n=2, ranks=3),
    factors(7, 33, 3, 8, 256, n=5, ranks=2, dtype="float16"),
    factors(1, 100, 47, 64, 128, dtype="float16"),
]


@pytest.mark.parametrize("xs", SM_100)
@pytest.mark.filterwarnings("ignore:tpa_decode.* runs as jax.numpy")
def test_tiles_fit_in_the_memories_of_sm_100(xs: tuple[Struct, ...]) -> None:
    """Its tensor cores keep results in a memory of their own, and operands in shared memory."""
    with h200.instead("NVIDIA B200"):
        assert compiled(pallas_ops.tpa_decode, xs).ptx


def unfactored(aq: Any, ak: Any, av: Any, bk: Any, bv: Any) -> jax.Array:
    return pallas_ops.tpa_decode(aq, ak, av, None, bk, bv)


@pytest.mark.filterwarnings("ignore:tpa_decode_backward runs as jax.numpy")
def test_ranks_fit_in_shared_memory() -> None:
    """A gradient of three ranks without bq, and a q that is formed of four queries of 64 ranks."""
    _, ak, av, _, bk, bv = factors(2, 500, 8, 1, 128, ranks=3, dtype="float16")
    with h200.instead("NVIDIA L4"):
        aq = array(2, 5, 8, 128, dtype="float16")
        assert compiled(unfactored, (aq, ak, av, bk, bv)).ptx
    xs = factors(5, 3, 3, 128, 128, n=17, ranks=2, dtype="float16")
    fn = partial(pallas_ops.tpa_decode, precision="default")
    assert h200.compile_for_h200(fn, *xs).ptx


NEAR_THE_LIMIT = {  # N, H, R (0: without bq), ranks, D, E
    "keys kept for wgmma": (2, 18, 0, 2, 128, 128, "bfloat16"),
    "scores between eight warps": (1, 128, 0, 2, 256, 256, "bfloat16"),
    "64 entries of three ranks": (1, 34, 6, 3, 128, 128, "float16"),
    "gradient of q after the loop": (1, 97, 6, 1, 256, 2, "float16"),
}


@pytest.mark.parametrize("case", NEAR_THE_LIMIT)
@pytest.mark.filterwarnings("ignore:tpa_decode_backward runs as jax.numpy")
def test_bounds_of_shared_memory_hold(case: str) -> None:
    n, h, r, ranks, d, e, dtype = NEAR_THE_LIMIT[case]
    aq, ak, av, bq, bk, _ = factors(4, 4096, h, r or d, d, n=n, ranks=ranks, dtype=dtype)
    fn, xs = (pallas_ops.tpa_decode, [bq, bk]) if r else (unfactored, [bk])
    bv = array(4, 4096, ranks, e, dtype=dtype)
    assert compiled(fn, (aq, ak, av, *xs, bv)).ptx


def test_float8_takes_a_card_that_has_it() -> None:
    aq, ak, av, bq, bk, bv = factors(2, 64, 32, 16, 64)
    xs = aq, ak, av, bq, *(array(*x.shape, dtype="float8_e4m3fn") for x in (bk, bv))
    with h200.instead("NVIDIA A100"):
        with pytest.warns(UserWarning, match="no kernel for float8_e4m3fn of .* on NVIDIA A100"):
            h200.compile_for_h200(pallas_ops.tpa_decode, *xs)
        with pytest.raises(ValueError, match=f"no kernel for float8_e4m3fn .*{NONE}"):
            h200.lower_for_h200(partial(pallas_ops.tpa_decode, implementation="triton"), *xs)


def test_odd_features_of_eight_bits_have_no_kernel() -> None:
    aq, ak, av, bq, bk, bv = factors(2, 64, 32, 16, 63)
    xs = aq, ak, av, bq, *(array(*x.shape, dtype="int8") for x in (bk, bv))
    with pytest.warns(UserWarning, match="no kernel for int8 of D=63, E=63 on NVIDIA H200"):
        h200.compile_for_h200(pallas_ops.tpa_decode, *xs)


def assert_runs_as_jax_numpy(fn: Callable[..., Any], xs: Any, kind: str, told: str) -> None:
    """With a warning; an error where the kernel is asked for."""
    with h200.instead(kind):
        with pytest.warns(UserWarning, match=f"runs as jax.numpy: {told}"):
            lowered = h200.lower_for_h200(fn, *xs)
        assert "pallas_ops" not in lowered.as_text()
        with pytest.raises(ValueError, match=f"{told}.*{NONE}"):
            h200.lower_for_h200(partial(fn, implementation="triton"), *xs)


def test_what_no_card_fits_runs_as_jax_numpy() -> None:
    xs = factors(2, 64, 32, 16, 256, dtype="float32")
    told = "tpa_decode has no kernel for float32 of H=32, R=16, Rk=1, Rv=1, D=256, E=256 on NVIDIA "
    assert_runs_as_jax_numpy(pallas_ops.tpa_decode, xs, "NVIDIA L4", f"{told}L4.* 101376 bytes")


def test_a_gradient_that_does_not_fit_runs_as_jax_numpy() -> None:
    xs = factors(2, 64, 300, 1, 16)
    told = "tpa_decode_backward has no kernel for bfloat16 of H=300"
    with pytest.warns(UserWarning, match=f"tpa_decode_backward runs as jax.numpy: {told}"):
        program = h200.compile_for_h200(h200.with_gradient(pallas_ops.tpa_decode), *xs)
    assert "pallas_ops_tpa_decode" in [kernel.name for kernel in program.kernels]
    strict = h200.with_gradient(partial(pallas_ops.tpa_decode, implementation="triton"))
    with pytest.raises(ValueError, match=f"{told}.*{NONE}"):
        h200.lower_for_h200(strict, *xs)


@every_op
def test_cards_before_ampere_run_jax_numpy(op: TestedOp) -> None:
    told = "NVIDIA T4 has compute capability 7.5, and the kernels need 8.0"
    assert_runs_as_jax_numpy(op.fn, op.structs(jnp.float32), "NVIDIA T4", told)


def test_thor_runs_jax_numpy() -> None:
    """XLA takes it for an sm_103, and ends the process if it has to compile matrix products."""
    with (
        h200.instead("NVIDIA Thor"),
        pytest.warns(UserWarning, match="NVIDIA Thor has compute capability 11.0, .* not 11.0"),
    ):
        lowered = h200.lower_for_h200(pallas_ops.tpa_decode, *factors(2, 64, 32, 16, 64))
    assert "pallas_ops_tpa_decode" not in lowered.as_text()
