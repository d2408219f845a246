"""Pallas' Triton backend, if this version of JAX has it: JAX announces that it will go.

Without it the package imports, and the references run.
"""

import importlib
from typing import Any

import jax

__all__ = ("NoKernelError", "plgpu", "require")


class NoKernelError(ValueError):
    """No kernel can run; where the implementation is chosen for the caller, the reference does."""

    def __init__(self, reason: str, hint: str = "") -> None:
        accepted = f"accepted: implementation=None or 'xla', which run jax.numpy{hint}"
        super().__init__(f"{reason}; {accepted}")


try:
    plgpu: Any = importlib.import_module("jax.experimental.pallas.triton")
except ImportError:
    plgpu = None

_NEEDED = "CompilerParams", "elementwise_inline_asm", "load", "store"


def require() -> None:
    missing = [name for name in _NEEDED if not hasattr(plgpu, name)]
    if missing:
        what = "no Pallas Triton backend" if plgpu is None else f"no Triton {', '.join(missing)}"
        reason = f"JAX {jax.__version__} has {what}, which the kernels need"
        raise NoKernelError(reason, ", or an earlier JAX")
