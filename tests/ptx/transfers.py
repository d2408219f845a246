"""Loads, stores and asynchronous copies."""

import numpy as np

from tests.ptx.machine import TYPES, Copy, Machine, instruction
from tests.ptx.memory import MachineError
from tests.ptx.program import Instruction, vector


@instruction(r"ld\.param(::entry)?\.b64")
def load_parameter(m: Machine, i: Instruction) -> None:
    index = m.program.parameters.index(i.operands[1].strip("[] "))
    m.write(i.operands[0], np.array([[m.pointers[index]]], np.uint64))


@instruction(r"ld\.global\.(v[24]\.)?b(8|16|32|64)", guarded=True)
@instruction(r"ld\.shared\.((v[24]\.)?b(8|16|32|64)|s8)", guarded=True)
def load(m: Machine, i: Instruction) -> None:
    names = vector(i.operands[0])
    where = m.address(i.operands[1]), m.mask
    what = TYPES[i.type], len(names)
    if i.words[1] == "shared":
        values = m.shared.load(*m.here, *where, *what)
    else:
        values = m.memory.load(*where, *what)
    bits = 16 if names[0].startswith("%rs") else 32
    if 8 * values.itemsize < bits:  # the register is wider
        values = values.astype(TYPES[f"{'s' if i.type == 's8' else 'u'}{bits}"])
    for k, name in enumerate(names):
        m.write(name, values[..., k])


@instruction(r"st\.global\.(v[24]\.)?b(8|16|32|64)", guarded=True)
@instruction(r"st\.shared(::cta)?\.(v[24]\.)?b(8|16|32|64)", guarded=True)
def store(m: Machine, i: Instruction) -> None:
    numbers = [m.full(m.read(x, i.type)) for x in vector(i.operands[1])]
    what = m.address(i.operands[0]), m.mask, np.stack(numbers, -1)
    if i.words[1] == "global":
        m.memory.store(*what)
    else:
        m.shared.store(*m.here, *what)


@instruction(r"cp\.async\.c[ag]\.shared\.global", guarded=True)
def copy(m: Machine, i: Instruction) -> None:
    """What is copied is there once it was waited for, not before."""
    size = int(i.operands[2], 0)
    if i.operands[3].startswith("%p"):  # says who copies zeros instead
        taken = ~m.full(m.read(i.operands[3], "pred"))
    else:  # says how many bytes are copied before zeros
        count = m.full(m.read(i.operands[3], "b32"))
        if not np.isin(count, (0, size)).all():
            raise MachineError("an asynchronous copy of a part")
        taken = count > 0
    values = m.memory.load(m.address(i.operands[1]), m.mask & taken, np.uint32, size // 4)
    values = np.where(taken[..., None], values, np.uint32(0))
    address = m.address(i.operands[0])
    m.shared.expect(*m.here, address, m.mask, size)
    m.group.copies[-1].append(Copy(address, m.mask, values))


@instruction(r"cp\.async\.(commit|wait)_group")
def end_copies(m: Machine, i: Instruction) -> None:
    """Closes a group of copies, or waits for all but the last few groups."""
    if i.words[2] == "commit_group":
        m.group.copies.append([])
        return
    while len(m.group.copies) > int(i.operands[0]) + 1:
        for c in m.group.copies.pop(0):
            m.shared.arrive(*m.here, c.address, c.mask, c.values)
