"""A launch: all programs of a grid, some at a time."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ptx import arithmetic, conversions, tensor_cores, transfers, warps
from tests.ptx.machine import Machine
from tests.ptx.memory import Array, Global, MachineError, Shared
from tests.ptx.program import Program

# Imported for the instructions that they define.
DEFINED = (arithmetic, conversions, tensor_cores, transfers, warps)

_SHARED_BYTES = 232448
_AT_ONCE = 256  # programs, 32 of those that have shared memory


def run(
    program: Program, grid: Sequence[int], inputs: Sequence[Array], results: Sequence[Any]
) -> tuple[list[Array], collections.Counter[str]]:
    """The results of a launch, and what went to and from global memory.

    Args:
      program: of `parse`.
      grid: how many programs there are along x, y and z.
      inputs: arrays, as many as the kernel has.
      results: their shapes and dtypes.

    Raises:
      MachineError: where the program does what it must not.
    """
    # Results begin as NaN: what is not stored is seen.
    blank = [np.full(math.prod(x.shape) * x.dtype.itemsize, 0xFF, np.uint8) for x in results]
    arrays = [np.ascontiguousarray(x) for x in inputs]
    arrays += [b.view(x.dtype).reshape(x.shape) for b, x in zip(blank, results, strict=True)]
    memory = Global(arrays, len(inputs))
    scratch = len(program.parameters) - len(arrays)
    if scratch < 0:
        raise MachineError(f"{program.parameters} for {len(arrays)} arrays")
    pointers = memory.pointers + [0] * scratch
    total = math.prod(grid)
    step = _AT_ONCE // 8 if program.shares else _AT_ONCE
    for first in range(0, total, step):
        index = np.arange(first, min(total, first + step))
        ids = np.unravel_index(index, tuple(reversed(grid)))
        shared = Shared(len(index), _SHARED_BYTES if program.shares else 0)
        Machine(program, memory, shared, pointers, dict(zip("zyx", ids, strict=True))).run()
    return [memory.array(i) for i in range(len(inputs), len(arrays))], memory.traffic
