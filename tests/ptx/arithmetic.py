"""Arithmetic, logic and comparisons of numbers, thread by thread."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction

_WIDER: dict[str, Any] = {"16": "32", "32": "64"}
_FLOATING = ("f16", "bf16", "f32", "f64")


def flushed(i: Instruction, x: Array) -> Array:
    """With 0 in place of denormal numbers, if the instruction says so."""
    if "ftz" not in i.words or x.dtype != np.float32:
        return x
    small = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), x), x)


def _elementwise(fn: Callable[..., Any]) -> Callable[[Machine, Instruction], None]:
    """All operands and the result are of the one type."""

    def run(m: Machine, i: Instruction) -> None:
        operands = (flushed(i, m.read(x, i.type)) for x in i.operands[1:])
        m.write(i.operands[0], flushed(i, np.asarray(fn(*operands)).astype(TYPES[i.type])))

    return run


for _name, _fn in {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}.items():
    instruction(_name)(_elementwise(_fn))


@instruction("min", "max")
def extreme(m: Machine, i: Instruction) -> None:
    """Of NaN and a number the number, unless told otherwise."""
    least = i.words[0] == "min"
    if i.type in _FLOATING and "NaN" not in i.words:
        return _elementwise(np.fmin if least else np.fmax)(m, i)
    return _elementwise(np.minimum if least else np.maximum)(m, i)


@instruction("mul", "mad")
def multiply(m: Machine, i: Instruction) -> None:
    """The product, or of integers one of its halves or both, and perhaps a sum."""
    a, b = (m.read(x, i.type) for x in i.operands[1:3])
    kind = i.type
    if "wide" in i.words or "hi" in i.words:
        kind = i.type[0] + _WIDER[i.type[1:]]
        a, b = a.astype(TYPES[kind]), b.astype(TYPES[kind])
    product = flushed(i, flushed(i, a) * flushed(i, b))
    if "hi" in i.words:
        product, kind = (product >> (8 * product.itemsize // 2)).astype(TYPES[i.type]), i.type
    if i.words[0] == "mad":
        product = product + m.read(i.operands[3], kind)
    m.write(i.operands[0], product)


@instruction("fma")
def multiply_add(m: Machine, i: Instruction) -> None:
    """Rounded once (all but: the sum has 64 bits before)."""
    a, b, c = (flushed(i, m.read(x, i.type)).astype(np.longdouble) for x in i.operands[1:])
    m.write(i.operands[0], flushed(i, (a * b + c).astype(TYPES[i.type])))


@instruction("rem")
def remainder(m: Machine, i: Instruction) -> None:
    a, b = (m.read(x, i.type) for x in i.operands[1:])
    m.write(i.operands[0], np.fmod(a, np.where(b == 0, 1, b)).astype(TYPES[i.type]))


@instruction("div")
def divide(m: Machine, i: Instruction) -> None:
    a, b = (m.read(x, i.type) for x in i.operands[1:])
    if i.type in _FLOATING:
        return m.write(i.operands[0], (a.astype(np.float64) / b).astype(TYPES[i.type]))
    b = np.where(b == 0, 1, b)
    return m.write(i.operands[0], ((a - np.fmod(a, b)) // b).astype(TYPES[i.type]))


@instruction("shl", "shr")
def shift(m: Machine, i: Instruction) -> None:
    x, by = m.read(i.operands[1], i.type), m.read(i.operands[2], "u32")
    bits = 8 * x.itemsize
    move = operator.lshift if i.words[0] == "shl" else operator.rshift
    moved = move(x, np.minimum(by, bits - 1).astype(x.dtype))
    if i.words[0] == "shl" or x.dtype.kind == "u":
        moved = np.where(by < bits, moved, 0)
    m.write(i.operands[0], moved.astype(x.dtype))


@instruction("shf")
def funnel_shift(m: Machine, i: Instruction) -> None:
    low, high, by = (m.read(x, "u32").astype(np.uint64) for x in i.operands[1:])
    by = by % np.uint64(32) if "wrap" in i.words else np.minimum(by, np.uint64(32))
    pair = high << np.uint64(32) | low
    moved = pair >> by if "r" in i.words else (pair << by) >> np.uint64(32)
    m.write(i.operands[0], moved.astype(np.uint32))


@instruction("bfe")
def extract_bits(m: Machine, i: Instruction) -> None:
    start, length = int(i.operands[2]), int(i.operands[3])
    wide = m.read(i.operands[1], i.type).astype(TYPES[i.type[0] + "64"])
    kept = wide << (64 - start - length) >> (64 - length)
    m.write(i.operands[0], kept.astype(TYPES[i.type]))


@instruction("bfi")
def insert_bits(m: Machine, i: Instruction) -> None:
    x, into = m.read(i.operands[1], "u32"), m.read(i.operands[2], "u32")
    start, length = int(i.operands[3]), int(i.operands[4])
    field = np.uint32((1 << length) - 1 << start)
    m.write(i.operands[0], into & ~field | x << np.uint32(start) & field)


@instruction("prmt")
def permute_bytes(m: Machine, i: Instruction) -> None:
    if len(i.words) > 2:
        raise MachineError(f"no such permutation here: {i.opcode}")
    a, b, choice = (m.read(x, "u32").astype(np.uint64) for x in i.operands[1:])
    pair, out = b << np.uint64(32) | a, np.zeros_like(a)
    for k in range(4):
        which = choice >> np.uint64(4 * k)
        byte = pair >> (which % np.uint64(8) * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte >= 0x80, np.uint64(0xFF), np.uint64(0))
        out = out | np.where(which & np.uint64(8), sign, byte) << np.uint64(8 * k)
    m.write(i.operands[0], out.astype(np.uint32))


@instruction("selp")
def select(m: Machine, i: Instruction) -> None:
    a, b = (m.read(x, i.type) for x in i.operands[1:3])
    m.write(i.operands[0], np.where(m.read(i.operands[3], "pred"), a, b))


@instruction("setp")
def compare(m: Machine, i: Instruction) -> None:
    name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(i.words[1], i.words[1])
    a, b = (m.read(x, i.type) for x in i.operands[1:3])
    if i.type in _FLOATING:
        a, b = a.astype(np.float64), b.astype(np.float64)
    unordered = (a != a) | (b != b)
    if name in ("num", "nan"):
        result = unordered == (name == "nan")
    else:
        result = getattr(operator, name[:2])(a, b)
        result = result | unordered if name[2:] == "u" else result & ~unordered
    if len(i.words) > 3:  # joined with a third operand
        join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[i.words[2]]
        result = join(result, m.read(i.operands[3], "pred"))
    m.write(i.operands[0], result)
