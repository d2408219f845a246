"""The only place that launches a Pallas kernel."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.sharding import ManualAxisType

from pallas_ops.core.backend import NoKernelError, plgpu

_INTERPRETED = contextvars.ContextVar("pallas_ops_interpreted", default=False)


@contextlib.contextmanager
def interpreted(flag: bool) -> Iterator[None]:
    """Kernels launched inside are interpreted (on any platform) if `flag`."""
    token = _INTERPRETED.set(flag)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def is_interpreted() -> bool:
    return _INTERPRETED.get()


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array | None,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int = 1,
    in_specs: Any = pl.no_block_spec,
    out_specs: Any = pl.no_block_spec,
) -> list[jax.Array]:
    """Runs `kernel` over `grid`, where every program sees whole arrays, if no specs are given.

    An absent operand's ref is None, and so is its spec.

    Raises:
      NoKernelError: where the grid has more programs than CUDA counts.
    """
    if (count := math.prod(grid)) >= 2**31:
        raise NoKernelError(f"{name} would be {count} programs, and CUDA counts 2**31 - 1")

    def fresh(*refs: Any) -> None:
        kernel(*refs)

    call: Callable[..., Any] = pl.pallas_call(
        # A fresh function per launch: JAX 0.11.2 may otherwise reuse a kernel traced
        # for another grid (jax-ml/jax#40847).
        fresh,
        # Inside `jax.shard_map` Pallas asks over what results vary: below dispatch, nothing does.
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=ManualAxisType())
            for x in out_shape
        ],
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        name=f"pallas_ops_{name}",
        interpret=is_interpreted(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
    return list(call(*operands))
