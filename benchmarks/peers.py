"""Functions of PyTorch as columns beside ours: on the same arrays, by the same clock and checks.

CUPTI sees all kernels of a process, whoever launched them, so `timing` measures these as well. Our
arrays reach them through DLPack, without a copy; their results are in PyTorch's memory, and count.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import timing
from benchmarks.cases import Function, Provider


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


def provider(name: str, make: Callable[..., Function], note: str, **options: Any) -> Provider:
    """A column; `make(torch, **point)` gives a function of PyTorch's tensors."""

    def adapted(**point: Any) -> Function:
        if not timing.on_gpu():
            raise NotImplementedError("no NVIDIA GPU for PyTorch to run on")
        torch = importlib.import_module("torch")
        torch.compiler.reset()  # it compiles a function 8 times, then runs it as it stands
        return Adapted(torch, make(torch, **point))

    return Provider(name=name, make=adapted, jit=False, note=note, **options)


class Adapted:
    """A function of tensors as one of JAX's arrays.

    The first call is made twice: compilation and tuning are no part of the peak.
    """

    def __init__(self, torch: Any, function: Function) -> None:
        self._torch = torch
        self._function = torch.no_grad()(function)
        self._is_first = True

    def __call__(self, *arrays: jax.Array) -> Any:
        tensors = [self._torch.from_dlpack(x) for x in arrays]
        if self._is_first:
            self._function(*tensors)
            self._torch.cuda.synchronize()
            self._torch.cuda.reset_peak_memory_stats()
            self._is_first = False
        result = self._function(*tensors)
        self._torch.cuda.synchronize()  # as block_until_ready, which does not know this stream
        return jax.dlpack.from_dlpack(result)


def forget() -> None:
    """Gives back what PyTorch keeps for later calls, and has its peak start anew."""
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most that PyTorch's own allocator held, if it has been used at all."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch else 0
