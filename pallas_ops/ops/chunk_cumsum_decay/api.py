"""The public face of chunk_cumsum_decay."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_ops.core import checks, forward_mode, implementations, shards
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.shards import AxisName
from pallas_ops.core.tiles import wide
from pallas_ops.ops.chunk_cumsum_decay import vjp
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig, Params, Shift
from pallas_ops.ops.chunk_cumsum_decay.reference import edges_of
from pallas_ops.scan.view import implementation_for


def chunk_cumsum_decay(
    x: ArrayLike,
    *,
    axis: SupportsIndex = 1,
    chunk_size: SupportsIndex = 128,
    reverse: bool | np.bool_ = False,
    shift: Shift | None = None,
    scale: ArrayLike | None = None,
    cu_seqlens: ArrayLike | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: ChunkCumsumDecayConfig | None = None,
) -> jax.Array:
    """Running sums (of log-decays, say) that restart at every chunk: a chunk-local cumsum.

    With y = scale * x, shifted, a chunk [s, e) with s = c * chunk_size, e = min(s + chunk_size, N):

        o_i = sum_{s<=j<=i} y_j, in reverse sum_{i<=j<e} y_j

    A shift puts y_j = scale * x_{j-1}, in reverse scale * x_{j+1}: "chunk" within the chunk, whose
    edge gets zero (an exclusive sum); "sequence" along all of the axis, so that a chunk's edge gets
    its neighbour's x and only the sequence's gets zero.

    Summed in float32, nothing ever subtracted. NaN and infinities act within the chunk whose sums
    they enter, from there on.

    Args:
      x: bfloat16, float16, float32 (float64 runs the reference), of any rank but 0.
      axis: the axis of the sums; none is transposed or copied for it.
      chunk_size: any int >= 1, a power of two or not; the last chunk may be shorter.
      reverse: sum from each chunk's end.
      shift: None, "chunk" or "sequence".
      scale: what x is multiplied by before it is summed. A number, or a real array of shape [],
        which may be traced and is differentiable. An array multiplies the float32 sums instead:
        they have to be finite, and are written and read once more.
      cu_seqlens: integers [S + 1], may be traced: where sequences that are packed along the axis
        begin, and the last one ends. Chunks are counted from each sequence's start, shifts stop at
        its ends, and what is before the first or after the last sequence gives 0. Bounds are
        clipped to [0, N], and one below an earlier one is raised to it. For ascending segment ids
        pass `jnp.searchsorted(segment_ids, jnp.arange(S + 1))`. Default: one sequence of N.
      dtype: that of the result; default: that of x.
      axis_name: inside `jax.shard_map`, the mesh axis (or a tuple of them, the major first) over
        which `axis` is sharded, in order: sums, and `cu_seqlens`, are those of the whole sequence.
        Shards that hold whole chunks exchange nothing but a shift's one position; others pass on
        the sum of what a chunk has in them.
      implementation: None (the kernel on NVIDIA GPUs; jax.numpy elsewhere or, with a warning, where
        none can run), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices, also of the gradient; None: by shape, dtype and GPU. "xla" takes none.

    Returns:
      An array of x's shape. Differentiable in x, the gradient being the op turned round, and in a
      scale that is an array.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: the kernel chunk_cumsum_decay of xopes (https://github.com/Doraemonzzz/xopes), to which
    it adds chunks of any size, any axis, the shift within a chunk, packed sequences and gradients.
    """
    static = axis, chunk_size, reverse, shift, implementation, config
    return _run(*prepare(x, scale, cu_seqlens, dtype, axis_name, *static))


def prepare(
    x: ArrayLike,
    scale: ArrayLike | None,
    cu_seqlens: ArrayLike | Sequence[int] | None,
    dtype: DTypeLike | None,
    axis_name: AxisName | None,
    *static: Any,
) -> tuple[Params, jax.Array, jax.Array | None, jax.Array | None]:
    """What `evaluate` takes, or a refusal; `static` is what `_check` takes beside these."""
    x, bounds = checks.array("x", x), checks.optional_array("cu_seqlens", cu_seqlens)
    checks.floating("x", x)
    factor = checks.scale("scale", scale, wide(x.dtype))
    number, factor = (None, factor) if isinstance(factor, jax.Array) else (factor, None)
    names = checks.axis_name(axis_name)
    num_shards = jax.lax.axis_size(names or ())
    structs = checks.signature(x), checks.signature(bounds)
    return _check(*structs, number, _dtype(dtype), names, num_shards, *static), x, bounds, factor


def _dtype(dtype: Any) -> Any:
    """In one form, so that it can be hashed; what is not a dtype is left to be refused.

    Without JAX's x64 mode, float64 is float32.
    """
    if dtype is None:
        return None
    # JAX takes whatever has a dtype, and remembers results by equality: 1 == np.float16(1).
    if not isinstance(dtype, str | type | np.dtype):
        return str(dtype)
    try:
        return jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):  # a ValueError: that of random keys
        return str(dtype)


@checks.cached
def _check(
    x: jax.ShapeDtypeStruct,
    bounds: jax.ShapeDtypeStruct | None,
    scale: float | None,
    dtype: Any,
    axis_name: tuple[str, ...] | None,
    num_shards: int,
    axis: SupportsIndex,
    chunk_size: Any,
    reverse: bool | np.bool_,
    shift: Shift | None,
    implementation: Implementation | None = "xla",
    config: ChunkCumsumDecayConfig | None = None,
) -> Params:
    """The static arguments, checked. Arguments can be hashed, so results are cached."""
    implementations.check(implementation, config, ChunkCumsumDecayConfig)
    axis = checks.axis(axis, x.shape)
    length = implementations.length(x.shape[axis], num_shards)
    chunk_size = _chunk_size(chunk_size, length)
    reverse = checks.flag("reverse", reverse)
    checks.one_of("shift", shift, (None, "chunk", "sequence"))
    if dtype is not None and dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"dtype is {str(dtype)!r}; accepted: None, bfloat16, float16, float32 or float64"
        )
    if bounds is not None:
        _check_bounds(bounds)
    dtypes = x.dtype, dtype or x.dtype
    sizes = {} if bounds is None else {"cu_seqlens": bounds.shape[0]}
    implementation = implementation_for(implementation, x.shape, axis, *dtypes, **sizes)
    if config and config.num_segments > 1 and (bounds is not None or chunk_size != max(1, length)):
        raise ValueError(
            f"config.num_segments is {config.num_segments}; accepted: 1, unless the axis is one "
            "chunk, without cu_seqlens"
        )
    return Params(
        axis=axis,
        chunk_size=chunk_size,
        reverse=reverse,
        shift=shift,
        scale=scale,
        dtypes=(jnp.dtype(x.dtype).name, jnp.dtype(dtype or x.dtype).name),
        axis_name=axis_name,
        implementation=implementation,
        config=config,
    )


def _chunk_size(chunk_size: Any, length: Any) -> Any:
    """At most the axis' length, either of which may be symbolic."""
    if not jax.export.is_symbolic_dim(chunk_size):
        chunk_size = checks.integer("chunk_size", chunk_size, least=1)
        if isinstance(length, int):
            return max(1, min(chunk_size, length))
    return jax.core.min_dim(chunk_size, length)


def _check_bounds(bounds: jax.ShapeDtypeStruct) -> None:
    if len(bounds.shape) != 1 or bounds.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens.shape is {bounds.shape}; accepted: (S + 1,), where S sequences begin and "
            "the last one ends"
        )
    checks.integers("cu_seqlens", bounds)


def evaluate(
    params: Params, x: jax.Array, cu_seqlens: jax.Array | None, factor: jax.Array | None
) -> jax.Array:
    """The sums of x, times a scale that is an array."""
    if params.axis == 0:  # the first axis of an `Op` is a batch
        lifted = dataclasses.replace(params, axis=1)
        return evaluate(lifted, x[None], cu_seqlens, factor)[0]
    if factor is not None:  # multiplies the sums: x outside of all sequences may be NaN
        full = jnp.dtype(wide(x.dtype))
        summed = dataclasses.replace(params, dtypes=(params.dtypes[0], full.name))
        sums = evaluate(summed, x, cu_seqlens, None)
        return (sums * factor.astype(full)).astype(params.dtypes[1])
    edges, names = None, params.axis_name
    if cu_seqlens is not None:
        edges = edges_of(cu_seqlens, x.shape[params.axis] * jax.lax.axis_size(names or ()))
    operands = shards.unify_but_replicated(names, x, edges)
    if params.implementation == "xla":
        return vjp.evaluate(params, *operands)
    return vjp.accumulate(params, *forward_mode.refuse("chunk_cumsum_decay", *operands))


_run: Callable[..., jax.Array] = jax.jit(evaluate, static_argnums=0, inline=True)
