"""The public face of chunk_cumsum_decay."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops.core import checks, vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.dtypes import wide
from pallas_ops.ops.chunk_cumsum_decay import vjp
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig
from pallas_ops.ops.chunk_cumsum_decay.reference import Shift

SHIFTS = (None, "chunk", "sequence")


def chunk_cumsum_decay(
    x: jax.Array,
    *,
    axis: int = 1,
    chunk_size: int = 128,
    reverse: bool = False,
    shift: Shift | None = None,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
    dtype: Any = None,
    implementation: Implementation | None = None,
    config: ChunkCumsumDecayConfig | None = None,
) -> jax.Array:
    """Running sums (of log-decays, say) that restart at every chunk.

    With y = scale * x, shifted, a chunk [s, e) with s = c * chunk_size, e = min(s + chunk_size, N):

        o_i = sum_{s<=j<=i} y_j, in reverse sum_{i<=j<e} y_j

    A shift puts y_j = scale * x_{j-1}, in reverse scale * x_{j+1}: "chunk" within the chunk, whose
    edge gets zero (an exclusive sum); "sequence" along all of the axis, so that a chunk's edge gets
    its neighbour's x and only the sequence's gets zero.

    Summed in float32, nothing ever subtracted. NaN and infinities act within their own chunk, from
    their position on.

    Args:
      x: bfloat16, float16, float32 (float64 runs the reference), of any rank but 0.
      axis: the axis of the sums; none is transposed or copied for it.
      chunk_size: any int from 1 up, a power of two or not; the last chunk may be shorter.
      reverse: sum from each chunk's end.
      shift: None, "chunk" or "sequence".
      scale: what x is multiplied by before it is summed. A Python number.
      cu_seqlens: integers [S + 1], may be traced: where sequences that are packed along the axis
        begin, and the last one ends. Chunks are counted from each sequence's start, shifts stop at
        its ends, and what is before the first or behind the last sequence gives 0. Bounds are taken
        to lie in [0, N] and not to descend. Default: one sequence of N.
      dtype: that of the result; default: that of x.
      implementation: None (the Triton kernel where the code is lowered for an NVIDIA GPU, jax.numpy
        elsewhere), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices, of the gradient as well; None chooses by shape. "xla" takes none.

    Returns:
      An array of x's shape. Differentiable in x: the gradient is the op turned round.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: the kernel chunk_cumsum_decay of xopes (https://github.com/Doraemonzzz/xopes), to which
    it adds chunks of any size, any axis, the shift within a chunk, packed sequences and gradients.
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if cu_seqlens is not None and not isinstance(cu_seqlens, jax.Array):
        cu_seqlens = jnp.asarray(cu_seqlens)
    bounds = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
    sums = (axis, chunk_size, reverse, shift, scale)
    params = _check((x.shape, x.dtype), bounds, *sums, _dtype(dtype), implementation, config)
    return _run(x, cu_seqlens, params=params)  # type: ignore[no-any-return]


def _dtype(dtype: Any) -> Any:
    """In one form, so that it can be hashed; what is not a dtype is left to be refused.

    Without JAX's x64 mode, float64 is float32.
    """
    try:
        return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        return repr(dtype)


@checks.cached
def _check(
    x: tuple[tuple[int, ...], Any],
    bounds: tuple[tuple[int, ...], Any] | None,
    axis: int,
    chunk_size: int,
    reverse: bool,
    shift: Shift | None,
    scale: float | None,
    dtype: Any,
    implementation: Implementation | None,
    config: ChunkCumsumDecayConfig | None,
) -> vjp.Params:
    """The static arguments, or a refusal; a function of what can be hashed, so it runs once."""
    checks.implementation(implementation, config, ChunkCumsumDecayConfig)
    shape, own = x
    checks.same_floating({"x": jax.ShapeDtypeStruct(shape, own)})
    axis = checks.axis(axis, shape)
    integer = isinstance(chunk_size, int | np.integer) and not isinstance(chunk_size, bool)
    if not integer or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; accepted: an int >= 1")
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse is {reverse!r}; accepted: True or False")
    checks.one_of("shift", shift, SHIFTS)
    scale = checks.number_or_none("scale", scale)
    if scale is not None and not abs(scale) <= float(jnp.finfo(wide(own)).max):
        raise ValueError(f"scale is {scale!r}; accepted: None or a finite number")
    if dtype is not None and dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"dtype is {str(dtype)!r}; accepted: None, bfloat16, float16, float32 or float64"
        )
    if bounds is not None:
        _check_bounds(jax.ShapeDtypeStruct(*bounds))
    length = shape[axis] if isinstance(shape[axis], int) else checks.LONGEST
    if bounds is not None or chunk_size < length:
        _check_parts(config)
    return vjp.Params(
        axis=axis,
        chunk_size=max(1, min(int(chunk_size), length)),
        reverse=reverse,
        shift=shift,
        scale=scale,
        dtypes=(jnp.dtype(own).name, jnp.dtype(dtype or own).name),
        implementation=_implementation(implementation, shape, axis, (own, dtype or own)),
        config=config,
    )


def _check_parts(config: ChunkCumsumDecayConfig | None) -> None:
    if config and config.num_parts > 1:
        raise ValueError(
            f"config.num_parts is {config.num_parts}; accepted: 1, since not all of the axis is "
            "one chunk"
        )


def _check_bounds(bounds: jax.ShapeDtypeStruct) -> None:
    checks.integers("cu_seqlens", bounds)
    if len(bounds.shape) != 1 or not bounds.shape[0]:
        raise ValueError(
            f"cu_seqlens.shape is {bounds.shape}; accepted: (S + 1,), where S sequences begin and "
            "the last one ends"
        )


def _implementation(
    implementation: Implementation | None, shape: tuple[int, ...], axis: int, dtypes: Any
) -> Implementation | None:
    """The reference for what no kernel takes, else as asked."""
    sizes = {f"axis {i}": size for i, size in enumerate(shape)}
    for dtype in dtypes:
        implementation = checks.kernel_or_reference(implementation, dtype, sizes)
    if implementation == "xla":
        return implementation
    parts = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if max(parts) > vjp.TOO_LONG:
        of = f"{max(parts)} numbers along, before or behind the axis"
        return checks.reference_instead(implementation, of)
    return implementation


@functools.partial(jax.jit, static_argnames=("params",), inline=True)
def _run(x: jax.Array, cu_seqlens: jax.Array | None, *, params: vjp.Params) -> jax.Array:
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.astype(jnp.int32)
    operands: Any = vary.unify(x, cu_seqlens)
    if params.implementation == "xla":
        return vjp.reference(params, *operands)
    if params.axis > 0:
        return vjp.accumulate(params, *operands)
    x, cu_seqlens = operands  # the op's first axis is a batch
    out: jax.Array = vjp.accumulate(dataclasses.replace(params, axis=1), x[None], cu_seqlens)
    return out[0]
