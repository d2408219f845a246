"""Pallas' Triton backend, if this version of JAX has it: JAX announces that it will go.

Without it the package imports, and the references run.
"""

import importlib
import warnings
from typing import Any

import jax

__all__ = ("NoKernelError", "fall_back", "plgpu", "require")


class NoKernelError(ValueError):
    """No kernel can run. If the caller did not ask for one, the reference runs, with a warning."""

    def __init__(self, reason: str, hint: str = "") -> None:
        accepted = f"accepted: implementation=None or 'xla', which run jax.numpy{hint}"
        super().__init__(f"{reason}; {accepted}")


def fall_back(name: str, implementation: str | None, error: NoKernelError) -> None:
    """Warns that jax.numpy runs; where the kernel was asked for, raises."""
    if implementation is not None:
        raise error
    warnings.warn(f"{name} runs as jax.numpy: {error}", stacklevel=2)


try:
    plgpu: Any = importlib.import_module("jax.experimental.pallas.triton")
except ImportError:
    plgpu = None

_NEEDED = "CompilerParams", "elementwise_inline_asm", "load", "store"


def require() -> None:
    """Raises NoKernelError where this version of JAX lacks what the kernels need."""
    missing = [name for name in _NEEDED if not hasattr(plgpu, name)]
    if missing:
        what = "no Pallas Triton backend" if plgpu is None else f"no Triton {', '.join(missing)}"
        reason = f"JAX {jax.__version__} has {what}, which the kernels need"
        raise NoKernelError(reason, ", or an earlier JAX")
