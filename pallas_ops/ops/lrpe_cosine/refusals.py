"""Which arguments lrpe_cosine and md_lrpe_cosine accept."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops.core import checks, implementations
from pallas_ops.core.dispatch import Implementation
from pallas_ops.ops.lrpe_cosine.activation import ACTIVATIONS
from pallas_ops.ops.lrpe_cosine.config import (
    SOFTMAX_FEATURES,
    SOFTMAX_SEQUENCE,
    WIDEST,
    LrpeCosineConfig,
    Params,
)

Struct = jax.ShapeDtypeStruct


def offset(value: Any, x: tuple[int, ...], *, given: bool) -> Any:
    """The offset as int32 [1] or [B], or None for the number 0.

    A number becomes a NumPy array, so that nothing is computed while arguments are checked.
    `given`: whether positions are given.
    """
    is_array = hasattr(value, "dtype") or jax.export.is_symbolic_dim(value)
    if is_array or (isinstance(value, Sequence) and not isinstance(value, str)):
        array: Any = checks.array("offset", value)
        checks.integers("offset", array)
        if array.shape not in ((), x[:1]):
            raise ValueError(f"offset.shape is {array.shape}; accepted: [] or [B] of x.shape {x}")
        if checks.is_beyond(value, -(2**30), 2**30):
            raise ValueError("offset has numbers beyond 2**30; accepted: -2**30 to 2**30")
        array = array.astype(jnp.int32).reshape(-1)
    elif checks.is_index(value):
        index = operator.index(value)
        if index == 0:
            return None
        if abs(index) > 2**30:
            raise ValueError(f"offset is {index}; accepted: -2**30 to 2**30")
        array = np.full((1,), index, np.int32)
    else:
        raise TypeError(
            f"{checks.shown('offset', value)}; accepted: an integer or an integer array"
        )
    if given:
        raise ValueError("offset and positions are both given; accepted: one of them")
    return array


def grid(shape: Any, num_prefix_tokens: Any, *, given: bool) -> tuple[tuple[int, ...] | None, int]:
    """The grid's shape, if any, and the number of prefix tokens; `given`: whether positions are."""
    num_prefix_tokens = checks.integer("num_prefix_tokens", num_prefix_tokens, least=0)
    if shape is None and given:
        return None, num_prefix_tokens
    is_array = isinstance(shape, np.ndarray) and shape.ndim == 1
    sizes = list(shape) if isinstance(shape, Sequence) or is_array else []
    # A size may be symbolic under `jax.export`.
    if not sizes or not all(checks.is_index(n) or jax.export.is_symbolic_dim(n) for n in sizes):
        raise TypeError(
            f"{checks.shown('shape', shape)}; accepted: the sizes of the grid, one int or more "
            "(None only with positions)"
        )
    known = [operator.index(size) if checks.is_index(size) else size for size in sizes]
    if any(size < 0 for size in known):
        raise ValueError(f"shape is {tuple(known)}; accepted: no negative sizes")
    return tuple(known), num_prefix_tokens


@checks.cached
def params(
    x: Struct,
    theta: Struct,
    offset: Struct | None,
    positions: Struct | None,
    on_grid: bool,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    axis_name: tuple[str, ...] | None,
    num_shards: int,
    act: str,
    axis: int | None,
    layout: str,
    implementation: Implementation | None = "xla",
    config: LrpeCosineConfig | None = None,
) -> Params:
    """The static arguments, or a refusal; a function of what can be hashed, so it runs once."""
    implementations.check(implementation, config, LrpeCosineConfig)
    checks.floating("x", x)
    checks.one_of("layout", layout, ("BNHD", "BHND"))
    axes = checks.Axes()
    axes.check("x", x, *(("B N H D", "B N D") if layout == "BNHD" else ("B H N D",)))
    num_axes = len(shape or ()) if on_grid else 1
    if positions is not None:
        num_axes = _check_positions(positions, axes, num_axes, on_grid=on_grid)
    of_theta = _check_theta(theta, axes.sizes, num_axes)
    n, d = axes.sizes["N"], axes.sizes["D"]
    _check_tokens(shape, num_prefix_tokens, n, num_shards)
    kind = _act(act, axis, len(x.shape), layout)
    if config is not None:
        _check_config(config, kind, d)
    sizes = axes.sizes | {"E": theta.shape[1], "N * H": n * axes.sizes.get("H", 1)}
    chosen = implementations.kernel_or_reference(implementation, x.dtype, sizes)
    if chosen != "xla" and kind == SOFTMAX_FEATURES and d > WIDEST:
        chosen = implementations.reference_instead(chosen, f"a softmax over {d} features")
    batch_offset = offset is not None and offset.shape != (1,)
    batch_positions = positions is not None and len(positions.shape) > 1 + on_grid
    return Params(
        act=kind,
        theta=of_theta,
        shape=shape or (),
        num_axes=num_axes,
        num_prefix_tokens=num_prefix_tokens,
        heads_first=layout == "BHND",
        per_batch=batch_offset or batch_positions,
        axis_name=axis_name,
        implementation=chosen,
        config=config,
    )


