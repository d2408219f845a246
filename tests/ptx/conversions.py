"""Moves, conversions, and what the hardware approximates."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array
from tests.ptx.program import Instruction


@instruction(r"mov\.(pred|[bu](16|32|64))|cvta\.to\.global\.u64")
def move(m: Machine, i: Instruction) -> None:
    m.write(i.operands[0], m.read(i.operands[1], i.type))


@instruction(r"cvt\.[su](16|32|64)\.[su](8|16|32|64)")
@instruction(r"cvt\.f32\.(bf16|f16)|cvt\.rn\.(bf16|f16)\.f32|cvt\.rn\.f(16|32)\.[su](16|32|64)")
@instruction(r"cvt\.bf16\.f16|cvt\.rn\.f16\.bf16")
def convert(m: Machine, i: Instruction) -> None:
    to, of = i.words[-2:]
    m.write(i.operands[0], m.read(i.operands[1], of).astype(TYPES[to]))


@instruction(r"cvt\.rn\.(bf16|f16)x2\.f32")
def convert_two(m: Machine, i: Instruction) -> None:
    to = TYPES[i.words[2][:-2]]
    high, low = (m.read(x, "f32").astype(to).view(np.uint16) for x in i.operands[1:])
    m.write(i.operands[0], high.astype(np.uint32) << np.uint32(16) | low)


@instruction(r"cvt\.s8\.s32")
def convert_to_byte(m: Machine, i: Instruction) -> None:
    """With its sign throughout the register, of 16 bits."""
    m.write(i.operands[0], m.read(i.operands[1], "s32").astype(np.int8).astype(np.int16))


@instruction(r"cvt\.rn\.f16x2\.e4m3x2")
def widen_two(m: Machine, i: Instruction) -> None:
    x = m.read(i.operands[1], "u16")
    low, high = (
        byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16)
        for byte in (x, x >> np.uint16(8))
    )
    m.write(i.operands[0], high.astype(np.uint32) << np.uint32(16) | low)


@instruction(r"cvt\.rna\.tf32\.f32")
def convert_to_tf32(m: Machine, i: Instruction) -> None:
    """To the nearest, away from zero if two are."""
    x = m.read(i.operands[1], "f32")
    half = np.where(np.isfinite(x), np.uint32(0x1000), np.uint32(0))
    m.write(i.operands[0], as_tf32((x.view(np.uint32) + half).view(np.float32)))


def as_tf32(x: Array) -> Array:
    """float32 with 10 bits behind the point, which the tensor cores see of it."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _flushed(i: Instruction, x: Array) -> Array:
    """With 0 in place of denormal numbers, if the instruction says so."""
    if "ftz" not in i.words:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _roughly(exact: Array, of: Array, relative: float, absolute: float = 0.0) -> Array:
    """As wrong as the hardware may be: by an error that is a function of an argument."""
    unit = (of.view(np.uint32) * np.uint32(2654435761) >> np.uint32(8)) / 2.0**23 - 1
    wrong = exact + unit * (relative * exact + absolute)
    known = ~np.isfinite(exact) | (exact == 0) | (exact == 1)
    return np.where(known, exact, wrong).astype(np.float32)


def _approximate(fn: Callable[[Any], Any], *errors: float) -> Any:
    def run(m: Machine, i: Instruction) -> None:
        x = _flushed(i, m.read(i.operands[1], "f32"))
        exact = np.asarray(fn(x.astype(np.float64)))
        m.write(i.operands[0], _flushed(i, _roughly(exact, x, *errors)))

    return run


# Half of an ulp comes from rounding the result; with it these are what NVIDIA states or less.
for _pattern, _run in {
    r"ex2\.approx\.(ftz\.)?f32": _approximate(np.exp2, 2.0**-23),
    r"lg2\.approx\.ftz\.f32": _approximate(np.log2, 2.0**-24, 2.0**-24),
    r"rcp\.approx\.ftz\.f32": _approximate(np.reciprocal, 2.0**-24.5),
    r"sin\.approx\.ftz\.f32": _approximate(np.sin, 0, 2.0**-20.9),
    r"cos\.approx\.ftz\.f32": _approximate(np.cos, 0, 2.0**-20.9),
}.items():
    instruction(_pattern)(_run)


@instruction(r"div\.full\.f32")
def divide(m: Machine, i: Instruction) -> None:
    """Exact by powers of two."""
    a, b = (m.read(x, "f32") for x in i.operands[1:])
    exact = a.astype(np.float64) / b
    fraction = np.abs(np.frexp(b)[0])
    value = np.where(fraction == 0.5, exact.astype(np.float32), _roughly(exact, b, 2.0**-23.5))
    m.write(i.operands[0], value)
