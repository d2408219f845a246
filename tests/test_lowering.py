"""Every kernel compiled for an H200: that it is accepted, and what it became. Nothing is run."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import TpaDecodeConfig
from tests import h200
from tests.ops import OPS, TPA_DECODE, TestedOp
from tests.support import case, in_turn

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def forward(op: TestedOp, xs: Any) -> h200.Program:
    return h200.compile_for_h200(op.fn, *xs)


def lowered_gradient(op: TestedOp, xs: Any) -> jax.stages.Lowered:
    """Both passes."""

    def both(weights: Any, xs: Any) -> Any:
        floating, integers = xs[: op.num_floating], xs[op.num_floating :]
        out, pull = jax.vjp(lambda *ys: op.fn(*ys, *integers), *floating)
        return out, pull(weights)

    return h200.lower_for_h200(both, jax.eval_shape(op.fn, *xs), xs)


def gradient(op: TestedOp, xs: Any) -> h200.Program:
    return h200.compile_lowered(lowered_gradient(op, xs))


def names(program: h200.Program) -> set[str]:
    """Our kernels, without the prefix."""
    found = (re.findall(r"\.entry pallas_ops_(\w+)", text) for text in program.ptx)
    return {name for text in found for name in text}


def ptx(program: h200.Program, name: str) -> str:
    (text,) = (text for text in program.ptx if f".entry pallas_ops_{name}(" in text)
    return text


def spills(program: h200.Program, name: str) -> int:
    (kernel,) = (k for k in program.kernels if k.name == f"pallas_ops_{name}")
    return kernel.spill_bytes


# Every op

EVERY_OP = [pytest.param(op, id=op.name) for op in OPS]


@pytest.mark.parametrize(("op", "dtype"), in_turn(EVERY_OP, [BF16, F32]))
def test_compiles_in_earnest(op: TestedOp, dtype: Any) -> None:
    """And needs next to no memory beside its operands and results."""
    xs = op.structs(dtype)
    programs = forward(op, xs), gradient(op, xs)
    expected = op.kernels, op.kernels + op.gradient_kernels
    for program, kernels in zip(programs, expected, strict=True):
        assert names(program) == set(kernels)
        assert program.memory.temp_size_in_bytes < program.memory.argument_size_in_bytes / 20
    assembled = {kernel.name.removeprefix("pallas_ops_") for kernel in programs[1].kernels}
    assert assembled >= set(expected[1])


# tpa_decode

RANKED = dataclasses.replace(
    TPA_DECODE,
    operands=("b n h r", "b m k h", "b m v h", "b n r d", "b m k d", "b m v e", "b"),
    large={**TPA_DECODE.large, "k": 2, "v": 3},
)
AWKWARD = dict(b=3, m=2047, h=17, r=31, d=127, e=65)


def decode(*operands: jax.Array, **kwargs: Any) -> Any:
    factors, lengths = operands[:6], operands[6] if len(operands) > 6 else None
    return pallas_ops.tpa_decode(*factors, lengths=lengths, **kwargs)


@pytest.mark.parametrize("num_operands", [6, 7], ids=["full", "lengths"])
@pytest.mark.parametrize(
    ("dtype", "product"), [(BF16, "bf16.bf16.f32"), (F32, "tf32.tf32.f32")], ids=["bf16", "f32"]
)
def test_streams_keys_through_the_tensor_cores_without_spills(
    dtype: Any, product: str, num_operands: int
) -> None:
    program = h200.compile_for_h200(decode, *TPA_DECODE.structs(dtype)[:num_operands])
    text = ptx(program, "tpa_decode")
    assert text.count("cp.async.cg.shared.global") > 8  # a pipeline: loads run ahead of use
    assert "cp.async.wait_group" in text
    assert re.search(rf"(wgmma|mma).*sync.*\.{product}", text)
    assert spills(program, "tpa_decode") == 0
    assert spills(program, "tpa_decode_merge") == 0


SHAPES = [
    *(case(dtype=dtype, **AWKWARD) for dtype in (BF16, F32)),
    *(case(dtype=dtype, d=512, e=512, falls_back=dtype != BF16) for dtype in (BF16, F32)),
    *(case(dtype=dtype, k=2, v=3) for dtype in (BF16, F32)),
    case(dtype=BF16, n=3),
    case(dtype=F32, **AWKWARD, n=3),
    case(dtype=BF16, h=128),
    case(dtype=F16, h=128, falls_back=True),
    case(dtype=BF16, r=64),
    case(dtype=F32, r=64, falls_back=True),
    case(dtype=BF16, b=1, m=1, h=1, r=1, d=1, e=1),
    case(dtype=F32, b=1, m=690, n=33, h=4, d=486, e=256, falls_back=True),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tpa_decode_backward runs as jax.numpy")
@pytest.mark.parametrize("settings", SHAPES)
def test_any_shape_compiles(settings: dict[str, Any]) -> None:
    """A gradient whose rows do not fit in shared memory at once is the reference's."""
    sizes = dict(settings)
    dtype, falls_back = sizes.pop("dtype"), sizes.pop("falls_back", False)
    op = RANKED if "k" in sizes else TPA_DECODE
    xs = op.structs(dtype, **sizes)
    lowered = lowered_gradient(op, xs)
    assert ("pallas_ops_tpa_decode_backward" in lowered.as_text()) != falls_back
    # XLA takes long over a reference, of which nothing is asked here.
    found = names(forward(op, xs) if falls_back else h200.compile_lowered(lowered))
    assert found - {"tpa_decode_merge", "tpa_decode_sum"} == {
        "tpa_decode",
        "tpa_decode_backward",
    } - ({"tpa_decode_backward"} if falls_back else set())


