"""What the compiled kernels load and store, counted as they run on the emulated card.

This is what makes them fast: every byte once, 16 a lane, whole sectors.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.core.card import H200
from pallas_ops.ops.chunk_cumsum_decay import config as chunk_cumsum_decay
from pallas_ops.ops.logcumsumexp import config as logcumsumexp
from pallas_ops.ops.tpa_decode import choose
from pallas_ops.ops.tpa_decode import config as tpa_decode
from pallas_ops.scan.view import Sizes
from tests import emulate
from tests.support import kernel_implementation, random_array
from tests.tpa_decode import factors

KERNEL = kernel_implementation()
BF16 = jnp.bfloat16

pytestmark = pytest.mark.skipif(
    KERNEL == "interpret" or jax.default_backend() == "gpu", reason="kernels are not emulated here"
)


class Moves(NamedTuple):
    """A kernel, and how many bytes it must load and store for each element of x."""

    kernel: str
    loads: float
    stores: float
    run: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    gradients: int = 0  # of how many operands
    least: int = 320  # bytes of a warp's request, on average

    def __str__(self) -> str:
        return f"{self.kernel}{self.shapes[0]}"


def rotate(x: jax.Array, theta: jax.Array, **options: Any) -> jax.Array:
    return pallas_ops.lrpe_cosine(x, theta.astype(jnp.float32), implementation=KERNEL, **options)


def attend(bk: jax.Array, aq: jax.Array, ak: jax.Array, av: jax.Array, *rest: jax.Array) -> Any:
    bq, bv = rest
    return pallas_ops.tpa_decode(aq, ak, av, bq, bk, bv, implementation=KERNEL)


def scan(last: bool) -> Callable[..., jax.Array]:
    """With the launch of [12, 32768, 2048]."""
    shape = (12 * 2048, 32768, 1) if last else (12, 32768, 2048)
    sizes = Sizes.of(shape, 1, itemsize=2)
    config = logcumsumexp.choose(sizes, logcumsumexp.choose_block_n(sizes), H200)
    return partial(pallas_ops.logcumsumexp, axis=1, implementation=KERNEL, config=config)


def decay(columns: int, **options: Any) -> Callable[..., jax.Array]:
    """With the launch of [16, 32768, columns]."""
    sizes = Sizes(
        b=16 if columns > 1 else 2**15, n=32768, c=columns, size=128, count=256, itemsize=2
    )
    config = chunk_cumsum_decay.choose(sizes, H200)
    run = partial(pallas_ops.chunk_cumsum_decay, chunk_size=128, axis=1)
    return partial(run, implementation=KERNEL, config=config, **options)


ROWS, COLUMNS, HEADS = (4, 8192), (1, 512, 128), ((1, 32, 4, 128), (4, 128))
WALK = ((1, 512, 2, 128), (2, 128))
CACHE = tuple((1, *s) for s in [(4096, 128), (1, 32, 16), (4096, 32), (4096, 32), (1, 16, 128)])

CASES = (
    Moves("logcumsumexp", 2, 2, scan(True), (ROWS,)),
    Moves("logcumsumexp_backward", 4, 2, scan(True), (ROWS,), gradients=1),
    Moves("logcumsumexp", 2, 2, scan(False), (COLUMNS,)),
    # And a saved pair of float32 for 64 positions.
    Moves("logcumsumexp_backward", 4 + 0.125, 2, scan(False), (COLUMNS,), gradients=1),
    # theta's 4 bytes a number come from the cache, in two requests of half a sector each.
    Moves("lrpe_cosine", 2 + 8, 4, rotate, HEADS),
    Moves("lrpe_cosine_backward", 4 + 8, 2, rotate, HEADS, gradients=1),
    Moves("lrpe_cosine_backward", 6 + 8, 2, partial(rotate, act="silu"), HEADS, gradients=1),
    # Each of 8 parts loads theta once a warp, and stores a sum.
    Moves("lrpe_cosine_gradients", 6 + 0.5, 2 + 0.06, rotate, WALK, gradients=2),
    Moves("lrpe_cosine_gradients", 6.5, 2.06, partial(rotate, act="silu"), WALK, gradients=2),
    Moves("chunk_cumsum_decay", 2, 2, decay(2048), (COLUMNS,)),
    Moves("chunk_cumsum_decay", 2, 2, decay(2048, reverse=True), (COLUMNS,)),
    Moves("chunk_cumsum_decay", 2, 4, decay(2048, dtype=jnp.float32), (COLUMNS,)),
    Moves("chunk_cumsum_decay", 2, 2, decay(1), ((64, 8192),)),
    # A token is 5 bytes for each of bk's 128 numbers. The rest is what each of 128 splits has.
    Moves("tpa_decode", 5 + 1.25, 4, attend, (*CACHE, (1, 4096, 128))),
)


@pytest.mark.parametrize("moves", CASES, ids=str)
def test_every_byte_moves_once(rng: np.random.Generator, moves: Moves) -> None:
    xs = [random_array(rng, shape, BF16) for shape in moves.shapes]
    x, n = xs[0], moves.gradients

    def run(*xs: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *ys: moves.run(*ys, *xs[n:]), *xs[:n])
        return pull(out) if n else out

    with emulate.traffic() as traffic:
        jax.block_until_ready(jax.jit(run)(*xs))
    counts = traffic[f"pallas_ops_{moves.kernel}"]
    for what, expected in (("loads", moves.loads), ("stores", moves.stores)):
        moved = 32 * counts[f"{what} sectors"] / x.size
        assert 0.95 * expected <= moved <= 1.1 * expected, f"{moved} bytes of {what}"
        assert counts[f"{what} bytes"] / counts[f"{what} requests"] >= moves.least, f"narrow {what}"


def test_keys_that_no_query_sees_are_not_read(rng: np.random.Generator) -> None:
    """Of 1,024 keys; what each program reads of queries and cotangents is the same."""
    cache = tuple(random_array(rng, (1, 1024, size), BF16) for size in (32, 32, 128, 128))
    q = random_array(rng, (1, 1, 32, 128), BF16)

    def run(window: int, *xs: jax.Array) -> Any:
        def fn(ak: jax.Array, av: jax.Array, bk: jax.Array, bv: jax.Array) -> jax.Array:
            options: Any = dict(window=window, implementation=KERNEL)
            return pallas_ops.tpa_decode(q, ak, av, None, bk, bv, **options)

        out, pull = jax.vjp(fn, *xs)
        return pull(out)

    loaded = []
    for window in (256, 512):
        with emulate.traffic() as traffic:
            jax.block_until_ready(jax.jit(partial(run, window))(*cache))
        kernels = "pallas_ops_tpa_decode", "pallas_ops_tpa_decode_backward"
        loaded.append([traffic[name]["loads bytes"] for name in kernels])
    assert [b - a for a, b in zip(*loaded, strict=True)] == [256 * 640] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 128])
def test_pages_beyond_the_length_are_not_read(rng: np.random.Generator, size: int) -> None:
    """Of 4,096 keys in bfloat16 and int8, and one entry of the table a key or a block of keys."""
    pool = [random_array(rng, (4096 // size, size, width), BF16) for width in (32, 32)]
    pool += [jnp.ones((4096 // size, size, 128), jnp.int8) for _ in range(2)]
    aq, bq = random_array(rng, (1, 1, 32, 16), BF16), random_array(rng, (1, 1, 16, 128), BF16)
    table = jnp.arange(4096 // size)[None, ::-1]

    @jax.jit
    def run(length: jax.Array) -> jax.Array:
        ak, av, bk, bv = pool
        return pallas_ops.tpa_decode(
            aq, ak, av, bq, bk, bv, lengths=length, page_table=table, implementation=KERNEL
        )

    loaded = []
    for length in (1024, 2048):
        with emulate.traffic() as traffic:
            run(jnp.int32(length)).block_until_ready()
        loaded.append(traffic["pallas_ops_tpa_decode"]["loads bytes"])
    of_keys = (loaded[1] - loaded[0]) / 1024
    assert 384 <= of_keys <= 384 * 1.05


@pytest.mark.parametrize(("h", "ranks"), [(34, 2), (47, 2), (48, 1), (64, 1), (64, 2), (78, 2)])
def test_heads_come_from_many_banks_at_once(rng: np.random.Generator, h: int, ranks: int) -> None:
    """With the launch of 16 sequences of 16,384 tokens. As [entries, heads] it were 2.7 cycles."""
    axes: dict[str, Any] = dict(h=h, r=6, d=64, e=64, rk=ranks, rv=ranks)
    sizes = tpa_decode.Sizes(b=16, n=1, m=16384, **axes, dtype="bfloat16")
    config = dataclasses.replace(choose.choose(sizes, H200), num_splits=1)
    xs = factors(rng, BF16, b=1, m=4 * config.block_m, **axes)
    decode = partial(pallas_ops.tpa_decode, implementation=KERNEL, config=config)
    with emulate.traffic() as counts:
        if h % 16 == 0:
            decode(*xs).block_until_ready()
        else:
            out, pull = jax.vjp(decode, *xs)
            jax.block_until_ready(pull(out))
    count = counts["pallas_ops_tpa_decode"]
    assert count["shared cycles"] < 1.2 * count["shared turns"]
    if h % 16 > 0:
        count = counts["pallas_ops_tpa_decode_backward"]
        assert count["shared cycles"] < 1.25 * count["shared turns"]
