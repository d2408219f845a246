"""What lrpe_cosine and md_lrpe_cosine accept."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops.core import checks
from pallas_ops.core.dispatch import Implementation
from pallas_ops.ops.lrpe_cosine.activation import SOFTMAX_FEATURES, SOFTMAX_SEQUENCE
from pallas_ops.ops.lrpe_cosine.config import WIDEST, LrpeCosineConfig
from pallas_ops.ops.lrpe_cosine.vjp import Params

Struct = jax.ShapeDtypeStruct
ACTS = ("none", "relu", "sigmoid", "silu", "softmax")


def offset(value: Any, x: tuple[int, ...], *, given: bool) -> Any:
    """int32 [1] or [B], a number as NumPy's, to run nothing eagerly; None for the number 0."""
    if isinstance(value, bool) or not (hasattr(value, "dtype") or _is_index(value)):
        raise TypeError(f"offset is {value!r}; accepted: an integer or an integer array")
    if not hasattr(value, "dtype") and operator.index(value) == 0:
        return None
    if given:
        raise ValueError("offset and positions are both given; accepted: one of them")
    if not hasattr(value, "dtype"):
        value = operator.index(value)
        if abs(value) > 2**30:
            raise ValueError(f"offset is {value}; accepted: -2**30 to 2**30")
        return np.full((1,), value, np.int32)
    checks.integers("offset", value)
    if value.shape not in ((), x[:1]):
        raise ValueError(f"offset.shape is {value.shape}; accepted: [] or [B] with B={x[0]}")
    return jnp.asarray(value, jnp.int32).reshape(-1)


def positions(value: jax.Array, shared: str, per_batch: str) -> None:
    real = jnp.issubdtype(value.dtype, jnp.integer) or jnp.issubdtype(value.dtype, jnp.floating)
    if not real:
        raise TypeError(
            f"positions.dtype is {value.dtype.name!r}; accepted: integers or floating numbers"
        )
    ranks = len(shared.split()), len(per_batch.split())
    if value.ndim not in ranks:
        raise ValueError(
            f"positions.shape is {value.shape}; accepted: [{', '.join(shared.split())}] or "
            f"[{', '.join(per_batch.split())}]"
        )


def grid(shape: Any, num_prefix_tokens: Any, *, given: bool) -> tuple[int, ...] | None:
    """The grid's shape, if there is one."""
    if isinstance(num_prefix_tokens, bool) or not _is_index(num_prefix_tokens):
        raise TypeError(f"num_prefix_tokens is {num_prefix_tokens!r}; accepted: an int >= 0")
    if num_prefix_tokens < 0:
        raise ValueError(f"num_prefix_tokens is {num_prefix_tokens}; accepted: an int >= 0")
    if shape is None and given:
        return None
    if not isinstance(shape, Sequence) or not shape or not all(map(_is_index, shape)):
        raise TypeError(
            f"shape is {shape!r}; accepted: the grid's, a sequence of one int or more (None only "
            "with positions)"
        )
    if min(shape) < 0:
        raise ValueError(f"shape is {shape!r}; accepted: no negative sizes")
    return tuple(map(operator.index, shape))


@checks.cached
def params(
    x: Struct,
    theta: Struct,
    offset: Struct | None,
    positions: Struct | None,
    shape: tuple[int, ...] | None,
    num_prefix_tokens: int,
    act: str,
    axis: int | None,
    layout: str,
    implementation: Implementation | None,
    config: LrpeCosineConfig | None,
) -> Params:
    """The static arguments, or a refusal; a function of what can be hashed, so it runs once."""
    checks.implementation(implementation, config, LrpeCosineConfig)
    checks.same_floating({"x": x})
    sizes = _sizes(x, layout)
    num_axes = positions.shape[-1] if positions is not None else len(shape or (0,))
    _check_theta(theta, sizes, num_axes)
    if positions is not None and positions.shape[:-1] not in (
        (sizes["N"],),
        (sizes["B"], sizes["N"]),
    ):
        raise ValueError(
            f"positions.shape is {positions.shape}; accepted: N={sizes['N']} tokens, or those of "
            f"B={sizes['B']} batch elements"
        )
    if shape is not None:
        _check_grid(shape, num_prefix_tokens, sizes["N"], num_axes)
    kind = _act(act, axis, len(x.shape), layout)
    implementation = checks.kernel_or_reference(implementation, x.dtype, sizes)
    if kind == SOFTMAX_FEATURES and sizes["D"] > WIDEST:
        wide = f"a softmax over {sizes['D']} features"
        implementation = checks.reference_instead(implementation, wide)
    if implementation != "xla" and sizes["N"] * sizes.get("H", 1) > checks.LONGEST:
        long = f"N * H = {sizes['N'] * sizes.get('H', 1)} rows"
        implementation = checks.reference_instead(implementation, long)
    if config is not None:
        _check_config(config, kind, sizes["D"])
    batch_offset = offset is not None and offset.shape != (1,)
    batch_positions = positions is not None and len(positions.shape) == 3
    return Params(
        act=kind,
        shape=None if positions is not None else shape or (sizes["N"],),
        num_prefix_tokens=num_prefix_tokens,
        heads_first=layout == "BHND",
        per_batch=batch_offset or batch_positions,
        implementation=implementation,
        config=config,
    )


