"""Every benchmark module: the tables of its seeds, columns that are right, and its command line."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import (
    chunk_cumsum_decay,
    logcumsumexp,
    lrpe_cosine,
    md_lrpe_cosine,
    suite,
    tpa_decode,
    tpa_prompts,
)
from benchmarks.cases import Benchmark
from benchmarks.plan import Plan
from tests.support import kernel_implementation

SMALLEST: dict[str, dict[str, Sequence[Any]]] = {
    "tpa_decode": {"model": ("t6-kv-22",), "batch": (1,), "m": (16,)},
    "tpa_prompts": {"model": ("t6-34",), "m": (20,), "n": (4,)},
    "logcumsumexp": {"where": ("last",), "batch": (1,), "dim": (5,), "n": (3,)},
    "lrpe_cosine": {"what": ("act_softmax-dim_-1",), "n": (2,)},
    "chunk_cumsum_decay": {"where": ("b16-d128-packed",), "n": (3,)},
    "md_lrpe_cosine": {"dims": (2,), "prefix": (1,), "n": (1,)},
}
MODULES = (tpa_decode, logcumsumexp, chunk_cumsum_decay, lrpe_cosine, md_lrpe_cosine)
BENCHMARKS = [module.BENCHMARK for module in MODULES]
every_benchmark = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.op)


def titles(benchmark: Benchmark) -> set[str]:
    """Of all tables of speed, forward, in bfloat16."""
    points = (
        dict(zip(benchmark.grid, values, strict=True))
        for values in itertools.product(*benchmark.grid.values())
    )
    cases = (benchmark.case(jnp.bfloat16, **p) for p in points if benchmark.has(**p))
    return {case.title.format(metric="speed", mode="fwd", dtype="bf16") for case in cases}


def test_tpa_decode_has_the_tables_of_its_seeds() -> None:
    benchmark = tpa_decode.BENCHMARK
    own = titles(benchmark)
    assert {title for title in own if title.endswith("dim128-rank16-bf16")} == {
        "tpa_decode-speed-fwd-batch8-head32-dim128-rank16-bf16",
        "tpa_decode-speed-fwd-batch32-head32-dim128-rank16-bf16",
    }
    points = itertools.product(("seed",), benchmark.grid["batch"], benchmark.grid["m"])
    sizes = {
        (batch, m) for model, batch, m in points if benchmark.has(model=model, batch=batch, m=m)
    }
    assert sizes == set(itertools.product((8, 32), [2**k for k in range(8, 16)]))


def test_tpa_decode_has_the_tables_of_published_models() -> None:
    own = titles(tpa_decode.BENCHMARK)
    for heads in (34, 47, 61, 78):
        assert f"tpa_decode-speed-fwd-batch16-head{heads}-dim64-rank6-ranks2-bf16" in own
    for heads in (22, 29, 37, 47):
        assert f"tpa_decode-speed-fwd-batch1-head{heads}-dim64-full-ranks2-bf16" in own
    for heads in (16, 32, 48):
        assert f"tpa_decode-speed-fwd-batch1-head{heads}-dim64-rank16-bf16" in own
    for served in ("pages16", "pages64", "pages256", "int8", "float8_e4m3fn"):
        assert f"tpa_decode-speed-fwd-batch32-head32-dim128-rank16-{served}-bf16" in own


def test_logcumsumexp_has_the_tables_of_its_seeds_and_more() -> None:
    benchmark = logcumsumexp.BENCHMARK
    assert benchmark.grid["n"] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert benchmark.modes == ("fwd", "bwd")
    seeds = "logcumsumexp-speed-fwd-batch12-dim2048-bf16"
    kinds = ("", "-padded", "-wide")
    assert titles(benchmark) == {
        seeds,
        *(f"{seeds}-{axis}{kind}" for axis in ("last", "axis1") for kind in kinds),
        *(f"logcumsumexp-speed-fwd-batch1-dim64-bf16-columns64-length4n{kind}" for kind in kinds),
    } - {f"{seeds}-last"}
    names = [provider.name for provider in benchmark.providers]
    assert names[:5] == ["rpl", "ppl", "pallas", "jnp", "jit"]


def test_lrpe_cosine_has_the_tables_of_its_seeds_and_more() -> None:
    benchmark = lrpe_cosine.BENCHMARK
    assert benchmark.grid["n"][:-1] == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert benchmark.modes == ("fwd", "bwd")
    acts = ("none", "silu", "softmax-dim_-1", "softmax-dim_-2", "relu", "sigmoid", "none-theta")
    seeds = {f"lrpe_cosine-speed-fwd-batch12-head12-dim128-act_{act}-bf16" for act in acts}
    batch1 = "lrpe_cosine-speed-fwd-batch1-head12-dim128-act_none-bf16"
    assert titles(benchmark) == {*seeds, batch1}
    names = [provider.name for provider in benchmark.providers]
    assert names[:5] == ["Pallas Sp", "Pallas Bp", "pallas", "jnp", "jit"]


def test_md_lrpe_cosine_has_the_tables_of_its_seeds() -> None:
    benchmark = md_lrpe_cosine.BENCHMARK
    sizes = {
        dims: [n for n in benchmark.grid["n"] if benchmark.has(dims=dims, prefix=0, n=n)]
        for dims in (1, 2, 3)
    }
    assert sizes == md_lrpe_cosine.SIZES
    assert titles(benchmark) == {
        f"md_lrpe_cosine-speed-fwd-batch12-head12-dim128-bf16-{dims}d-l{prefix}"
        for dims in (1, 2, 3)
        for prefix in (0, 10)
    }
    names = [provider.name for provider in benchmark.providers]
    assert names == ["Pallas", "Pallas Ca", "jnp", "jit"]


def test_chunk_cumsum_decay_has_the_tables_of_its_seeds() -> None:
    benchmark = chunk_cumsum_decay.BENCHMARK
    assert benchmark.grid["n"] == [1024, 2048, 4096, 8192, 16384, 32768]
    cases = (benchmark.case(jnp.bfloat16, where=where, n=1024) for where in benchmark.grid["where"])
    titles = [case.title.format(metric="speed", mode="fwd", dtype="bf16") for case in cases]
    assert titles[:8] == [
        f"chunk_cumsum_decay-speed-fwd-b{b}-h16-d{d}-reverse_{reverse}-bf16"
        for reverse in (False, True)
        for b in (4, 16)
        for d in (1, 128)
    ]
    assert len(set(titles)) == len(titles)


@pytest.mark.slow
@pytest.mark.parametrize("module", [*MODULES, tpa_prompts], ids=lambda x: x.BENCHMARK.op)
def test_columns_agree(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode that runs the most of each: a gradient takes the forward pass as well.

    The eager column compiles operation by operation, so it runs for one module only.
    """
    monkeypatch.setattr(module, "implementation", kernel_implementation)  # interpreted otherwise
    benchmark: Benchmark = module.BENCHMARK
    plan = Plan(
        mode=benchmark.modes[-1],
        dtypes=["bf16"],
        grid=SMALLEST[benchmark.op],
        providers=[p for p in benchmark.providers if p.jit or module is lrpe_cosine],
        metrics=["memory"],
    )
    (row,) = suite.run(benchmark, plan).tables[0].rows
    reasons = {cell.reason for cell in row.cells.values() if cell.reason}
    assert reasons <= {"no NVIDIA GPU for PyTorch to run on"}


