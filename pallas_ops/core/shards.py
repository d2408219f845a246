"""What the shards of an axis exchange: inside `jax.shard_map`, or in one device's program."""

from typing import Any

import jax
from jax import lax

from pallas_ops.core import vary

Names = tuple[str, ...]  # of mesh axes, the major one first
AxisName = str | Names  # as users give them


def checked(axis_name: Names) -> bool:
    """Whether types say what varies over these mesh axes (the check of `jax.shard_map`)."""
    return bool(vary.axes(lax.axis_index(axis_name)))


def is_replicated(x: jax.Array, axis_name: Names) -> bool:
    """Whether the type of x says that all shards have the same."""
    return checked(axis_name) and vary.axes(x).isdisjoint(axis_name)


def unify(axis_name: Names | None, x: jax.Array, y: jax.Array | None) -> tuple[Any, ...]:
    """`vary.unify`, but what all shards have stays so: then its gradient is no sum over them."""
    if axis_name is None:
        return vary.unify(x, y)
    names = vary.axes(x, y, lax.axis_index(axis_name))
    known = y is not None and is_replicated(y, axis_name)
    return vary.over(x, names), vary.over(y, names - set(axis_name) if known else names)


def gather(x: jax.Array, axis_name: Names) -> jax.Array:
    """The x of all shards, along a new first axis: one exchange, after which all have the same."""
    known = checked(axis_name)
    if known and is_replicated(x, axis_name):
        x = lax.pcast(x, axis_name, to="varying")
    return lax.all_gather(x, axis_name, to="invarying" if known else "varying")


def order(axis_name: Names, *, reverse: bool) -> tuple[jax.Array, int]:
    """This shard's number, in the order in which a running sum meets the shards; their count."""
    count, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    return count - 1 - number if reverse else number, count
