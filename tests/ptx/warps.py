"""What the threads of a warp do together, and barriers."""

import numpy as np

from tests.ptx.conversions import as_tf32
from tests.ptx.machine import TYPES, Machine, instruction
from tests.ptx.memory import Array, MachineError
from tests.ptx.program import Instruction, vector

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4  # of a fragment of the tensor cores


@instruction("bar", "barrier")
def barrier(m: Machine, i: Instruction) -> None:
    m.group.barriers += "warp" not in i.words


@instruction("fence", "membar", "griddepcontrol")
def nothing(m: Machine, i: Instruction) -> None:
    pass


@instruction("shfl")
def shuffle(m: Machine, i: Instruction) -> None:
    x = m.warps(m.read(i.operands[1], "b32"))
    by = m.warps(m.read(i.operands[2], "b32")).astype(np.int64) & 31
    clamp, segment = int(i.operands[3]) & 31, int(i.operands[3]) >> 8 & 31
    last = LANE & segment | clamp & ~segment
    source = {
        "up": LANE - by,
        "down": LANE + by,
        "bfly": LANE ^ by,
        "idx": LANE & segment | by & ~segment,
    }[i.words[2]]
    known = source >= last if i.words[2] == "up" else source <= last
    taken = np.take_along_axis(x, np.where(known, source, LANE), axis=2)
    value, _, predicate = i.operands[0].partition("|")
    m.write(value, taken.reshape(m.shape))
    if predicate:
        m.write(predicate, np.broadcast_to(known, x.shape).reshape(m.shape))


@instruction("redux")
def reduce(m: Machine, i: Instruction) -> None:
    names = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or}
    x = m.warps(m.read(i.operands[1], i.type))
    total = names[i.words[2]].reduce(x, axis=2, keepdims=True)
    m.write(i.operands[0], np.broadcast_to(total, x.shape).reshape(m.shape))


@instruction("vote")
def vote(m: Machine, i: Instruction) -> None:
    x = m.warps(m.read(i.operands[1], "pred"))
    if i.words[2] == "ballot":
        bits = x.astype(np.uint32) << LANE.astype(np.uint32)
        result = np.bitwise_or.reduce(bits, axis=2, keepdims=True)
    else:
        result = {"any": np.any, "all": np.all}[i.words[2]](x, axis=2, keepdims=True)
    m.write(i.operands[0], np.broadcast_to(result, x.shape).reshape(m.shape))


@instruction("ldmatrix")
def load_matrices(m: Machine, i: Instruction) -> None:
    names = vector(i.operands[0])
    address, mask = _rows(m, i.operands[1], len(names))
    rows = m.shared.load(m.group.members, m.group.barriers, address, mask, np.uint16, 8)
    tiles = rows.reshape(m.shape[0], -1, 4, 8, 8)
    if "trans" in i.words:
        tiles = tiles.swapaxes(-1, -2)
    for k, name in enumerate(names):
        pair = (tiles[:, :, k, ROW, 2 * COLUMN + j].astype(np.uint32) for j in (0, 1))
        low, high = pair
        m.write(name, (low | high << np.uint32(16)).reshape(m.shape))


@instruction("stmatrix")
def store_matrices(m: Machine, i: Instruction) -> None:
    names = vector(i.operands[1])
    address, mask = _rows(m, i.operands[0], len(names))
    tiles = np.zeros((m.shape[0], m.shape[1] // 32, 4, 8, 8), np.uint16)
    for k, name in enumerate(names):
        pair = m.warps(m.read(name, "b32")).view(np.uint16).reshape(*tiles.shape[:2], 32, 2)
        for j in (0, 1):
            tiles[:, :, k, ROW, 2 * COLUMN + j] = pair[..., j]
    if "trans" in i.words:
        tiles = tiles.swapaxes(-1, -2)
    values = tiles.reshape(*m.shape, 8)
    m.shared.store(m.group.members, m.group.barriers, address, mask, values)


def _rows(m: Machine, operand: str, count: int) -> tuple[Array, Array]:
    """Where the rows of matrices of 8 x 8 are: lane 8 k + i says it for row i of matrix k."""
    return m.address(operand), m.mask & (m.threads % 32 < 8 * count)


def fragment(m: Machine, operand: str, kind: str) -> Array:
    """Registers as the tensor cores take them: [programs, warps, 32, registers, numbers]."""
    xs = [m.warps(m.read(x, "b32")) for x in vector(operand)]
    x = np.stack(xs, -1)[..., None]
    if kind == "f32":
        return x.view(np.float32).astype(np.float64)
    if kind == "tf32":
        return as_tf32(x.view(np.float32)).view(np.float32).astype(np.float64)
    if kind not in ("bf16", "f16"):
        raise MachineError(f"no products of {kind} here")
    return np.asarray(x.view(np.uint16).view(TYPES[kind]).astype(np.float64))
