"""NVIDIA's assembler, which needs no GPU: registers and spills of compiled kernels."""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

_REPORT = re.compile(
    r"Compiling entry function '([^']+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What ptxas says of one kernel; the stack holds spills and any arrays in local memory."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def kernels(ptx: Sequence[str]) -> tuple[Kernel, ...]:
    """Every kernel of some modules, by name."""
    return tuple(
        Kernel(
            name=name,
            registers=int(registers),
            spill_bytes=int(stores) + int(loads),
            stack_bytes=int(stack),
        )
        for name, stack, stores, loads, registers in sorted(
            found for text in ptx for found in _REPORT.findall(_assemble(text))
        )
    )


def folders(module: str) -> list[str]:
    """The folders of an installed package, without importing it."""
    with contextlib.suppress(ModuleNotFoundError):
        if spec := importlib.util.find_spec(module):
            return list(spec.submodule_search_locations or [])
    return []


@functools.cache
def pretended() -> str:
    """A folder of CUDA whose assembler makes empty files: XLA gives PTX in 3/4 of the time."""
    real = pathlib.Path(str(executable()))
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "nvvm").symlink_to(real.parents[1] / "nvvm")  # NVIDIA's mathematical functions
    (folder / "bin").mkdir()
    (folder / "bin/ptxas").write_text(
        f"""#!/bin/sh
case "$1" in --*) exec "{real}" "$@";; esac  # asked for its version
: > "$3"
"""
    )
    (folder / "bin/ptxas").chmod(0o755)
    return str(folder)


@functools.cache
def executable() -> str | None:
    """The wheel's assembler, which JAX prefers as well, or else the system's."""
    wheels = [*folders("nvidia.cuda_nvcc"), *folders("nvidia.cu13")]
    path = os.pathsep.join(os.path.join(wheel, "bin") for wheel in wheels)
    return shutil.which("ptxas", path=path) or shutil.which("ptxas")


def _assemble(ptx: str) -> str:
    """What `ptxas -v` has to say."""
    arch = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    command = [executable() or "ptxas", "-v", f"-arch={arch}", "-o", os.devnull, "-"]
    return subprocess.run(command, input=ptx, text=True, capture_output=True, check=True).stderr