def _sizes(x: Struct, layout: str) -> dict[str, int]:
    if layout not in ("BNHD", "BHND"):
        raise ValueError(f"layout is {layout!r}; accepted: 'BNHD', 'BHND'")
    letters = "BND" if len(x.shape) == 3 and layout == "BNHD" else layout
    if len(x.shape) != len(letters):
        also = " or [B, N, D]" if layout == "BNHD" else ""
        raise ValueError(f"x.shape is {x.shape}; accepted: [{', '.join(layout)}]{also}")
    return dict(zip(letters, x.shape, strict=True))


def _check_theta(theta: Struct, sizes: dict[str, int], num_axes: int) -> None:
    if not jnp.issubdtype(theta.dtype, jnp.floating):
        raise TypeError(f"theta.dtype is {theta.dtype.name!r}; accepted: a floating one")
    heads, d = sizes.get("H", 1), sizes["D"]
    fits = len(theta.shape) == 2 and theta.shape[0] in (1, heads)
    if num_axes == 1:
        what = f"[{heads}, E] or [1, E] with E from 1 to {d}"
        fits = fits and 1 <= theta.shape[1] <= max(1, d)
    else:
        what = f"[{heads}, E] or [1, E] with {num_axes} * E >= {d}"
        fits = fits and theta.shape[1] >= 1 and num_axes * theta.shape[1] >= d
    if not fits:
        raise ValueError(f"theta.shape is {theta.shape}; accepted: {what}")


def _check_grid(shape: tuple[int, ...], num_prefix_tokens: int, n: int, num_axes: int) -> None:
    if num_prefix_tokens + math.prod(shape) != n or len(shape) != num_axes:
        raise ValueError(
            f"shape is {shape} and num_prefix_tokens {num_prefix_tokens}; accepted: {num_axes} "
            f"sizes with num_prefix_tokens + prod(shape) = N = {n}"
        )


def _act(act: str, axis: int | None, rank: int, layout: str) -> str:
    if act not in ACTS:
        raise ValueError(f"act is {act!r}; accepted: {', '.join(map(repr, ACTS))}")
    if act != "softmax":
        if axis is not None:
            raise ValueError(f"axis is {axis!r} and act {act!r}; accepted: None, but for softmax")
        return act
    sequence = 2 if layout == "BHND" else 1
    names = {rank - 1: SOFTMAX_FEATURES, sequence: SOFTMAX_SEQUENCE}
    found = axis % rank if axis is not None and _is_index(axis) and -rank <= axis < rank else None
    if found not in names:
        raise ValueError(
            f"axis is {axis!r}; accepted, for a softmax: {rank - 1} or -1 (the features), "
            f"{sequence} or {sequence - rank} (the sequence)"
        )
    return names[found]


def _check_config(config: LrpeCosineConfig, act: str, d: int) -> None:
    if act == SOFTMAX_SEQUENCE and config.variant == "sequence":
        raise ValueError(
            "LrpeCosineConfig.variant is 'sequence', which sees one token at a time; accepted, for "
            "a softmax over the sequence: 'block'"
        )
    if act == SOFTMAX_FEATURES and config.block_d < d:
        raise ValueError(
            f"LrpeCosineConfig.block_d is {config.block_d}; accepted, for a softmax over the "
            f"features: at least D = {d}"
        )


def _is_index(x: Any) -> bool:
    try:
        operator.index(x)
    except TypeError:
        return False
    return not isinstance(x, bool)
