"""The only place that launches a Pallas kernel."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import ManualAxisType

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
    in_specs: Sequence[pl.BlockSpec | None],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int = 1,
    messages: Sequence[jax.ShapeDtypeStruct] = (),
    message_spec: pl.BlockSpec | None = None,
) -> list[jax.Array]:
    """Runs `kernel` over `grid`; an absent operand's ref is None.

    Refs of `messages`, which begin as zeros and are no results, come last.
    """
    blanks = [jnp.zeros(x.shape, x.dtype) for x in messages]
    given, results = sum(x is not None for x in operands), len(out_shape)

    def without_blanks(*refs: Any) -> None:
        kernel(*refs[: len(operands)], *refs[len(operands) + len(blanks) :])

    call: Callable[..., Any] = pl.pallas_call(
        # A fresh function per launch: JAX 0.11.0 to 0.11.2 may otherwise reuse a kernel traced
        # for another grid (jax-ml/jax#40847).
        without_blanks,
        # Inside `jax.shard_map` Pallas asks over what results vary: below dispatch, nothing does.
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=ManualAxisType())
            for x in (*out_shape, *messages)
        ],
        grid=grid,
        in_specs=[*in_specs, *[message_spec] * len(blanks)],
        out_specs=[*out_specs, *[message_spec] * len(blanks)],
        input_output_aliases={given + i: results + i for i in range(len(blanks))},
        name=f"pallas_ops_{name}",
        interpret=is_interpreted(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
    return list(call(*operands, *blanks)[:results])
