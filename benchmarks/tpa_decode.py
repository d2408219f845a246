"""TPA decode: one query token against m cached tokens. `python -m benchmarks.tpa_decode --help`"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command, sweep
from benchmarks.cases import Benchmark, Case, Function, Provider, implementation
from pallas_ops import TpaDecodeConfig, reference, tpa_decode

HEADS, DIM, RANK = 32, 128, 16
ROUNDED = "every product is rounded to the inputs' dtype"
NAIVE = "q, k and v materialised, in the inputs' dtype"


def case(dtype: Any, *, batch: int, m: int) -> Case:
    array = partial(jax.ShapeDtypeStruct, dtype=dtype)
    return Case(
        title=f"tpa_decode-{{metric}}-{{mode}}-batch{batch}-head{HEADS}-dim{DIM}-rank{RANK}-{{dtype}}",
        inputs=(
            array((batch, 1, HEADS, RANK)),
            array((batch, m, HEADS)),
            array((batch, m, HEADS)),
            array((batch, 1, RANK, DIM)),
            array((batch, m, DIM)),
            array((batch, m, DIM)),
        ),
        reference=reference.tpa_decode,
    )


def parallel_b(**_: int) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=HEADS, block_m=64)


def parallel_bh(**_: int) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=1, block_m=64)


def parallel_bn(*, m: int, **_: int) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=HEADS, block_m=64, num_splits=max(2, m // 512))


def kernel(name: str, config: Callable[..., TpaDecodeConfig | None], note: str) -> Provider:
    def make(**point: int) -> Function:
        return partial(tpa_decode, implementation=implementation(), config=config(**point))

    return Provider(name=name, make=make, kernel=True, note=note)


def function(name: str, call: Function, note: str, **options: Any) -> Provider:
    return Provider(name=name, make=lambda **_: call, note=note, **options)


def einsum(
    aq: jax.Array, ak: jax.Array, av: jax.Array, bq: jax.Array, bk: jax.Array, bv: jax.Array
) -> jax.Array:
    """What one would write down first: every product in the dtype of the inputs."""
    q = jnp.einsum("bnhr,bnrd->bnhd", aq, bq)
    score = jnp.einsum("bnhd,bmd,bmh->bnhm", q, bk, ak)
    p = jax.nn.softmax(score * jnp.asarray(DIM**-0.5 / RANK, score.dtype))
    return jnp.einsum("bnhm,bmh,bme->bnhe", p, av, bv)


def proposals(*, batch: int, m: int, **_: Any) -> list[Provider]:
    """From half a program a multiprocessor to three, of 132, with 32 to 128 keys a step."""
    splits = sorted({min(-(-m // 32), max(1, round(132 * x / batch))) for x in (0.5, 1, 1.5, 2, 3)})
    configs = sweep.configs(
        TpaDecodeConfig,
        block_h=(HEADS,),
        block_m=(32, 64, 128),
        num_splits=splits,
        num_stages=(2, 3, 4),
    )
    return [kernel(sweep.label(c), sweep.always(c), "") for c in (None, *configs)]


BENCHMARK = Benchmark(
    op="tpa_decode",
    case=case,
    providers=(
        kernel("plb", parallel_b, "parallel over b"),
        kernel("plbh", parallel_bh, "parallel over b and h"),
        kernel("plbn", parallel_bn, "parallel over b and parts of 512 keys"),
        kernel("pallas", lambda **_: None, "the default: chosen by shape"),
        function("jnp", reference.tpa_decode, "the reference, eager", jit=False),
        function("jit", reference.tpa_decode, "the reference, jitted"),
        function("naive", reference.tpa_decode_naive, f"{NAIVE}, eager", jit=False, tolerance=4),
        function("naive jit", reference.tpa_decode_naive, f"{NAIVE}, jitted", tolerance=4),
        function("einsum", einsum, f"jitted, less precise: {ROUNDED}", tolerance=8),
    ),
    x="m",
    grid={"batch": (8, 32), "m": [2**k for k in range(8, 16)]},
    quick={"batch": (8,), "m": (256, 2048, 32768)},
    small={"batch": (2,), "m": (64, 256)},
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
