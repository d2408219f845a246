"""Shards inside `jax.shard_map`: over which mesh axes values vary, and what shards exchange."""

from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray

Names = tuple[str, ...]  # of mesh axes, the major one first
AxisName = str | Names  # as users give them


def varying_axes(*values: Any) -> frozenset[str]:
    """The mesh axes that any of these arrays (or avals) varies over, by `check_vma`'s types."""
    avals = (v if isinstance(v, ShapedArray) else jax.typeof(v) for v in values if v is not None)
    types = (getattr(aval, "manual_axis_type", None) for aval in avals)
    return frozenset[str]().union(*(t.varying for t in types if t is not None))


def unify(*xs: jax.Array | None) -> tuple[Any, ...]:
    """Makes all arrays vary over the same axes; the transpose is the sum that replication needs."""
    union = varying_axes(*xs)
    return tuple(_vary_over(x, union) for x in xs)


def unify_but_replicated(
    axis_name: Names | None, x: jax.Array, y: jax.Array | None
) -> tuple[Any, ...]:
    """`unify`, but a y replicated over the axis stays so: shards do not sum its gradient."""
    if axis_name is None:
        return unify(x, y)
    names = varying_axes(x, y, lax.axis_index(axis_name))
    known = y is not None and is_replicated(y, axis_name)
    return _vary_over(x, names), _vary_over(y, names - set(axis_name) if known else names)


def _vary_over(x: jax.Array | None, names: frozenset[str]) -> jax.Array | None:
    """x, varying over these mesh axes as well."""
    missing = frozenset() if x is None else names - varying_axes(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def checked(axis_name: Names) -> bool:
    """Whether types say what varies over these mesh axes (the check of `jax.shard_map`)."""
    return bool(varying_axes(lax.axis_index(axis_name)))


def is_replicated(x: jax.Array, axis_name: Names) -> bool:
    """Whether the type of x says that all shards have the same."""
    return checked(axis_name) and varying_axes(x).isdisjoint(axis_name)


def gather(x: jax.Array, axis_name: Names) -> jax.Array:
    """The x of all shards, along a new first axis: one exchange, after which all have the same."""
    if is_replicated(x, axis_name):
        x = lax.pcast(x, axis_name, to="varying")
    # Tiled, since for a new axis JAX forgets how explicit mesh axes split the others.
    to = "invarying" if checked(axis_name) else "varying"
    return lax.all_gather(x[None], axis_name, tiled=True, to=to)


def order(axis_name: Names, *, reverse: bool) -> tuple[jax.Array, int]:
    """This shard's number, in the order in which a running sum meets the shards; their count."""
    count, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    return count - 1 - number if reverse else number, count
