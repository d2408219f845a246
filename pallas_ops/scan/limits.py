"""Which calls kernels take: positions, rows and columns of a `View` are counted in 32 bits."""

import math
from typing import Any

import jax

from pallas_ops.core.dispatch import Implementation, Run
from pallas_ops.core.implementations import LONGEST, kernel_or_reference


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


def unless_too_many_rows(kernel: Run, reference: Run) -> Run:
    """`kernel`, or `reference` where `jax.vmap` has made more rows than a kernel counts."""

    def run(x: jax.Array, *others: Any, params: Any) -> Any:
        fits = math.prod(x.shape[: params.axis]) <= LONGEST
        return (kernel if fits else reference)(x, *others, params=params)

    return run