def _check_tokens(shape: tuple[int, ...] | None, prefix: int, n: Any, num_shards: int) -> None:
    """Whether the tokens of the prefix and of the grid are the n tokens of each shard."""
    every = implementations.length(n, num_shards)
    of_shards = f" of {num_shards} shards" if num_shards > 1 else ""
    if shape is not None and prefix + math.prod(shape) != every:
        raise ValueError(
            f"shape is {shape} and num_prefix_tokens {prefix}; accepted: sizes with "
            f"num_prefix_tokens + prod(shape) = N{of_shards} = {every}"
        )
    if isinstance(n, int) and prefix > every:
        raise ValueError(f"num_prefix_tokens is {prefix}; accepted: at most N{of_shards} = {every}")


def _check_positions(x: Struct, axes: checks.Axes, num_axes: int, *, on_grid: bool) -> int:
    """The number of axes that positions have, given that of the grid (0 if there is no grid)."""
    real = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
    if not real:
        raise TypeError(f"positions.dtype is '{x.dtype}'; accepted: integers or floating numbers")
    if num_axes:
        axes.learn("shape", K=num_axes)
    axes.check("positions", x, *(("N K", "B N K") if on_grid else ("N", "B N")))
    count = axes.sizes.pop("K")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"positions.shape is {x.shape}; accepted: an int for K, 1 or more")
    return count


def _check_theta(theta: Struct, sizes: dict[str, int], num_axes: int) -> str:
    """The names of theta's axes (see `Params`)."""
    checks.any_floating("theta", theta)
    heads, d = sizes.get("H", 1), sizes["D"]
    fits = len(theta.shape) == 2 and theta.shape[0] in (1, heads)
    if num_axes == 1:
        what = f"E from 1 to D = {d}"
        fits = fits and 1 <= theta.shape[1] <= max(d, 1)  # in this order d may be symbolic
    else:
        what = f"{num_axes} * E >= D = {d}"
        fits = fits and theta.shape[1] >= 1 and num_axes * theta.shape[1] >= d
    if not fits:
        forms = "[1, E]" if heads == 1 else f"[1, E] or [H, E] with H = {heads}"
        raise ValueError(f"theta.shape is {theta.shape}; accepted: {forms} and {what}")
    width = {1: "single", d: "d"}.get(theta.shape[1], "e") if num_axes == 1 else "e"
    return f"{'h' if theta.shape[0] == heads else 'one'} {width}"


def _act(act: Any, axis: Any, rank: int, layout: str) -> str:
    checks.one_of("act", act, (*ACTIVATIONS, "softmax"))
    if act != "softmax":
        if axis is not None:
            raise ValueError(f"axis is {axis!r}; accepted: None, as act is {act!r}, not 'softmax'")
        return str(act)
    sequence = 2 if layout == "BHND" else 1
    names = {rank - 1: SOFTMAX_FEATURES, sequence: SOFTMAX_SEQUENCE}
    fits = checks.is_index(axis) and -rank <= operator.index(axis) < rank
    found = operator.index(axis) % rank if fits else None
    if found not in names:
        raise ValueError(
            f"{checks.shown('axis', axis)}; accepted, for a softmax: {rank - 1} or -1 (the "
            f"features), {sequence} or {sequence - rank} (the sequence)"
        )
    return names[found]


def _check_config(config: LrpeCosineConfig, act: str, d: int) -> None:
    if act == SOFTMAX_SEQUENCE and config.variant == "sequence":
        raise ValueError(
            "LrpeCosineConfig.variant is 'sequence', which has no loop over it; accepted, for a "
            "softmax over the sequence: 'block'"
        )
    if act == SOFTMAX_FEATURES and config.block_d < d:
        raise ValueError(
            f"LrpeCosineConfig.block_d is {config.block_d}; accepted, for a softmax over the "
            f"features: at least D = {d}"
        )