@every_benchmark
def test_proposals_are_many_and_lead_with_the_default(benchmark: Benchmark) -> None:
    point = {axis: values[-1] for axis, values in benchmark.grid.items()}
    names = [provider.name for provider in benchmark.proposals(mode="bwd", **point)]
    assert names[0] == "default"
    assert 10 < len(set(names)) == len(names) < 150


# `python -m benchmarks.OP` of each, in a process that begins where JAX has been imported.
COMMANDS = """
import json, os, runpy, sys
import absl.app, jax.experimental.pallas.triton, rich.progress

for module, *flags in json.loads(sys.argv[1]):
    if not os.fork():
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    assert os.wait()[1] == 0, module
    print(end="\\f", flush=True)
"""


@pytest.mark.slow
def test_commands() -> None:
    """Without a card: small shapes. Of one op kernels too, which are interpreted."""
    commands = []
    for benchmark in BENCHMARKS:
        (ours,) = (p.name for p in benchmark.providers if p.name.lower() == "pallas")
        more = ["--m=64", f"--providers={ours},jit"] if benchmark.op == "tpa_decode" else []
        flags = ["--quick", "--mode=fwd", "--metrics=speed", "--calls=2", "--providers=jit", *more]
        commands.append([f"benchmarks.{benchmark.op}", *flags])
    run = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(run, capture_output=True, text=True, check=False, env=env)
    assert found.returncode == 0, found.stderr
    texts = found.stdout.split("\f")[:-1]
    for benchmark, text in zip(BENCHMARKS, texts, strict=True):
        assert text.startswith("No NVIDIA GPU")
        for values in itertools.product(*{**benchmark.grid, **benchmark.small}.values()):
            case = benchmark.case(jnp.bfloat16, **dict(zip(benchmark.grid, values, strict=True)))
            assert case.title.format(metric="wall", mode="fwd", dtype="bf16") in text
