"""Which mesh axes a value varies over inside `jax.shard_map` (its replication check)."""

from typing import Any

import jax
from jax.core import ShapedArray


def axes(*values: Any) -> frozenset[str]:
    """The union of the manual mesh axes that arrays (or their avals) vary over."""
    avals = (v if isinstance(v, ShapedArray) else jax.typeof(v) for v in values if v is not None)
    types = (getattr(aval, "manual_axis_type", None) for aval in avals)
    return frozenset[str]().union(*(t.varying for t in types if t is not None))


def unify(*xs: jax.Array | None) -> tuple[Any, ...]:
    """Makes all arrays vary over the same axes; the transpose is the sum that replication needs."""
    union = axes(*xs)
    return tuple(over(x, union) for x in xs)


def over(x: jax.Array | None, names: frozenset[str]) -> jax.Array | None:
    """x, varying over these mesh axes as well."""
    missing = frozenset() if x is None else names - axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
