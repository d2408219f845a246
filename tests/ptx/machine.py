"""Programs in lockstep: their registers, and where they stand."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx.memory import RAW, Array, Global, MachineError
from tests.ptx.program import Instruction, Program, vector
from tests.ptx.shared import Shared

TYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(RAW[bits // 8]) for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "pred": np.dtype(np.bool_),
}
_ALL = np.ones((1, 1), bool)

Run = Callable[["Machine", Instruction], None]
_KNOWN: list[tuple[re.Pattern[str], Run, bool]] = []


def instruction(pattern: str, *, guarded: bool = False) -> Callable[[Run], Run]:
    """Says which instructions a function runs, and whether for some threads alone.

    All of an instruction's words count: none has a meaning that is passed over.
    """

    def register(run: Run) -> Run:
        _KNOWN.append((re.compile(pattern), run, guarded))
        return run

    return register


@functools.cache
def _meaning(opcode: str) -> tuple[Run, bool]:
    for pattern, run, guarded in _KNOWN:
        if pattern.fullmatch(opcode):
            return run, guarded
    raise MachineError("no such instruction here")


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
    products: list[Array] = dataclasses.field(default_factory=list)  # addresses they may yet read
    barriers: int = 0

    def part(self, keep: Array, at: int) -> "Group":
        def of(x: Array) -> Array:
            return x[keep] if len(x) > 1 else x

        return Group(
            at,
            self.members[keep],
            {name: of(x) for name, x in self.registers.items()},
            [[Copy(of(c.address), of(c.mask), of(c.values)) for c in g] for g in self.copies],
            [of(x) for x in self.products],
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
                if i.opcode in ("bra", "bra.uni"):
                    target, at = self.program.labels[i.operands[0]], self.group.at
                    waiting += self._branch(target)
                    if self.group.at <= at:  # round a loop: the turn of the others
                        waiting.insert(0, self.group)
                        self.group = waiting.pop()
                elif i.opcode == "ret":
                    if self.guard is not None:
                        raise MachineError("some threads return alone")
                    break
                else:
                    self._step(i)
                    self.group.at += 1

    def _guard(self, i: Instruction) -> Array | None:
        return None if i.guard is None else self.read(i.guard, "pred") ^ i.unless

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
        try:
            run, guarded = _meaning(i.opcode)
            if self.guard is not None and not guarded:
                raise MachineError("no such instruction here for some threads alone")
            run(self, i)
        except MachineError as error:
            raise MachineError(f"{error}: instruction {self.group.at}, {i}") from None

    @property
    def here(self) -> tuple[Array, int]:
        """Whose shared memory is meant, and when."""
        return self.group.members, self.group.barriers

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.group.members), self.threads.size

    @property
    def mask(self) -> Array:
        """Which threads take part."""
        return self.full(_ALL if self.guard is None else self.guard)

    def full(self, x: Array) -> Array:
        return x if x.shape == self.shape else np.broadcast_to(x, self.shape)

    def warps(self, x: Array) -> Array:
        """[programs, warps, 32]"""
        return np.ascontiguousarray(self.full(x)).reshape(len(self.group.members), -1, 32)

    def read(self, operand: str, kind: str) -> Array:
        """An operand as numbers of a type, [programs or 1, threads or 1]."""
        dtype = TYPES[kind]
        bits = self.group.registers.get(operand)
        if bits is None:
            bits = self._other(operand, dtype)
        if bits.itemsize > dtype.itemsize:  # the low bits of a wider register
            bits = bits.astype(RAW[dtype.itemsize])
        if bits.itemsize < dtype.itemsize or (bits.dtype.kind == "b") != (kind == "pred"):
            raise MachineError(f"{operand} is no {kind}")
        return bits.view(dtype)

    def write(self, operand: str, value: Array) -> None:
        """Sets a register, for the threads that take part."""
        if operand.startswith("{"):
            return self._write_halves(vector(operand), value)
        if value.dtype.kind not in "ub":
            value = value.view(RAW[value.itemsize])
        if self.guard is not None:
            before = self.group.registers.get(operand, np.full((1, 1), -1).astype(value.dtype))
            value = np.where(self.guard, value, before)
        self.group.registers[operand] = value
        return None

    def address(self, operand: str) -> Array:
        """That of "[%rd1 + 16]"."""
        base, offset = _base_and_offset(operand)
        bits = self.read(base, "b64" if base.startswith("%rd") else "b32")
        return self.full(bits.astype(np.int64) + offset)

    def _other(self, operand: str, dtype: Any) -> Array:
        """What is not in a register by that name."""
        if operand.startswith("{"):
            half, wide = 4 * dtype.itemsize, RAW[dtype.itemsize]
            low, high = (self.read(x, f"b{half}").astype(wide) for x in vector(operand))
            return np.asarray(low | high << wide(half))
        if operand == "%tid.x":
            return self.threads[None]
        if operand.startswith("%ctaid."):
            return self.ids[operand[-1]][self.group.members][:, None].astype(np.uint32)
        if operand.startswith("%"):
            raise MachineError(f"{operand} is read before it is written")
        return _constant(operand, dtype)

    def _write_halves(self, names: tuple[str, ...], value: Array) -> None:
        """The low half first."""
        bits, half = value.view(RAW[value.itemsize]), value.itemsize // 2
        for place, name in zip((0, 8 * half), names, strict=True):
            if name != "_":
                self.write(name, (bits >> place).astype(RAW[half]))


@functools.cache
def _base_and_offset(operand: str) -> tuple[str, int]:
    base, _, offset = operand.strip("[]").partition("+")
    return base.strip(), int(offset or 0)


@functools.cache
def _constant(operand: str, dtype: Any) -> Array:
    """Of "-1", "0x7701U", "0f3F800000", or where shared memory begins."""
    if operand == "global_smem":
        value = 0
    elif operand.startswith("0f"):
        value = int(operand[2:], 16)
    else:
        value = int(operand.rstrip("U"), 0)
    bits = np.full((1, 1), value % 256**dtype.itemsize, RAW[dtype.itemsize])
    return bits != 0 if dtype == np.bool_ else bits