UNFACTORED = [
    case(), case(window=1000), case(batch_invariant=True), case(precision="default")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("options", "h"), in_turn(UNFACTORED, [22, 47]))
def test_queries_without_factors_compile(h: int, options: dict[str, Any]) -> None:
    """Of published sizes, forward and backward, with next to no spills."""
    shapes = (16, 1, h, 64), *((16, 4096, 2, h),) * 2, *((16, 4096, 2, 64),) * 2
    xs = tuple(jax.ShapeDtypeStruct(shape, BF16) for shape in shapes)

    def fn(aq: Any, ak: Any, av: Any, bk: Any, bv: Any) -> jax.Array:
        return pallas_ops.tpa_decode(aq, ak, av, None, bk, bv, **options)

    out = jax.eval_shape(fn, *xs)
    program = h200.compile_for_h200(lambda xs, do: jax.vjp(fn, *xs)[1](do), xs, out)
    for name in ("tpa_decode", "tpa_decode_backward"):
        assert spills(program, name) <= (640 if name == "tpa_decode_backward" else 0)


CONFIGS = [case(block_h=32), case(block_h=8, num_stages=1), case(block_h=16, num_splits=64)]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_variant_compiles(config: dict[str, int]) -> None:
    fn = partial(decode, config=TpaDecodeConfig(**config))
    program = h200.compile_for_h200(fn, *TPA_DECODE.structs(BF16)[:6])
    merged = {"tpa_decode_merge"} if "num_splits" in config else set()
    assert names(program) == {"tpa_decode"} | merged
    assert ("cp.async" in ptx(program, "tpa_decode")) == ("num_stages" not in config)


@pytest.mark.slow
def test_decode_offsets_beyond_two_to_the_31() -> None:
    """Between batch elements and, in a longer cache than the card can hold, within one."""
    xs = TPA_DECODE.structs(BF16, b=32, m=2**20 + 1)
    program = gradient(TPA_DECODE, xs)
    for name in ("tpa_decode", "tpa_decode_backward"):
        assert multiplies_widely(128 * (2**20 + 1), ptx(program, name))
    program = forward(TPA_DECODE, TPA_DECODE.structs(BF16, b=1, m=2**25 + 1))
    assert multiplies_widely(128 * 2, ptx(program, "tpa_decode"))


def multiplies_widely(stride: int, text: str) -> bool:
    """Whether an index is multiplied by the stride (of numbers or bytes) in 64 bits."""
    return re.search(rf"mul\.wide\.[su]32\s.*, {stride};", text) is not None


# lrpe_cosine

TURNED = [
    case(),
    case(act="silu"),
    case(act="softmax", axis=3),
    case(act="softmax", axis=1),
    case(layout="BHND"),
]


@pytest.mark.parametrize("options", TURNED)
def test_rows_move_in_vectors_without_spills(options: dict[str, Any]) -> None:
    """16 bytes at a time, and few enough registers for 8 programs of 4 warps; 4 that sum, too."""
    x = jax.ShapeDtypeStruct((12, 4096, 12, 128), BF16)
    theta = jax.ShapeDtypeStruct((12, 128), F32)

    def both(x: jax.Array, theta: jax.Array, dout: jax.Array) -> Any:
        run: Any = partial(pallas_ops.lrpe_cosine, **options)
        out, pull = jax.vjp(run, x, theta)
        return out, pull(dout), jax.vjp(lambda x: run(x, theta), x)[1](dout)

    dout = jax.ShapeDtypeStruct((12, 4096, 12, 256), BF16)
    if "layout" in options:
        x, dout = (jax.ShapeDtypeStruct((12, 12, 4096, y.shape[3]), BF16) for y in (x, dout))
    program = h200.compile_for_h200(both, x, theta, dout)
    ours = {k.name: k for k in program.kernels if "lrpe_cosine" in k.name}
    assert all(kernel.spill_bytes == 0 for kernel in ours.values())
    most = {"lrpe_cosine": 64, "lrpe_cosine_backward": 64, "lrpe_cosine_gradients": 128}
    for name, registers in most.items():
        text = ptx(program, name)
        assert "ld.global.v4.b32" in text
        assert "st.global.v4.b32" in text
        looped = re.search(r"^(\$\w+):(.*)\bbra\s+\1;", text, re.DOTALL | re.MULTILINE)
        repeated = looped[2] if looped else text
        assert not re.search(r"(ld|st)\.global(\.v2)?\.b(8|16|32) ", repeated)
        assert ours[f"pallas_ops_{name}"].registers <= registers


def test_turned_offsets_beyond_two_to_the_31() -> None:
    """Between batch elements, and within one."""
    theta = jax.ShapeDtypeStruct((1, 1), F32)
    for b, n, stride in ((12, 2**20 + 1, 2 * (2**20 + 1) * 256), (1, 2**25 + 1, 256)):
        x = jax.ShapeDtypeStruct((b, n, 2, 128), BF16)
        program = h200.compile_for_h200(pallas_ops.lrpe_cosine, x, theta)
        assert multiplies_widely(stride, ptx(program, "lrpe_cosine"))
