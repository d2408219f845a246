"""Products of matrices, by a warp (mma) and by four (wgmma)."""

import re

import numpy as np

from tests.ptx.conversions import as_tf32
from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction, vector
from tests.ptx.warps import COLUMN, ROW, fragment

_SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the mode of a descriptor


@instruction("mma")
def by_a_warp(m: Machine, i: Instruction) -> None:
    _, n, k = _sizes(i)
    left, right = (fragment(m, x, i.words[-2]) for x in i.operands[1:3])
    sums = fragment(m, i.operands[3], "f32")
    a = _left(left, k)
    b = np.zeros((*a.shape[:2], k, n))
    per = right.shape[-1]
    for r in range(right.shape[3]):
        for j in range(per):
            b[:, :, per * COLUMN + j + 4 * per * r, ROW] = right[..., r, j]
    product = a @ b
    for r, name in enumerate(vector(i.operands[0])):
        value = product[:, :, ROW + 8 * (r // 2), 2 * COLUMN + r % 2] + sums[..., r, 0]
        m.write(name, value.astype(np.float32).reshape(m.shape))


@instruction("wgmma")
def by_four_warps(m: Machine, i: Instruction) -> None:
    if i.words[1] in ("fence", "commit_group", "wait_group"):
        return  # a product is there at once
    _, n, k = _sizes(i)
    signs, turned = i.operands[4:6], [int(x) for x in i.operands[6:]]
    if signs != ("1", "1"):
        raise MachineError("a product of negated operands")
    if i.operands[1].startswith("{"):
        a = _left(fragment(m, i.operands[1], i.type), k)
        a = a.reshape(m.shape[0], -1, 64, k)
        right_turned = bool(turned and turned[0])
    else:
        a = _described(m, i.operands[1], 64, k, i.type, bool(turned and turned[0]))
        right_turned = bool(turned and turned[1])
    b = _described(m, i.operands[2], n, k, i.type, right_turned)
    product = (a @ b.swapaxes(-1, -2)).reshape(m.shape[0], -1, 16, n)
    adds = m.full(m.read(i.operands[3], "pred"))
    for r, name in enumerate(vector(i.operands[0])):
        at = ROW + 8 * (r // 2 % 2), 2 * COLUMN + r % 2 + 8 * (r // 4)
        value = product[:, :, *at].reshape(m.shape)
        if adds.any():
            value = value + np.where(adds, m.read(name, "f32"), 0)
        m.write(name, value.astype(np.float32))


def _sizes(i: Instruction) -> tuple[int, ...]:
    found = re.search(r"m(\d+)n(\d+)k(\d+)", i.opcode)
    assert found is not None
    return tuple(map(int, found.groups()))


def _left(registers: Array, k: int) -> Array:
    """[programs, warps, 16, k] of a fragment."""
    a = np.zeros((*registers.shape[:2], 16, k))
    per = registers.shape[-1]
    for r in range(registers.shape[3]):
        for j in range(per):
            a[:, :, ROW + 8 * (r % 2), per * COLUMN + j + 4 * per * (r // 2)] = registers[..., r, j]
    return a


def _described(m: Machine, operand: str, rows: int, k: int, kind: str, turned: bool) -> Array:
    """What a descriptor shows in shared memory: [programs, groups of four warps, rows, k]."""
    each = m.full(m.read(operand, "b64")).reshape(m.shape[0], -1, 128)
    if (each != each[..., :1]).any():
        raise MachineError("four warps with several descriptors")
    bits = each[..., :1, None].astype(np.int64)
    start, lead, stride = (bits >> place << 4 & 0x3FFF0 for place in (0, 16, 32))
    modes = np.unique(bits >> 62 & 3)
    if len(modes) > 1 or (bits >> 49 & 7).any():
        raise MachineError("a descriptor with a base offset, or with several modes")
    width = _SWIZZLED[int(modes[0])]
    size = 4 if kind == "tf32" else 2
    row, column = np.arange(rows)[:, None], np.arange(k)[None]
    if turned and width > 16:
        beside = row * size
        offset = lead * (beside // width) + beside % width + width * (column % 8)
        offset = offset + stride * (column // 8)
    elif turned or (width == 16 and k * size > 16):
        raise MachineError("a descriptor of rows that are not swizzled")
    else:
        offset = stride * (row // 8) + width * (row % 8) + column * size
    address = start + offset
    address = address ^ (address >> 7 & width // 16 - 1) << 4
    m.shared.fetches(m.group.members, m.group.barriers, address)
    places = m.shared.bytes.view(np.uint32 if size == 4 else np.uint16)
    x = places[m.group.members[:, None, None, None], address // size]
    if kind == "tf32":
        return as_tf32(x.view(np.float32)).view(np.float32).astype(np.float64)
    return np.asarray(x.view(TYPES[kind]).astype(np.float64))
