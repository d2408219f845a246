"""LRPE with cosines on grids. `python -m benchmarks.md_lrpe_cosine --help`"""

from functools import partial
from typing import Any

import jax

from benchmarks import command, sweep
from benchmarks.cases import EAGER, Benchmark, Case, Function, Provider, Sizes, implementation
from benchmarks.lrpe_cosine import BATCH, DIM, HEADS, by_token, rates
from pallas_ops import LrpeCosineConfig, md_lrpe_cosine, reference

# Sizes: n tokens in one dimension, n * n in two, n * n * n in three.
SIZES = {1: [2**k for k in range(8, 16)], 2: [16, 32, 64, 128], 3: [4, 8, 16, 32]}
SMALL = {1: [6], 2: [3], 3: [2]}


def grid(*, dims: int, prefix: int, n: int) -> dict[str, Any]:
    return dict(shape=(n,) * dims, num_prefix_tokens=prefix)


def case(dtype: Any, *, dims: int, prefix: int, n: int) -> Case:
    x = jax.ShapeDtypeStruct((BATCH, prefix + n**dims, HEADS, DIM), dtype)
    return Case(
        title=f"md_lrpe_cosine-{{metric}}-{{mode}}-batch{BATCH}-head{HEADS}-dim{DIM}-{{dtype}}"
        f"-{dims}d-l{prefix}",
        inputs=(x,),
        reference=partial(reference.md_lrpe_cosine, **grid(dims=dims, prefix=prefix, n=n)),
        further=(rates(-(-DIM // dims)),),
        extra_bytes=-x.size * x.dtype.itemsize,  # no activation: x is not read going backward
    )


def kernel(name: str, config: LrpeCosineConfig | None, note: str, **options: Any) -> Provider:
    def make(**point: int) -> Function:
        return partial(
            md_lrpe_cosine, **grid(**point), implementation=implementation(), config=config
        )

    return Provider(name=name, make=make, kernel=True, note=note, **options)


def function(name: str, note: str, **options: Any) -> Provider:
    def make(**point: int) -> Function:
        return partial(reference.md_lrpe_cosine, **grid(**point))

    return Provider(name=name, make=make, note=note, **options)


def sizes(*, prefix: int, **_: Any) -> Sizes:
    return "all" if prefix == 0 else "largest"


def proposals(**_: Any) -> list[Provider]:
    return [kernel(sweep.label(config), config, "") for config in (None, *by_token())]


BENCHMARK = Benchmark(
    op="md_lrpe_cosine",
    case=case,
    providers=(
        kernel("Pallas", None, "angles computed where they are needed, the default"),
        kernel(
            "Pallas Ca",
            LrpeCosineConfig(cache_angles=True),
            "angles computed once and kept",
            sizes="few",
        ),
        function("jnp", "the reference, eager", **EAGER),
        function("jit", "the reference, jitted"),
    ),
    x="n",
    grid={"dims": (1, 2, 3), "prefix": (0, 10), "n": sorted({*SIZES[1], *SIZES[2], *SIZES[3]})},
    has=lambda *, dims, prefix, n: n in SIZES[dims] or n in SMALL[dims],
    quick={"dims": (1, 2, 3), "prefix": (0,), "n": (32, 128, 32768)},
    small={"dims": (1, 2, 3), "prefix": (0, 10), "n": (2, 3, 6)},
    modes=("fwd", "bwd"),
    sizes=sizes,
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
