"""Arithmetic, logic and comparisons of numbers, thread by thread."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.machine import TYPES, Machine, Run, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction

INTEGER = r"[bsu](16|32|64)"


def _elementwise(fn: Callable[..., Any]) -> Run:
    """All operands and the result are of the one type."""

    def run(m: Machine, i: Instruction) -> None:
        m.write(i.operands[0], np.asarray(fn(*(m.read(x, i.type) for x in i.operands[1:]))))

    return run


def _larger(a: Any, b: Any) -> Any:
    """Of NaN and a number the number; of -0 and 0 it is 0, in either order."""
    signs = a.view(np.uint32) & b.view(np.uint32)
    return np.where(a == b, signs.view(np.float32), np.fmax(a, b))


def _smaller(a: Any, b: Any) -> Any:
    return -_larger(-a, -b)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    rf"add\.(rn\.f32|{INTEGER})": np.add,
    rf"sub\.(rn\.f32|{INTEGER})": np.subtract,
    rf"neg\.(f32|{INTEGER})": np.negative,
    rf"abs\.(f32|{INTEGER})": np.abs,
    rf"and\.(pred|{INTEGER})": np.bitwise_and,
    rf"or\.(pred|{INTEGER})": np.bitwise_or,
    rf"xor\.(pred|{INTEGER})": np.bitwise_xor,
    rf"not\.(pred|{INTEGER})": np.invert,
    rf"mul\.(rn\.f32|lo\.{INTEGER})": np.multiply,
    rf"min\.{INTEGER}": np.minimum,
    rf"max\.{INTEGER}": np.maximum,
    r"min\.relu\.s32": lambda a, b: np.maximum(np.minimum(a, b), 0),
    r"max\.relu\.s32": lambda a, b: np.maximum(np.maximum(a, b), 0),
    r"min\.f32": _smaller,
    r"max\.f32": _larger,
}
for _pattern, _fn in ELEMENTWISE.items():
    instruction(_pattern)(_elementwise(_fn))


@instruction(r"neg\.b?f16")
def negate_half_width(m: Machine, i: Instruction) -> None:
    m.write(i.operands[0], m.read(i.operands[1], "u16") ^ np.uint16(0x8000))


PAIRS: dict[str, Callable[..., Any]] = {
    "max": _larger,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,  # products of two are exact in float32
}


@instruction(r"(add|sub|mul)\.rn\.b?f16")
def half_width(m: Machine, i: Instruction) -> None:
    dtype = TYPES[i.words[-1]]
    operands = (m.read(x, "u16").view(dtype).astype(np.float32) for x in i.operands[1:])
    result = np.asarray(PAIRS[i.words[0]](*operands))
    m.write(i.operands[0], result.astype(dtype).view(np.uint16))


@instruction(r"(max|sub(\.rn)?)\.bf16x2|add\.rn\.f16x2|(fma|mul)\.rn\.bf16x2")
def pairs_of_half_width(m: Machine, i: Instruction) -> None:
    dtype, pairs = TYPES[i.words[-1][:-2]], [m.read(x, "u32") for x in i.operands[1:]]

    def of_halves(shift: int) -> Array:
        halves = ((x >> np.uint32(shift)).astype(np.uint16).view(dtype) for x in pairs)
        result = np.asarray(PAIRS[i.words[0]](*(x.astype(np.float32) for x in halves)))
        return result.astype(dtype).view(np.uint16).astype(np.uint32)

    m.write(i.operands[0], of_halves(16) << np.uint32(16) | of_halves(0))


@instruction(r"lop3\.b32")
def logic_of_three(m: Machine, i: Instruction) -> None:
    """Bit by bit what the last operand, a table of eight bits, says of a, b and c."""
    *operands, table = (m.read(x, "u32") for x in i.operands[1:])
    result = np.zeros_like(operands[0])
    for k in range(8):
        chosen = table >> np.uint32(k) & np.uint32(1)
        match = np.uint32(0xFFFFFFFF) * chosen
        for place, x in zip((4, 2, 1), operands, strict=True):
            match = match & (x if k & place else ~x)
        result = result | match
    m.write(i.operands[0], result)


@instruction(r"mad\.lo\.[su](16|32|64)")
def multiply_add_integers(m: Machine, i: Instruction) -> None:
    a, b, c = (m.read(x, i.type) for x in i.operands[1:])
    m.write(i.operands[0], a * b + c)


@instruction(r"mul\.(wide|hi)\.[su](16|32)")
def multiply_wide(m: Machine, i: Instruction) -> None:
    """The whole product, or its upper half."""
    wide = TYPES[i.type[0] + {"16": "32", "32": "64"}[i.type[1:]]]
    a, b = (m.read(x, i.type).astype(wide) for x in i.operands[1:])
    product = a * b
    if i.words[1] == "hi":
        product = (product >> 4 * product.itemsize).astype(TYPES[i.type])
    m.write(i.operands[0], product)


@instruction(r"mul\.hi\.u64")
def multiply_high(m: Machine, i: Instruction) -> None:
    """In halves of 32 bits."""
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    a, b = (m.read(x, "u64") for x in i.operands[1:])
    cross = (a >> half) * (b & mask) + ((a & mask) * (b & mask) >> half)
    other = (a & mask) * (b >> half) + (cross & mask)
    m.write(i.operands[0], (a >> half) * (b >> half) + (cross >> half) + (other >> half))


@instruction(r"fma\.rn\.f32")
def multiply_add(m: Machine, i: Instruction) -> None:
    """Rounded once (all but: the sum has 64 bits before)."""
    a, b, c = (m.read(x, i.type).astype(np.longdouble) for x in i.operands[1:])
    m.write(i.operands[0], (a * b + c).astype(np.float32))


@instruction(r"sh[lr]\.[bsu](16|32|64)")
def shift(m: Machine, i: Instruction) -> None:
    x, by = m.read(i.operands[1], i.type), m.read(i.operands[2], "u32")
    bits = 8 * x.itemsize
    move = operator.lshift if i.words[0] == "shl" else operator.rshift
    moved = move(x, np.minimum(by, bits - 1).astype(x.dtype))
    if i.words[0] == "shl" or x.dtype.kind == "u":
        moved = np.where(by < bits, moved, 0)
    m.write(i.operands[0], moved.astype(x.dtype))


@instruction(r"bfe\.[su](32|64)")
def extract_bits(m: Machine, i: Instruction) -> None:
    start, length = int(i.operands[2]), int(i.operands[3])
    x = m.read(i.operands[1], i.type)
    bits = 8 * x.itemsize
    if start < 0 or length < 1 or start + length > bits:
        raise MachineError(f"bits {start} to {start + length} of {bits}")
    m.write(i.operands[0], x << x.dtype.type(bits - start - length) >> x.dtype.type(bits - length))


@instruction(r"prmt\.b32")
def permute_bytes(m: Machine, i: Instruction) -> None:
    a, b, choice = (m.read(x, "u32").astype(np.uint64) for x in i.operands[1:])
    pair, out = b << np.uint64(32) | a, np.zeros_like(a)
    for k in range(4):
        which = choice >> np.uint64(4 * k)
        byte = pair >> (which % np.uint64(8) * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte >= 0x80, np.uint64(0xFF), np.uint64(0))
        out = out | np.where(which & np.uint64(8), sign, byte) << np.uint64(8 * k)
    m.write(i.operands[0], out.astype(np.uint32))


@instruction(rf"selp\.(f32|{INTEGER})")
def select(m: Machine, i: Instruction) -> None:
    a, b = (m.read(x, i.type) for x in i.operands[1:3])
    m.write(i.operands[0], np.where(m.read(i.operands[3], "pred"), a, b))


@instruction(rf"setp\.(eq|ne|lt|le|gt|ge)(\.and|\.or)?\.({INTEGER}|f32|f16|bf16)")
@instruction(r"setp\.(num|nan|(eq|ne|lt|le|gt|ge)u)(\.and|\.or)?\.f32")
def compare(m: Machine, i: Instruction) -> None:
    """With NaN all is false, and all true of those that end in "u"."""
    a, b = (m.read(x, i.type) for x in i.operands[1:3])
    unordered = (a != a) | (b != b)
    if i.words[1] in ("num", "nan"):
        result = unordered == (i.words[1] == "nan")
    else:
        result = getattr(operator, i.words[1][:2])(a, b)
        result = result | unordered if i.words[1][2:] == "u" else result & ~unordered
    if len(i.words) > 3:  # joined with a third operand
        other = m.read(i.operands[3], "pred")
        result = result & other if i.words[2] == "and" else result | other
    m.write(i.operands[0], result)
