"""Loads, stores and asynchronous copies."""

import numpy as np

from tests.ptx.machine import Copy, Machine, instruction
from tests.ptx.memory import RAW, Array, MachineError
from tests.ptx.program import Instruction, vector

_WIDTHS = {f"{kind}{bits}": bits // 8 for kind in "bsuf" for bits in (8, 16, 32, 64)}


@instruction("ld")
def load(m: Machine, i: Instruction) -> None:
    space = i.words[1].partition("::")[0]
    if space == "param":
        index = m.program.parameters.index(i.operands[1].strip("[] "))
        return m.write(i.operands[0], np.array([[m.pointers[index]]], np.uint64))
    names = vector(i.operands[0])
    where = m.address(i.operands[1]), m.mask, RAW[_WIDTHS[i.type]], len(names)
    if space == "shared":
        values = m.shared.load(m.group.members, m.group.barriers, *where)
    else:
        values = m.memory.load(*where)
    if values.itemsize == 1:  # no register is as small
        values = values.astype(np.uint16)
    for k, name in enumerate(names):
        m.write(name, values[..., k])
    return None


@instruction("st")
def store(m: Machine, i: Instruction) -> None:
    numbers = [m.full(m.read(x, f"b{8 * _WIDTHS[i.type]}")) for x in vector(i.operands[1])]
    what = m.address(i.operands[0]), m.mask, np.stack(numbers, -1)
    if i.words[1].startswith("shared"):
        m.shared.store(m.group.members, m.group.barriers, *what)
    else:
        m.memory.store(*what)


@instruction("cp")
def copy(m: Machine, i: Instruction) -> None:
    """What is copied is there once it was waited for, not before."""
    if i.words[2] == "commit_group":
        m.group.copies.append([])
    elif i.words[2] == "wait_group":
        while len(m.group.copies) > int(i.operands[0]) + 1:
            for c in m.group.copies.pop(0):
                _arrive(m, c.address, c.mask, c.values)
    elif i.words[1:2] == ("async",) and i.words[2] in ("ca", "cg"):
        size = int(i.operands[2], 0)
        if i.operands[3].startswith("%p"):  # says where zeros are copied instead
            some = ~m.full(m.read(i.operands[3], "pred"))
        else:  # says how many bytes are copied before zeros
            taken = m.full(m.read(i.operands[3], "b32"))
            if not np.isin(taken, (0, size)).all():
                raise MachineError("an asynchronous copy of a part")
            some = taken > 0
        values = m.memory.load(m.address(i.operands[1]), m.mask & some, np.uint32, size // 4)
        values = np.where(some[..., None], values, 0).astype(np.uint32)
        address = m.address(i.operands[0])
        m.shared.expect(m.group.members, m.group.barriers, address, m.mask, size, 1)
        m.group.copies[-1].append(Copy(address, m.mask, values))
    else:
        raise MachineError(f"no such copy here: {i.opcode}")


def _arrive(m: Machine, address: Array, mask: Array, values: Array) -> None:
    full = np.broadcast_to(values, (*m.shape, values.shape[-1]))
    where = m.group.members, m.group.barriers, m.full(address), m.full(mask)
    m.shared.expect(*where, values.shape[-1] * values.itemsize, -1)
    m.shared.store(*where, full)
