"""All ops, quickly, in one JSON: what to send of a card that has no results yet.

`python -m benchmarks [FILE]` times the default kernels and the jitted references at a few sizes
each. Without a GPU small shapes run.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from absl import app
from rich.console import Console
from rich.progress import Progress

from benchmarks import (
    chunk_cumsum_decay,
    logcumsumexp,
    lrpe_cosine,
    md_lrpe_cosine,
    report,
    suite,
    timing,
    tpa_decode,
)
from benchmarks.cases import Benchmark

_OPS = (chunk_cumsum_decay, logcumsumexp, lrpe_cosine, md_lrpe_cosine, tpa_decode)


def plans(benchmark: Benchmark) -> list[suite.Plan]:
    fewer = benchmark.quick if timing.on_gpu() else benchmark.small
    providers = [p for p in benchmark.providers if p.name in ("pallas", "Pallas", "jit")]
    return [
        suite.Plan(
            mode=mode,
            dtypes=benchmark.dtypes,
            grid={**benchmark.grid, **fewer},
            providers=providers,
            metrics=("speed",) if timing.on_gpu() else ("memory",),
            calls=10,
            has=benchmark.has,
        )
        for mode in benchmark.modes
    ]


def main(arguments: Sequence[str]) -> int:
    runs = [(op.BENCHMARK, plan) for op in _OPS for plan in plans(op.BENCHMARK)]
    reports = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(plan) for _, plan in runs))
        for benchmark, plan in runs:

            def advance(text: str, name: str = benchmark.op) -> None:
                progress.update(task, advance=1, description=f"{name} {text}")

            reports.append(suite.run(benchmark, plan, advance))
    name = f"pallas_ops-{'-'.join(suite.card().lower().split())}.json"
    path = pathlib.Path(*arguments[1:] or [name])
    path.write_text(json.dumps([dataclasses.asdict(x) for x in reports], indent=1))
    for result in reports:
        print(report.markdown(result))
    print(f"\n{path} holds these tables.")
    return int(any(result.failed() for result in reports))


if __name__ == "__main__":
    app.run(main)
