"""Functions of PyTorch as columns beside ours: on the same arrays, by the same clock and checks.

CUPTI sees all kernels of a process, whoever launched them, so `timing` measures these as well. Our
arrays reach them through DLPack, without a copy; their results are in PyTorch's memory, and count.
They have no backward pass here.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import timing
from benchmarks.cases import Function, Provider

PACKAGES = {"torch": "torch", "fla": "fla-core", "xopes": "xopes"}


def installed(*modules: str) -> bool:
    return all(m in sys.modules or importlib.util.find_spec(m) for m in modules)


def versions() -> dict[str, str]:
    """Of each package that columns come from; "absent" where it is not installed."""

    def version(module: str, package: str) -> str:
        if not installed(module):
            return "absent"
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "from its repository"

    return {package: version(module, package) for module, package in PACKAGES.items()}


def provider(
    name: str, make: Callable[..., Function], note: str, *modules: str, **options: Any
) -> Provider:
    """A column; `make(torch, **point)` gives a function of PyTorch's tensors."""

    def adapted(**point: Any) -> Function:
        if not timing.on_gpu():
            raise NotImplementedError("no NVIDIA GPU for PyTorch to run on")
        torch = importlib.import_module("torch")
        torch.compiler.reset()  # it compiles a function 8 times, then runs it as it stands
        return Adapted(torch, make(torch, **point))

    given: dict[str, Any] = dict(jit=False, modes=("fwd",), needs=("torch", *modules)) | options
    return Provider(name=name, make=adapted, note=note, **given)


def pair(make: Callable[..., Function], note: str, **options: Any) -> list[Provider]:
    """PyTorch's column, called as it is, and that of torch.compile."""

    def compiled(torch: Any, **point: Any) -> Function:
        function: Function = torch.compile(make(torch, **point))
        return function

    options["sizes"] = "largest"
    return [
        provider("torch", make, f"PyTorch: {note}", **options),
        provider("torch_compile", compiled, "the same, torch.compile", **options),
    ]


def xopes(module: str, make: Callable[..., Function], note: str) -> Provider:
    """A column of xopes; `make(module, **point)` gives a function of tensors."""

    def imported(_: Any, **point: Any) -> Function:
        return make(importlib.import_module(f"xopes.ops.{module}"), **point)

    note = f"xopes' Triton kernel, which tries its launches first: {note}"
    return provider("xopes", imported, note, "xopes", sizes="largest")


class Adapted:
    """A function of tensors as one of JAX's arrays."""

    def __init__(self, torch: Any, function: Function) -> None:
        self._torch = torch
        self._function = torch.no_grad()(function)

    def __call__(self, *arrays: jax.Array) -> Any:
        result = self._function(*map(self._torch.from_dlpack, arrays))
        self._torch.cuda.synchronize()  # as block_until_ready, which does not know this stream
        return jax.dlpack.from_dlpack(result)

    def peak_bytes(self, *arrays: jax.Array) -> int:
        """The most that one more call takes of PyTorch's own memory, in which its result is."""
        cuda = self._torch.cuda
        kept = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        self(*arrays)
        return int(cuda.max_memory_allocated() - kept)
