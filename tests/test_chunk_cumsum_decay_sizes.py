"""chunk_cumsum_decay: tables of chunks near the end of int32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import launch
from pallas_ops.ops.chunk_cumsum_decay.config import Params, plan_of
from pallas_ops.ops.chunk_cumsum_decay.reference import edges_of
from pallas_ops.ops.chunk_cumsum_decay.tiles import table_of


@pytest.mark.parametrize("size", [2**20, 1_000_000_000, 1_200_000_000])
def test_chunks_of_a_long_packed_axis(size: int) -> None:
    n = 1_200_000_000
    x: Any = jax.ShapeDtypeStruct((n,), jnp.bfloat16)
    edges = edges_of(jnp.asarray([0, n]), n)
    with launch.interpreted(True):
        plan = plan_of(x, edges, Params(axis=0, chunk_size=size, dtypes=("bfloat16", "bfloat16")))
        start, stop, *_, live = np.asarray(table_of(plan, edges))
    starts = np.arange(0, n, size)
    np.testing.assert_array_equal(start[live == 1], starts)
    np.testing.assert_array_equal(stop[live == 1], np.minimum(starts + size, n))
