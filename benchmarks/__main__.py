"""Every table of every op in one run: speed, memory, seconds to compile, forward and backward.

`python -m benchmarks` takes at most about 25 minutes on an H200, and goes on where it was
stopped: delete the folder's JSON to measure anew. `--quick` takes 3: few sizes, no memory, nobody
else's functions. Without a GPU small shapes run.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from benchmarks import (
    chunk_cumsum_decay,
    command,
    logcumsumexp,
    lrpe_cosine,
    md_lrpe_cosine,
    memory,
    peers,
    plan,
    publish,
    report,
    runner,
    timing,
    tpa_decode,
)
from benchmarks.plan import Work

_MINUTES = flags.DEFINE_float(
    "minutes", 25, "a limit: slow columns that were not measured by then are skipped"
)
_EVERY_SIZE = flags.DEFINE_bool("every_size", False, "every size, not every other one")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the plan for a GPU and its estimate")
_XOPES = flags.DEFINE_string("xopes", None, "a clone of xopes, to have its kernels as columns")

OPS = (chunk_cumsum_decay, logcumsumexp, lrpe_cosine, md_lrpe_cosine, tpa_decode)
QUICK = ("pallas", "Pallas", "jit")


def works(*, quick: bool, gpu: bool, every_size: bool = False) -> list[Work]:
    found = []
    for benchmark in (op.BENCHMARK for op in OPS):
        for mode in benchmark.modes if quick else ("fwd", "bwd"):
            providers = plan.available(benchmark, mode)
            fewer = benchmark.quick if gpu else benchmark.small
            one = plan.Plan(
                mode=mode,
                dtypes=benchmark.dtypes,
                grid={**benchmark.grid, **(fewer if quick else {})},
                providers=[p for p in providers if p.name in QUICK or not quick],
                metrics=("speed",) if quick and gpu else ("speed", "memory"),
                calls=10 if quick else 30,
                has=benchmark.has,
            )
            if quick:
                found += plan.everything(benchmark, one)
            else:
                found += plan.selected(benchmark, one, step=1 if every_size else 2)
    return found


def main(arguments: Sequence[str]) -> int:
    command.refuse_words(arguments)
    for flag in flags.FLAGS.get_flags_for_module(command.__name__):
        if flag.present and flag.name not in ("quick", "out"):
            raise app.UsageError(f"--{flag.name} is of one op: python -m benchmarks.OP")
    if not command.QUICK.value:
        memory.fix_pool()
    if _XOPES.value:
        sys.path.append(_XOPES.value)
    gpu = timing.on_gpu() or _DRY_RUN.value
    quick = command.QUICK.value or not gpu
    todo = works(quick=quick, gpu=gpu, every_size=_EVERY_SIZE.value)
    if gpu:
        print(estimate(todo))
    if _DRY_RUN.value:
        return 0
    folder = pathlib.Path(command.OUT.value) if command.OUT.value else None
    if gpu:
        folder = folder or publish.folder(quick=quick)
    else:
        print(command.NO_GPU)
    with runner.progress_bar() as progress:
        reports, dropped = runner.run(
            todo, folder, progress, minutes=_MINUTES.value, resume=folder is not None
        )
    for work in dropped:
        print(f"Not measured, time was up: {work}: {', '.join(p.name for p in work.providers)}")
    if folder:
        publish.write(folder)
        print(f"{folder} has the results. The same command measures what is missing, if anything.")
    else:
        print("\n".join(map(report.markdown, reports)))
    return int(any(result.failed() for result in reports))


def estimate(works: Sequence[Work]) -> str:
    """The plan's time on an H200, and which of the packages to compare with are missing."""

    def sums(some: list[Work]) -> str:
        points = sum(len(work.providers) for work in some)
        minutes = sum(work.seconds() for work in some) / 60
        return f"{points} points of {len(some)} rows, about {minutes:.0f} minutes on an H200"

    absent = [name for name, version in peers.versions().items() if version == "absent"]
    lines = [
        f"Plan: {sums([work for work in works if not work.optional])};",
        f"then slow columns: {sums([work for work in works if work.optional])}.",
        *([f"Not installed: {', '.join(absent)}."] if absent else []),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    flags.declare_key_flag("quick")
    flags.declare_key_flag("out")
    app.run(main)
