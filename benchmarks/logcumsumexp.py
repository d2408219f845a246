"""Cumulative log-sum-exp along any axis. `python -m benchmarks.logcumsumexp --help`"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import command, peers, sweep
from benchmarks.cases import EAGER, Benchmark, Case, Data, Function, Provider, Sizes, implementation
from pallas_ops import LogcumsumexpConfig, logcumsumexp, reference

FEW = 64


def padded(x: jax.Array, *, axis: int) -> jax.Array:
    """Each row's or column's first quarter or less is -inf, as a mask on the left leaves it."""
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 3 - axis)
    return jnp.where(
        position * 4 * 61 < row % 61 * x.shape[axis], jnp.asarray(-jnp.inf, x.dtype), x
    )


def wide(x: jax.Array, *, axis: int) -> jax.Array:
    """Every tenth row or column ranges over several hundred."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 3 - axis)
    return jnp.where(row % 10 == 0, jnp.asarray(60, x.dtype) * x, x)


# Axis, and what to make of normal numbers. `last` has rows of 2,048.
CASES: dict[str, tuple[int, Data | None]] = {
    "last": (2, None),
    "last-padded": (2, partial(padded, axis=2)),
    "last-wide": (2, partial(wide, axis=2)),
    "axis1": (1, None),
    "axis1-padded": (1, partial(padded, axis=1)),
    "axis1-wide": (1, partial(wide, axis=1)),
    "few": (1, None),
    "few-padded": (1, partial(padded, axis=1)),
    "few-wide": (1, partial(wide, axis=1)),
}


def few(where: str) -> bool:
    return where.startswith("few")


def case(dtype: Any, *, where: str, batch: int, dim: int, n: int) -> Case:
    axis, data = CASES[where]
    shape = (1, 4 * n, FEW) if few(where) else (batch, n, dim)
    what = "" if where == "last" else f"-{where}".replace("few", f"columns{FEW}-length4n")
    return Case(
        title=f"logcumsumexp-{{metric}}-{{mode}}-batch{shape[0]}-dim{shape[2]}-{{dtype}}{what}",
        inputs=(jax.ShapeDtypeStruct(shape, dtype),),
        reference=partial(reference.logcumsumexp, axis=axis),
        data=data,
    )


def recurrence(*, where: str, **_: Any) -> LogcumsumexpConfig:
    segments = 256 if few(where) else 1
    return LogcumsumexpConfig(variant="recurrence", block_n=16, block_c=32, num_segments=segments)


def parallel(*, where: str, **_: Any) -> LogcumsumexpConfig:
    if CASES[where][0] == 2:
        return LogcumsumexpConfig(block_n=2048, block_exact=256, num_warps=2)
    segments = 256 if few(where) else 1
    return LogcumsumexpConfig(
        block_n=64, block_c=32, block_exact=32, num_segments=segments, num_warps=2, num_stages=2
    )


def kernel(
    name: str, config: Callable[..., LogcumsumexpConfig | None], note: str, **options: Any
) -> Provider:
    def make(*, where: str, **point: Any) -> Function:
        return partial(
            logcumsumexp,
            axis=CASES[where][0],
            implementation=implementation(),
            config=config(where=where, **point),
        )

    return Provider(name=name, make=make, kernel=True, note=note, **options)


def function(name: str, call: Function, note: str, **options: Any) -> Provider:
    def make(*, where: str, **_: Any) -> Function:
        return partial(call, axis=CASES[where][0])

    return Provider(name=name, make=make, note=note, **options)


def cumlogsumexp(x: jax.Array, *, axis: int) -> jax.Array:
    """JAX's own, in float32, since in bfloat16 it also sums in bfloat16."""
    return lax.cumlogsumexp(x.astype(jnp.float32), axis).astype(x.dtype)


def jax_own(*, where: str, **_: Any) -> Function:
    if where.endswith("padded"):
        raise NotImplementedError("its gradient is NaN after -inf")
    return partial(cumlogsumexp, axis=CASES[where][0])


def scan(x: jax.Array, *, axis: int) -> jax.Array:
    o: jax.Array = lax.associative_scan(jnp.logaddexp, x.astype(jnp.float32), axis=axis)
    return o.astype(x.dtype)


def in_torch(_: Any, *, where: str, **__: Any) -> Function:
    return lambda x: x.float().logcumsumexp(CASES[where][0]).to(x.dtype)


def of_xopes(module: Any, *, where: str, **_: Any) -> Function:
    dim = CASES[where][0] - 3
    return lambda x: module.lcse_parallel_triton(x, dim=dim)[0]


def sizes(*, where: str, **_: Any) -> Sizes:
    return "few" if where.endswith(("padded", "wide")) else "all"


def proposals(*, where: str, **_: Any) -> list[Provider]:
    """Tiles of rows; of columns, 16 to 64 beside each other; and, for few, segments."""
    tried = partial(sweep.configs, LogcumsumexpConfig)
    if CASES[where][0] == 2:
        configs = tried(
            block_n=(512, 1024, 2048), block_c=(1, 2), block_exact=(256, 512), num_warps=(1, 2)
        )
    elif few(where):
        configs = tried(
            block_n=(64, 128),
            block_c=(32, 64),
            block_exact=(32,),
            num_segments=(128, 264, 528),
            num_warps=(2, 4),
            num_stages=(2, 3),
        )
    else:
        configs = tried(
            block_n=(64, 128),
            block_c=(32, 64),
            block_exact=(16, 32, 64),
            num_warps=(1, 2, 4),
            num_stages=(2, 3),
        )
    configs += tried(
        variant=("recurrence",),
        block_n=(16, 32),
        block_c=(32, 64),
        num_segments=(256, 511) if few(where) else (1,),
        num_warps=(1, 2),
    )
    return [kernel(sweep.label(c), sweep.always(c), "") for c in (None, *configs)]


BENCHMARK = Benchmark(
    op="logcumsumexp",
    case=case,
    providers=(
        kernel("rpl", recurrence, "recurrence: step by step, a column a lane", sizes="few"),
        kernel(
            "ppl",
            parallel,
            "parallel: tiles with a scan, one launch choice for all shapes",
            sizes="few",
        ),
        kernel("pallas", lambda **_: None, "the default: chosen by shape"),
        function("jnp", reference.logcumsumexp, "the reference, eager", **EAGER),
        function("jit", reference.logcumsumexp, "the reference, jitted"),
        Provider(
            name="lax", make=jax_own, note="jax.lax.cumlogsumexp in float32, jitted", sizes="few"
        ),
        function("scan", scan, "jax.lax.associative_scan of logaddexp in float32", sizes="few"),
        *peers.pair(in_torch, "logcumsumexp in float32"),
        peers.xopes("logcumsumexp.lcse_parallel_triton", of_xopes, "lcse_parallel_triton"),
    ),
    x="n",
    grid={"where": tuple(CASES), "batch": (12,), "dim": (2048,), "n": [2**k for k in range(9, 16)]},
    quick={"where": ("last", "axis1", "few"), "n": (512, 8192, 32768)},
    small={"where": ("last", "axis1-padded", "few"), "batch": (2,), "dim": (64,), "n": (16,)},
    modes=("fwd", "bwd"),
    sizes=sizes,
    point_s=1.5,
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
