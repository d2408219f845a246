"""Moves, conversions, and what the hardware approximates."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.arithmetic import flushed
from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction

_ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("mov", "cvta")
def move(m: Machine, i: Instruction) -> None:
    m.write(i.operands[0], m.read(i.operands[1], i.type))


@instruction("cvt")
def convert(m: Machine, i: Instruction) -> None:
    to, of = i.words[-2:]
    if to in ("bf16x2", "f16x2"):
        high, low = (_bits16(m.read(x, of).astype(TYPES[to[:-2]])) for x in i.operands[1:])
        return m.write(i.operands[0], high << np.uint32(16) | low)
    x = m.read(i.operands[1], of)
    if to == "tf32":
        return m.write(i.operands[0], as_tf32(x, nearest=i.words[1] == "rna"))
    if i.words[1] in _ROUNDED:
        x = _ROUNDED[i.words[1]](x)
        if TYPES[to] is not np.float32:
            info = np.iinfo(TYPES[to])
            x = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), info.min, info.max))
    return m.write(i.operands[0], x.astype(TYPES[to]))


def _bits16(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)


def as_tf32(x: Array, *, nearest: bool = False) -> Array:
    """float32 with 10 bits behind the point, which the tensor cores see of it."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    half = np.where(np.isfinite(x), np.uint32(0x1000), np.uint32(0)) if nearest else np.uint32(0)
    return np.asarray(bits + half & np.uint32(0xFFFFE000))


def _approximate(fn: Callable[[Any], Any], relative: float, absolute: float = 0.0) -> Any:
    """`fn`, as wrong as the hardware may be: by an error that is a function of its argument."""

    def run(m: Machine, i: Instruction) -> None:
        x = np.ascontiguousarray(flushed(i, m.read(i.operands[1], "f32")))
        exact = np.asarray(fn(x.astype(np.float64)))
        scrambled = x.view(np.uint32) * np.uint32(2654435761) >> np.uint32(8)
        unit = scrambled / 2.0**23 - 1
        wrong = exact + unit * (relative * exact + absolute)
        known = ~np.isfinite(exact) | (exact == 0) | (exact == 1)
        m.write(i.operands[0], flushed(i, np.where(known, exact, wrong).astype(np.float32)))

    return run


# Half of an ulp comes from rounding the result; with it these are what NVIDIA states or less.
for _name, _run in {
    "ex2": _approximate(np.exp2, 2.0**-23),
    "lg2": _approximate(np.log2, 2.0**-24, 2.0**-24),
    "rcp": _approximate(np.reciprocal, 2.0**-24.5),
    "rsqrt": _approximate(lambda x: 1 / np.sqrt(x), 2.0**-23),
    "sin": _approximate(np.sin, 0, 2.0**-20.9),
    "cos": _approximate(np.cos, 0, 2.0**-20.9),
}.items():
    instruction(_name)(_run)


@instruction("sqrt")
def square_root(m: Machine, i: Instruction) -> None:
    if i.words[1] != "rn":
        raise MachineError(f"no such root here: {i.opcode}")
    m.write(i.operands[0], np.sqrt(m.read(i.operands[1], i.type)))
