"""What the threads of a warp do together, and barriers."""

import functools

import numpy as np

from tests.ptx.machine import Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction, vector


@instruction(r"bar\.(warp\.)?sync")
def barrier(m: Machine, i: Instruction) -> None:
    """Of all threads: of a warp all lanes, or all of barrier 0."""
    if i.operands != (("-1",) if "warp" in i.words else ("0",)):
        raise MachineError(f"no such barrier here: {i.operands}")
    m.group.barriers += "warp" not in i.words


@instruction(r"fence\.proxy\.async\.shared::cta|griddepcontrol\.wait")
def nothing(m: Machine, i: Instruction) -> None:
    pass


@instruction(r"shfl\.sync\.(up|bfly|idx)\.b32")
def shuffle(m: Machine, i: Instruction) -> None:
    """Of all lanes, from anywhere in the warp; a lane without a source keeps its own."""
    mode, limits = i.words[2], i.operands[3:]
    if limits != ("0" if mode == "up" else "31", "-1"):
        raise MachineError(f"no such shuffle here: {i.opcode} {limits}")
    x, by = m.full(m.read(i.operands[1], "b32")), m.read(i.operands[2], "b32")
    if by.size == 1:
        m.write(i.operands[0], x.take(_source_of_all(mode, int(by[0, 0]), x.shape[1]), axis=1))
    else:
        m.write(i.operands[0], np.take_along_axis(x, m.full(_source(mode, by, m.threads)), axis=1))


def _source(mode: str, by: Array, threads: Array) -> Array:
    """The thread that each thread reads."""
    by, lane = by.astype(np.int64) & 31, threads % np.int64(32)
    source = {"up": lane - by, "bfly": lane ^ by, "idx": by}[mode]
    return threads - lane + np.where(source < 0, lane, source)


@functools.cache
def _source_of_all(mode: str, by: int, num_threads: int) -> Array:
    return _source(mode, np.array([by]), np.arange(num_threads))


@instruction(r"redux\.sync\.max\.s32")
def reduce(m: Machine, i: Instruction) -> None:
    if (m.read(i.operands[2], "s32") != -1).any():
        raise MachineError("a reduction of some lanes")
    x = m.warps(m.read(i.operands[1], "s32"))
    m.write(i.operands[0], x.max(axis=2).repeat(32, axis=1))


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.(trans\.)?shared\.b16")
def load_matrices(m: Machine, i: Instruction) -> None:
    names = vector(i.operands[0])
    address, mask = _rows(m, i.operands[1], len(names))
    rows = m.shared.load(*m.here, address, mask, np.uint16, 8)
    tiles = rows.reshape(m.shape[0], -1, 4, 8, 8)
    if "trans" in i.words:
        tiles = tiles.swapaxes(-1, -2)
    for k, name in enumerate(names):
        m.write(name, np.ascontiguousarray(tiles[:, :, k]).view(np.uint32).reshape(m.shape))


@instruction(r"stmatrix\.sync\.aligned\.m8n8\.x[124]\.(trans\.)?shared\.b16")
def store_matrices(m: Machine, i: Instruction) -> None:
    names = vector(i.operands[1])
    address, mask = _rows(m, i.operands[0], len(names))
    pairs = np.zeros((m.shape[0], m.shape[1] // 32, 4, 8, 4), np.uint32)
    for k, name in enumerate(names):
        pairs[:, :, k] = m.warps(m.read(name, "b32")).reshape(*pairs.shape[:2], 8, 4)
    tiles = pairs.view(np.uint16)
    if "trans" in i.words:
        tiles = tiles.swapaxes(-1, -2)
    values = tiles.reshape(*m.shape, 8)
    m.shared.store(*m.here, address, mask, values)


def _rows(m: Machine, operand: str, count: int) -> tuple[Array, Array]:
    """Where the rows of matrices of 8 x 8 are: lane 8 k + i says it for row i of matrix k.

    Of each matrix a lane has two numbers side by side, four lanes a row.
    """
    return m.address(operand), m.mask & (m.threads % 32 < 8 * count)
