"""A launch: all programs of a grid, some at a time."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ptx import arithmetic, conversions, tensor_cores, transfers, warps
from tests.ptx.machine import Machine
from tests.ptx.memory import Array, Global, MachineError
from tests.ptx.program import Program
from tests.ptx.shared import Shared

# Imported for the instructions that they define.
DEFINED = (arithmetic, conversions, tensor_cores, transfers, warps)

AT_ONCE = 128  # programs


def run(
    program: Program,
    grid: Sequence[int],
    inputs: Sequence[Array],
    results: Sequence[Any],
    traffic: collections.Counter[str] | None = None,
) -> list[Array]:
    """The results of a launch.

    Args:
      program: of `parse`.
      grid: how many programs there are along x, y and z.
      inputs: arrays, as many as the kernel has.
      results: their shapes and dtypes.
      traffic: where to count what goes to and from memory: "loads bytes", "shared cycles", ..

    Raises:
      MachineError: where the program does what it must not.
    """
    # Results begin as NaN: what is not stored is seen.
    blank = [np.full(math.prod(x.shape) * x.dtype.itemsize, 0xFF, np.uint8) for x in results]
    arrays = [np.ascontiguousarray(x) for x in inputs]
    arrays += [b.view(x.dtype).reshape(x.shape) for b, x in zip(blank, results, strict=True)]
    memory = Global(arrays, len(inputs), traffic)
    scratch = len(program.parameters) - len(arrays)
    if scratch < 0:
        raise MachineError(f"{program.parameters} for {len(arrays)} arrays")
    pointers = memory.pointers + [0] * scratch
    total = math.prod(grid)
    with np.errstate(all="ignore"):
        for first in range(0, total, AT_ONCE):
            index = np.arange(first, min(total, first + AT_ONCE))
            ids = np.unravel_index(index, tuple(reversed(grid)))
            shared = Shared(len(index) if program.shares else 0, traffic)
            Machine(program, memory, shared, pointers, dict(zip("zyx", ids, strict=True))).run()
    return [memory.array(i) for i in range(len(inputs), len(arrays))]
