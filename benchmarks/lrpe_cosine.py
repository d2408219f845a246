"""LRPE with cosines. `python -m benchmarks.lrpe_cosine --help`"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, peers, sweep
from benchmarks.cases import EAGER, Benchmark, Case, Function, Provider, Sizes, implementation
from pallas_ops import LrpeCosineConfig, lrpe_cosine, reference

BATCH, HEADS, DIM = 12, 12, 128
LONG = 131_072  # tokens of a single batch element

# What to measure. `theta` has its gradient taken as well.
CASES: dict[str, dict[str, Any]] = {
    "act_none": {},
    "act_silu": dict(act="silu"),
    "act_softmax-dim_-1": dict(act="softmax", axis=3),
    "act_softmax-dim_-2": dict(act="softmax", axis=1),
    "act_relu": dict(act="relu"),
    "act_sigmoid": dict(act="sigmoid"),
    "act_none-theta": {},
    "act_none-batch1": {},
}


def case(dtype: Any, *, what: str, n: int) -> Case:
    batch = 1 if what.endswith("batch1") else BATCH
    x = jax.ShapeDtypeStruct((batch, n, HEADS, DIM), dtype)
    learned = what.endswith("theta")
    saved = bool(CASES[what]) or learned  # else a backward pass has no use for x
    name = what.removesuffix("-batch1")
    return Case(
        title=f"lrpe_cosine-{{metric}}-{{mode}}-batch{batch}-head{HEADS}-dim{DIM}-{name}-{{dtype}}",
        inputs=(x, jax.ShapeDtypeStruct((HEADS, DIM), jnp.float32)) if learned else (x,),
        reference=partial(reference.lrpe_cosine, **CASES[what]),
        further=() if learned else (rates(DIM),),
        extra_bytes=0 if saved else -x.size * x.dtype.itemsize,
    )


def rates(width: int) -> np.ndarray[Any, Any]:
    """theta of all heads: 10,000 ** -(2 i / width)."""
    return np.tile(10_000.0 ** (-2 * np.arange(width) / width), (HEADS, 1)).astype(np.float32)


def kernel(
    name: str, config: Callable[[str], LrpeCosineConfig | None], note: str, **options: Any
) -> Provider:
    def make(*, what: str, **_: int) -> Function:
        return partial(
            lrpe_cosine, **CASES[what], implementation=implementation(), config=config(what)
        )

    return Provider(name=name, make=make, kernel=True, note=note, **options)


def function(name: str, note: str, **options: Any) -> Provider:
    def make(*, what: str, **_: int) -> Function:
        return partial(reference.lrpe_cosine, **CASES[what])

    return Provider(name=name, make=make, note=note, **options)


def in_torch(torch: Any, *, what: str, **_: Any) -> Function:
    act, axis = CASES[what].get("act", "none"), CASES[what].get("axis")
    functions = torch.nn.functional

    def call(x: Any, theta: Any) -> Any:
        y = x.float()
        if act != "none":
            y = getattr(functions, act)(y, **({} if axis is None else {"dim": axis}))
        phi = torch.arange(x.shape[1], device=x.device)[:, None, None] * theta
        return torch.cat((y * phi.cos(), y * phi.sin()), dim=-1).to(x.dtype)

    return call


def sizes(*, what: str, **_: Any) -> Sizes:
    """Tables of the seeds whole."""
    seeds = ("act_none", "act_silu", "act_softmax-dim_-1", "act_softmax-dim_-2")
    return "all" if what in seeds else "few"


def by_block(what: str) -> LrpeCosineConfig:
    if what == "act_softmax-dim_-1":
        return LrpeCosineConfig(variant="block", block_n=8, block_d=DIM, num_parts=64)
    parts = 8 if what == "act_softmax-dim_-2" else 64
    return LrpeCosineConfig(variant="block", block_n=16, block_d=64, num_parts=parts)


def by_token() -> list[LrpeCosineConfig]:
    """Launches of kernels that see one token at a time."""
    return sweep.configs(LrpeCosineConfig, block_n=(4, 8, 16, 32), num_warps=(1, 2, 4, 8))


def proposals(*, what: str, **_: Any) -> list[Provider]:
    """Launches by rows; for the softmax over the sequence, walks."""
    if what == "act_softmax-dim_-2":
        tried = sweep.configs(
            LrpeCosineConfig,
            variant=("block",),
            block_n=(8, 16, 32),
            block_d=(16, 32, 64, 128),
            num_parts=(1, 4, 8, 16),
            num_warps=(2, 4),
        )
    else:
        tried = by_token()
    return [kernel(sweep.label(c), sweep.always(c), "") for c in (None, *tried)]


BENCHMARK = Benchmark(
    op="lrpe_cosine",
    case=case,
    providers=(
        kernel("Pallas Sp", lambda _: LrpeCosineConfig(), "parallel over tokens", sizes="few"),
        kernel("Pallas Bp", by_block, "a program walks the sequence", sizes="few"),
        kernel("pallas", lambda _: None, "the default: chosen by shape"),
        function("jnp", "the reference, eager", **EAGER),
        function("jit", "the reference, jitted"),
        *peers.pair(
            in_torch,
            "float32, activate, multiply, cat; accepted with four times the error, as an angle of "
            "tens of thousands, a float32 product, is off by 0.002",
            tolerance=4.0,
        ),
    ),
    x="n",
    grid={"what": tuple(CASES), "n": [*(2**k for k in range(8, 16)), LONG]},
    has=lambda *, what, n: n != LONG or what.endswith("batch1"),
    quick={"what": tuple(CASES), "n": (256, 32768, LONG)},
    small={"what": tuple(CASES)[:4], "n": (4,)},
    modes=("fwd", "bwd"),
    sizes=sizes,
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
