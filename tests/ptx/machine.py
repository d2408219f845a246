"""Programs in lockstep: their registers, and where they stand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx.memory import RAW, Array, Global, MachineError, Shared
from tests.ptx.program import Instruction, Program, vector

TYPES: dict[str, Any] = {
    **{f"{kind}{bits}": RAW[bits // 8] for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
}
HALVES = {"b32": "b16", "b64": "b32"}

Run = Callable[["Machine", Instruction], None]
INSTRUCTIONS: dict[str, Run] = {}


def instruction(*names: str) -> Callable[[Run], Run]:
    """Says which instructions, by their first word, a function runs."""

    def register(run: Run) -> Run:
        INSTRUCTIONS.update(dict.fromkeys(names, run))
        return run

    return register


@dataclasses.dataclass
class Copy:
    """An asynchronous copy into shared memory, under way."""

    address: Array
    mask: Array
    values: Array


@dataclasses.dataclass
class Group:
    """Programs that stand at one place, and what they hold.

    A register is its bits, [programs or 1, threads or 1].
    """

    at: int
    members: Array
    registers: dict[str, Array] = dataclasses.field(default_factory=dict)
    copies: list[list[Copy]] = dataclasses.field(default_factory=lambda: [[]])
    barriers: int = 0

    def part(self, keep: Array, at: int) -> "Group":
        def of(x: Array) -> Array:
            return x[keep] if len(x) > 1 else x

        return Group(
            at,
            self.members[keep],
            {name: of(x) for name, x in self.registers.items()},
            [[Copy(of(c.address), of(c.mask), of(c.values)) for c in g] for g in self.copies],
            self.barriers,
        )


class Machine:
    """Some programs of one launch."""

    def __init__(
        self,
        program: Program,
        memory: Global,
        shared: Shared,
        pointers: list[int],
        ids: dict[str, Array],
    ) -> None:
        self.program, self.memory, self.shared, self.pointers = program, memory, shared, pointers
        self.threads = np.arange(program.num_threads, dtype=np.uint32)
        self.ids = ids  # of the programs, along each axis of the grid
        self.group = Group(0, np.arange(len(ids["x"])))
        self.guard: Array | None = None

    def run(self) -> None:
        waiting = [self.group]
        while waiting:
            self.group = waiting.pop()
            while self.group.at < len(self.program.code):
                i = self.program.code[self.group.at]
                self.guard = self._guard(i)
                if i.words[0] == "bra":
                    waiting += self._branch(self.program.labels[i.operands[0]])
                elif i.words[0] == "ret":
                    if self.guard is not None:
                        raise MachineError("some threads return alone")
                    break
                else:
                    self._step(i)
                    self.group.at += 1

    def _guard(self, i: Instruction) -> Array | None:
        return None if i.guard is None else self.group.registers[i.guard] ^ i.unless

    def _branch(self, target: int) -> list[Group]:
        """Goes where the guard says; the group of those who go elsewhere, if any do."""
        here = self.group
        if self.guard is None:
            here.at = target
            return []
        taken = self.full(self.guard)
        if (taken != taken[:, :1]).any():
            raise MachineError("threads of one program part")
        goers = taken[:, 0]
        if goers.all() or not goers.any():
            here.at = target if goers.all() else here.at + 1
            return []
        self.group = here.part(np.flatnonzero(~goers), here.at + 1)
        return [here.part(np.flatnonzero(goers), target)]

    def _step(self, i: Instruction) -> None:
        run = INSTRUCTIONS.get(i.words[0])
        if run is None:
            raise MachineError(f"no such instruction here: {i.opcode}")
        with np.errstate(all="ignore"):
            run(self, i)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.group.members), self.threads.size

    @property
    def mask(self) -> Array:
        """Which threads take part."""
        return self.full(np.ones((1, 1), bool) if self.guard is None else self.guard)

    def full(self, x: Array) -> Array:
        return np.broadcast_to(x, self.shape)

    def warps(self, x: Array) -> Array:
        """[programs, warps, 32]"""
        return np.ascontiguousarray(self.full(x)).reshape(len(x := self.full(x)), -1, 32)

    def read(self, operand: str, kind: str) -> Array:
        """An operand as numbers of a type, [programs or 1, threads or 1]."""
        dtype = TYPES[kind]
        if operand.startswith("{"):
            return self._joined(operand, kind).view(dtype)
        bits = self._bits(operand, np.dtype(dtype).itemsize, kind == "pred")
        return bits if kind == "pred" else bits.view(dtype)

    def write(self, operand: str, value: Array) -> None:
        """Sets a register, for the threads that take part."""
        if operand.startswith("{"):
            return self._write_halves(vector(operand), value)
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value).view(RAW[value.itemsize])
        if self.guard is not None:
            before = self.group.registers.get(operand, np.full((1, 1), -1).astype(value.dtype))
            value = np.where(self.guard, value, before)
        self.group.registers[operand] = value
        return None

    def address(self, operand: str) -> Array:
        """That of "[%rd1 + 16]"."""
        base, _, offset = operand.strip("[] ").partition("+")
        base = base.strip()
        start = np.zeros((1, 1), np.int64)
        if base != "global_smem":
            start = self.group.registers[base].astype(np.int64)
        return self.full(start + int(offset or 0))

    def _bits(self, operand: str, size: int, is_predicate: bool) -> Array:
        known = self._special(operand) if operand.startswith("%") else None
        if known is None:
            value = _constant(operand)
            bits = np.array([[value % 256**size]], np.uint64).astype(RAW[size])
            return bits.astype(bool) if is_predicate else bits
        if known.itemsize > size:  # the low bits of a wider register
            return np.ascontiguousarray(known).astype(RAW[size])
        if known.itemsize != size:
            raise MachineError(f"{operand} is narrower than {size} bytes")
        return known

    def _special(self, name: str) -> Array:
        if name in self.group.registers:
            return self.group.registers[name]
        kind, _, axis = name[1:].partition(".")
        if kind == "tid":
            return self.threads[None] * (axis == "x")
        if kind == "ctaid":
            return self.ids[axis][self.group.members][:, None].astype(np.uint32)
        raise MachineError(f"{name} is read before it is written")

    def _joined(self, operand: str, kind: str) -> Array:
        low, high = (self.read(x, HALVES[kind]) for x in vector(operand))
        wide = TYPES[kind]
        return np.asarray(low.astype(wide) | (high.astype(wide) << wide(8 * low.itemsize)))

    def _write_halves(self, names: tuple[str, ...], value: Array) -> None:
        """The low half first."""
        bits, half = value.view(RAW[value.itemsize]), value.itemsize // 2
        for place, name in enumerate(names):
            if name != "_":
                self.write(name, (bits >> 8 * half * place).astype(RAW[half]))


def _constant(operand: str) -> int:
    if operand == "global_smem":
        return 0
    if operand[:2] in ("0f", "0d"):
        return int(operand[2:], 16)
    return int(operand.rstrip("U"), 0)
