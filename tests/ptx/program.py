"""The text of a kernel in PTX, taken apart."""

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[str, ...]
    guard: str | None  # the register that says which threads take part
    unless: bool  # whether those where it is false do

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @functools.cached_property
    def type(self) -> str:
        return self.words[-1]

    def __str__(self) -> str:
        guard = "" if self.guard is None else f"@{'!' * self.unless}{self.guard} "
        return f"{guard}{self.opcode} {', '.join(self.operands)};"


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    parameters: tuple[str, ...]
    num_threads: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    @property
    def shares(self) -> bool:
        """Whether it has shared memory."""
        return any("global_smem" in operand for i in self.code for operand in i.operands)


def parse(text: str) -> Program:
    """The one kernel of a PTX module."""
    assert text.count(".entry") == 1
    text = re.sub(r"//[^\n]*", "", text[text.index(".entry") :])
    head, _, body = text.partition("{")
    name, threads = re.search(r"\.entry (\w+)", head), re.search(r"\.(?:req|max)ntid (\d+)", head)
    assert name is not None
    assert threads is not None
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
    for words in map(str.split, re.split(r";|(?<=:)\s", body)):
        statement = " ".join(words)
        if statement.endswith(":"):
            labels[statement[:-1]] = len(code)
        elif statement and not statement.startswith("."):
            code.append(_instruction(statement))
    parameters = tuple(re.findall(r"(\w+_param_\d+)", head))
    return Program(name.group(1), parameters, int(threads.group(1)), tuple(code), labels)


@functools.cache
def _instruction(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)", statement)
    assert found is not None
    unless, guard, opcode, operands = found.groups()
    return Instruction(opcode, vector(operands), guard, bool(unless))


@functools.cache
def vector(text: str) -> tuple[str, ...]:
    """The parts of "a, {b, c}, [d + 4]" or of "{b, c}"."""
    if re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1]
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s])+", text)
    return tuple(parts)
