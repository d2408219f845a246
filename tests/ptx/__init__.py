"""A GPU of NumPy: runs what the compiler makes of a kernel, instruction by instruction.

All programs of a launch run in lockstep, all their threads at once, as arrays [programs, threads].
What a card would do and not tell is a `MachineError`: a load beyond an array, a store beyond a
result, a number in shared memory that no barrier orders or nobody wrote, two threads that disagree
about a place.
"""

from tests.ptx.launch import run as run
from tests.ptx.memory import MachineError as MachineError
from tests.ptx.program import Program as Program
from tests.ptx.program import parse as parse
