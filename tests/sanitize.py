"""Every kernel once at odd sizes, forward and backward, to be watched by NVIDIA's checkers.

On a machine with a GPU:

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform # each array in memory of its own
    export XLA_FLAGS=--xla_gpu_autotune_level=0 # kernels tried out are slow to watch
    for tool in memcheck racecheck; do
      compute-sanitizer --tool $tool --kernel-name kns=pallas_ops python -m tests.sanitize
    done
    compute-sanitizer --tool initcheck python -m tests.sanitize # what XLA's kernels write, counts

Further words choose the calls that have one of them in their names.

Alone it shows that every element of every result is written: device memory is filled with NaN
before one run and with 1 before another, and their results are bit-equal.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ops
from pallas_ops import ChunkCumsumDecayConfig, LogcumsumexpConfig, LrpeCosineConfig, TpaDecodeConfig

Call = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def factors(b: int, n: int, m: int, h: int, r: int, d: int, e: int, ranks: int) -> tuple[Any, ...]:
    heads = (b, m, ranks, h)
    return (b, n, h, r), heads, heads, (b, n, r, d), (b, m, ranks, d), (b, m, ranks, e)


def pool(pages: int, size: int, h: int, d: int) -> tuple[Any, ...]:
    heads, features = (pages, size, h), (pages, size, d)
    return (2, 1, h, 6), heads, heads, (2, 1, 6, d), features, features


def paged(*xs: jax.Array, dtype8: Any = None, **options: Any) -> jax.Array:
    """From random pages; the table's entries beyond the lengths are garbage."""
    aq, ak, av, bq, bk, bv = xs
    if dtype8 is not None:
        bk, bv = (jnp.round(8 * jax.lax.stop_gradient(x)).astype(dtype8) for x in (bk, bv))
    count, size = ak.shape[:2]
    table = np.random.default_rng(1).permutation(count)[: count // 2 * 2].reshape(2, -1)
    table[1, 3:] = 2**31 - 1
    return pallas_ops.tpa_decode(
        aq, ak, av, bq, bk, bv,
        lengths=np.array([table.shape[1] * size, 2 * size + 3]), page_table=table, **options,
    )  # fmt: skip


lcse, chunks = pallas_ops.logcumsumexp, pallas_ops.chunk_cumsum_decay
lrpe, decode = pallas_ops.lrpe_cosine, pallas_ops.tpa_decode
theta = (3, 37)
CALLS: dict[str, Call] = {
    "columns": (partial(lcse, axis=1), ((3, 131, 67),)),
    "few segments": (partial(lcse, axis=1, reverse=True), ((1, 1001, 5),)),
    "many segments": (partial(lcse, axis=1), ((2, 4099, 3),)),
    "columns, step by step": (
        partial(lcse, axis=1, config=LogcumsumexpConfig(variant="recurrence", block_n=16)),
        ((2, 77, 9),),
    ),
    "rows": (partial(lcse, axis=1), ((37, 2047),)),
    "rows reversed": (partial(lcse, axis=1, reverse=True), ((5, 1025),)),
    "chunks": (partial(chunks, chunk_size=31, shift="sequence"), ((2, 1003, 67),)),
    "chunks of rows": (partial(chunks, chunk_size=31, reverse=True), ((7, 1003),)),
    "packed chunks": (
        partial(chunks, chunk_size=16, shift="chunk", cu_seqlens=np.array([0, 5, 5, 90, 131])),
        ((2, 131, 3),),
    ),
    "one chunk": (
        partial(chunks, chunk_size=4099, config=ChunkCumsumDecayConfig(block_n=64, num_segments=9)),
        ((1, 4099, 5),),
    ),
    "rotated": (lrpe, ((2, 101, 3, 37), theta)),
    "rotated silu": (partial(lrpe, act="silu"), ((2, 101, 3, 37), theta)),
    "rotated, angles kept": (
        partial(lrpe, config=LrpeCosineConfig(cache_angles=True)),
        ((2, 101, 3, 37), theta),
    ),
    "softmax over tokens": (partial(lrpe, act="softmax", axis=1), ((2, 1301, 3, 37), theta)),
    "softmax over features": (partial(lrpe, act="softmax", axis=3), ((2, 101, 3, 37), theta)),
    "grid": (
        partial(pallas_ops.md_lrpe_cosine, shape=(7, 11), num_prefix_tokens=2),
        ((2, 79, 3, 37), (3, 19)),
    ),
    "decode": (decode, factors(3, 1, 333, 9, 5, 40, 24, 1)),
    "decode in splits": (
        partial(decode, config=TpaDecodeConfig(block_h=4, block_m=32, num_splits=7)),
        factors(2, 3, 501, 6, 5, 24, 40, 2),
    ),
    "decode rounded": (partial(decode, precision="default"), factors(2, 1, 133, 34, 6, 64, 64, 2)),
    "decode of gathered heads": (decode, factors(2, 1, 133, 34, 6, 64, 64, 2)),
    "decode of few gathered heads": (decode, factors(2, 1, 133, 22, 6, 64, 64, 2)),
    "decode of an odd number of heads": (
        partial(decode, batch_invariant=True),
        factors(2, 1, 1133, 47, 6, 64, 64, 2),
    ),
    "decode of two tiles of heads": (
        partial(decode, window=77),
        factors(1, 2, 133, 78, 6, 64, 64, 2),
    ),
    "decode in passes of two queries": (decode, factors(2, 5, 133, 34, 6, 64, 64, 2)),
    "decode of pages": (paged, pool(21, 16, 34, 64)),
    "decode of pages in eight bits": (partial(paged, dtype8=jnp.int8), pool(40, 7, 32, 128)),
    "decode ragged": (
        partial(decode, lengths=np.array([0, 77, 333])),
        factors(3, 2, 333, 7, 3, 64, 64, 1),
    ),
}


def operands(call: Call, dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in call[1]]


def both(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*xs: jax.Array) -> Any:
        out, pull = jax.vjp(fn, *xs)
        return out, pull(out)

    return run


def fill(value: float) -> None:
    """Device memory that is free, in blocks of all sizes that results have."""
    blocks = [jnp.full(2**k, value, jnp.float32) for k in range(6, 22) for _ in range(8)]
    jax.block_until_ready(blocks)


def main(words: list[str]) -> None:
    for name, call in CALLS.items():
        if words and not any(word in name for word in words):
            continue
        for dtype in (jnp.bfloat16, jnp.float32):
            xs = operands(call, dtype)
            run = jax.jit(both(partial(call[0], implementation="triton"))).lower(*xs).compile()
            results = []
            for value in (np.nan, 1.0):
                fill(value)
                results.append(jax.device_get(run(*xs)))
            jax.tree.map(partial(np.testing.assert_array_equal, strict=True), *results)
            assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(results)), name
        sys.stdout.write(f"{name}: ok\n")


if __name__ == "__main__":
    main(sys.argv[1:])
