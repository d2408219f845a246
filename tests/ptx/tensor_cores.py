"""Products of matrices, by a warp (mma) and by four (wgmma)."""

import functools
import re

import numpy as np

from tests.ptx.conversions import as_tf32
from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction, vector

_SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the mode of a descriptor


@instruction(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32")
@instruction(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32")
def by_a_warp(m: Machine, i: Instruction) -> None:
    _, n, k = _sizes(i)
    kind = i.words[-2]
    a = _left(m, i.operands[1], k, kind)
    b = _registers(m, i.operands[2], kind)[..., _place_in_b(n, k)]
    sums = _registers(m, i.operands[3], "f32")
    product = (a @ b).reshape(*a.shape[:2], -1)[..., _place_in_sums(n)]
    for r, name in enumerate(vector(i.operands[0])):
        value = product[..., r, :] + sums[..., 32 * r : 32 * r + 32]
        m.write(name, value.astype(np.float32).reshape(m.shape))


@instruction(r"wgmma\.(fence|commit_group)\.sync\.aligned")
def nothing(m: Machine, i: Instruction) -> None:
    """A product is there at once."""


@instruction(r"wgmma\.wait_group\.sync\.aligned")
def wait_for_products(m: Machine, i: Instruction) -> None:
    if i.operands != ("0",):
        raise MachineError("a wait for some products alone")
    for address in m.group.products:
        m.shared.fetched(*m.here, address)
    m.group.products.clear()


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)")
@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k8\.f32\.tf32\.tf32")
def by_four_warps(m: Machine, i: Instruction) -> None:
    _, n, k = _sizes(i)
    signs, turned = i.operands[4:6], [bool(int(x)) for x in i.operands[6:]] or [False, False]
    if signs != ("1", "1"):
        raise MachineError("a product of negated operands")
    if i.operands[1].startswith("{"):
        a = _left(m, i.operands[1], k, i.type).reshape(m.shape[0], -1, 64, k)
    else:
        a = _described(m, i.operands[1], 64, k, i.type, turned[0])
    b = _described(m, i.operands[2], n, k, i.type, turned[-1])
    product = (a @ b.swapaxes(-1, -2)).reshape(m.shape[0], -1, 16 * n)[..., _place_in_sums(n)]
    adds = m.full(m.read(i.operands[3], "pred"))
    for r, name in enumerate(vector(i.operands[0])):
        value = product[..., r, :].reshape(m.shape)
        if adds.any():
            value = value + np.where(adds, m.read(name, "f32"), 0)
        m.write(name, value.astype(np.float32))


def _sizes(i: Instruction) -> tuple[int, ...]:
    found = re.search(r"m(\d+)n(\d+)k(\d+)", i.opcode)
    assert found is not None
    return tuple(map(int, found.groups()))


def _left(m: Machine, operand: str, k: int, kind: str) -> Array:
    """[programs, warps, 16, k]"""
    return _registers(m, operand, kind)[..., _place_in_a(k)]


def _registers(m: Machine, operand: str, kind: str) -> Array:
    """[programs, warps, numbers]: the first register of all lanes, the second, .."""
    bits = np.stack([m.warps(m.read(x, "b32")) for x in vector(operand)], 2)
    return _numbers(bits, kind).reshape(*bits.shape[:2], -1)


def _numbers(bits: Array, kind: str) -> Array:
    """What the tensor cores see, in float64."""
    x = as_tf32(bits.view(np.float32)) if kind == "tf32" else bits.view(TYPES[kind])
    return np.asarray(x.astype(np.float64))


@functools.cache
def _place_in_a(k: int) -> Array:
    """[16, k]: which of a warp's numbers is at row and column of the left operand."""
    per = k // 8  # numbers in a register
    row, column = np.arange(16)[:, None], np.arange(k)
    register, lane = row // 8 + 2 * (column // (4 * per)), row % 8 * 4 + column // per % 4
    return (32 * register + lane) * per + column % per


@functools.cache
def _place_in_b(n: int, k: int) -> Array:
    """[k, n]"""
    per = k // 8
    row, column = np.arange(k)[:, None], np.arange(n)
    register, lane = row // (4 * per), 4 * column + row // per % 4
    return (32 * register + lane) * per + row % per


@functools.cache
def _place_in_sums(n: int) -> Array:
    """[registers, lanes]: which of [16, n] numbers, counted row by row, a register holds."""
    register, lane = np.arange(n // 2)[:, None], np.arange(32)
    row, column = register // 2 % 2 * 8 + lane // 4, register // 4 * 8 + lane % 4 * 2
    return row * n + column + register % 2


def _described(m: Machine, operand: str, rows: int, k: int, kind: str, turned: bool) -> Array:
    """What a descriptor shows in shared memory: [programs, groups of four warps, rows, k]."""
    each = m.full(m.read(operand, "b64")).reshape(m.shape[0], -1, 128)
    if (each != each[..., :1]).any():
        raise MachineError("four warps with several descriptors")
    size = 4 if kind == "tf32" else 2
    address = _addresses(each[..., :1, None].astype(np.int64), rows, k, size, turned)
    m.group.products.append(address)
    return _numbers(m.shared.fetch(*m.here, address, size), kind)


def _addresses(bits: Array, rows: int, k: int, size: int, turned: bool) -> Array:
    """Where the numbers of a matrix are, by the bits of a descriptor."""
    start, lead, stride = (bits >> place << 4 & 0x3FFF0 for place in (0, 16, 32))
    modes = np.unique(bits >> 62 & 3)
    if len(modes) > 1 or (bits >> 49 & 7).any():
        raise MachineError("a descriptor with a base offset, or with several modes")
    width = _SWIZZLED[int(modes[0])]
    row, column = np.arange(rows)[:, None], np.arange(k)
    if turned and width > 16:
        beside = row * size
        offset = lead * (beside // width) + beside % width + width * (column % 8)
        offset = offset + stride * (column // 8)
    elif turned or (width == 16 and k * size > 16):
        raise MachineError("a descriptor of rows that are not swizzled")
    else:
        offset = stride * (row // 8) + width * (row % 8) + column * size
    address = start + offset
    return np.asarray(address ^ (address >> 7 & width // 16 - 1) << 4)
