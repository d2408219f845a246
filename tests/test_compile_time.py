"""Every kernel compiles in seconds: held to a size from which that follows.

Nearly all of Triton's time goes to layouts of loads and stores: for each of them it walks all
operations that it reaches. So the time grows with (loads and stores) * operations. On the machine
with the H200, kernels of 493,000 took 40 s, of 97,000 6 s, and of 18,600 3 s.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import pallas_ops
from pallas_ops.core import launch
from tests import h200

LIMIT = 16_000
MEMORY = {"load", "store", "swap", "get", "masked_load", "masked_swap"}
THETA = ((32, 128), jnp.float32)
CACHE = ((32, 1, 32, 16), *[(32, 32768, 32)] * 2, (32, 1, 16, 128), *[(32, 32768, 128)] * 2)
FACTORED_KEYS = ((16, 1, 47, 64), *[(16, 16384, 2, 47)] * 2, *[(16, 16384, 2, 64)] * 2)


def full_queries(q: Any, ak: Any, av: Any, bk: Any, bv: Any, **options: Any) -> jax.Array:
    return pallas_ops.tpa_decode(q, ak, av, None, bk, bv, **options)


rows, columns = (partial(pallas_ops.logcumsumexp, axis=axis) for axis in (-1, 1))
chunks = partial(pallas_ops.chunk_cumsum_decay, chunk_size=128)
CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((columns, (shape,)) for shape in [(4, 2048, 512), (1, 100_000, 64), (2, 8192, 128)]),
    *((columns, (shape,)) for shape in [(8, 1024, 1024), (1, 4096, 2048), (16, 256, 256)]),
    *((columns, (shape,)) for shape in [(32, 512, 768), (12, 32768, 2048), (3, 1000, 3)]),
    *((rows, (shape,)) for shape in [(512, 3000), (12 * 2048, 32768), (3, 2**20), (5, 9)]),
    *((partial(columns, reverse=True, clip=9.0), (shape,)) for shape in [(12, 32768, 2048)]),
    (partial(rows, reverse=True, clip=9.0), ((12 * 2048, 32768),)),
    *((chunks, (shape,)) for shape in [(16, 32768, 2048), (16, 32768, 16)]),
    (partial(chunks, chunk_size=2**20, shift="sequence"), ((1, 2**20, 16),)),
    (pallas_ops.lrpe_cosine, ((4, 8192, 32, 128), THETA)),
    (partial(pallas_ops.lrpe_cosine, act="silu"), ((4, 8192, 32, 128), THETA)),
    (partial(pallas_ops.lrpe_cosine, act="softmax", axis=1), ((4, 8192, 32, 128), THETA)),
    (partial(pallas_ops.md_lrpe_cosine, shape=(64, 128)), ((4, 8192, 32, 128), THETA)),
    (pallas_ops.tpa_decode, CACHE),
    (partial(pallas_ops.tpa_decode, window=1000, batch_invariant=True), CACHE),
    (partial(full_queries, window=1000), FACTORED_KEYS),
]


def sizes(jaxpr: Any) -> tuple[int, int]:
    """Operations, and loads and stores among them, inner ones included."""
    operations = memory = 0
    for equation in jaxpr.eqns:
        operations += 1
        memory += equation.primitive.name in MEMORY
        for inner in _inner(equation):
            more, more_memory = sizes(inner)
            operations, memory = operations + more, memory + more_memory
    return operations, memory


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(x, "jaxpr", x)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


@pytest.mark.parametrize(("fn", "shapes"), CASES)
def test_kernels_are_small(
    fn: Callable[..., Any], shapes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, int] = {}

    def pallas_call(*args: Any, name: str, **options: Any) -> Callable[..., Any]:
        call = pl.pallas_call(*args, name=name, **options)

        def run(*operands: jax.Array) -> Any:
            (equation,) = jax.make_jaxpr(call)(*operands).jaxpr.eqns
            found[name] = max(found.get(name, 0), *(_product(x) for x in _inner(equation)))
            return call(*operands)

        return run

    monkeypatch.setattr(launch, "pl", SimpleNamespace(pallas_call=pallas_call))
    typed = [x if isinstance(x[0], tuple) else (x, jnp.bfloat16) for x in shapes]
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in typed]
    h200.lower_for_h200(h200.with_gradient(fn), *structs)
    assert found
    assert max(found.values()) <= LIMIT, found


def _product(kernel: Any) -> int:
    operations, memory = sizes(kernel)
    return operations * memory
