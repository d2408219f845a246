"""Which calls kernels take: positions, rows and columns of a `View` are counted in 32 bits."""

import math
from typing import Any

from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.implementations import kernel_or_reference


def implementation_for(
    implementation: Implementation | None,
    shape: tuple[int, ...],
    axis: int,
    *dtypes: Any,
    **sizes: int,
) -> Implementation | None:
    """The reference for what no kernel takes, else as asked; `sizes`: of other operands."""
    sizes |= {f"axis {i}": size for i, size in enumerate(shape)}
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    sizes |= {"all before it": outer, "all behind it": inner}
    for dtype in dtypes:
        implementation = kernel_or_reference(implementation, dtype, sizes)
    return implementation
