"""Whether a call runs as its kernel or as its reference, and refusals of what no kernel takes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_ops.core import checks
from pallas_ops.core.dispatch import Implementation

IMPLEMENTATIONS = (None, "triton", "xla", "interpret")
LONGEST = 2**31 - 2**20  # positions of an axis: an int32 counts them, and a tile beyond the end


def check(value: Any, config: Any, cls: type) -> None:
    """Refuses what is no implementation, and a config of another class or beside "xla"."""
    checks.one_of("implementation", value, IMPLEMENTATIONS)
    if config is not None and not isinstance(config, cls):
        raise TypeError(f"{checks.shown('config', config)}; accepted: None or a {cls.__name__}")
    if value == "xla" and config is not None:
        raise ValueError("config and implementation='xla' are both given; accepted: one of them")


def kernel_or_reference(
    implementation: Implementation | None, dtype: Any, sizes: Mapping[str, int]
) -> Implementation | None:
    """The reference for float64 and for sizes that no kernel takes; else as asked."""
    unknown = [name for name, size in sizes.items() if not isinstance(size, int)]
    if unknown:  # of `jax.export`
        return reference_instead(implementation, f"symbolic sizes ({', '.join(unknown)})")
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        return reference_instead(implementation, f"an axis of size 0 ({', '.join(empty)})")
    long = [name for name, size in sizes.items() if size > LONGEST]
    if long:
        return reference_instead(implementation, f"sizes above {LONGEST} ({', '.join(long)})")
    if jnp.dtype(dtype) not in checks.KERNEL_DTYPES:
        return reference_instead(implementation, jnp.dtype(dtype).name)
    return implementation


def reference_instead(implementation: Implementation | None, of: str) -> Implementation:
    """The reference, since no kernel takes `of`; a refusal if the kernel was asked for."""
    if implementation in ("triton", "interpret"):
        raise ValueError(
            f"{checks.shown('implementation', implementation)}, whose kernel does not take {of}; "
            "accepted: None or 'xla'"
        )
    return "xla"


def length(size: Any, num_shards: int) -> Any:
    """The positions of all shards, which an int32 must count; they may be symbolic."""
    length = size * num_shards
    if num_shards > 1 and isinstance(length, int) and length > LONGEST:
        raise ValueError(
            f"axis_name is given, and all shards have {length} positions; accepted: at most "
            f"{LONGEST}"
        )
    return length
