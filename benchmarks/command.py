"""The command line of every benchmark module: flags, a progress bar, tables, files."""

import functools
import pathlib
import sys
import tempfile
from collections.abc import Collection, Sequence
from typing import Any

from absl import app, flags
from rich.progress import Progress, TaskID

from benchmarks import cases, memory, plan, publish, records, report, runner, sweep, timing
from benchmarks.cases import Benchmark
from benchmarks.plan import Plan

_MODES = flags.DEFINE_list("mode", None, "fwd and/or bwd; by default what the module names")
_DTYPES = flags.DEFINE_list("dtypes", None, f"some of {', '.join(cases.DTYPES)}")
_PROVIDERS = flags.DEFINE_list("providers", None, "some of the table's columns")
_METRICS = flags.DEFINE_list("metrics", ["speed", "memory"], "speed and/or memory")
QUICK = flags.DEFINE_bool("quick", False, "few sizes, few repetitions")
_SWEEP = flags.DEFINE_bool("sweep", False, "time the module's proposals of launches instead")
_CALLS = flags.DEFINE_integer("calls", None, "calls to take the median of", lower_bound=1)
_JOBS = flags.DEFINE_integer("jobs", 4, "programs that --sweep compiles at a time", lower_bound=1)
OUT = flags.DEFINE_string(
    "out",
    None,
    "folder for JSON, pages and figures; whole tables have one: benchmarks/results/<card>/",
)
flags.register_validator(  # type: ignore[no-untyped-call]
    "out", lambda out: not (out and pathlib.Path(out).is_file()), "is a file, and not a folder"
)
NO_GPU = (
    "No NVIDIA GPU: small shapes, wall-clock only, kernels interpreted and not timed; with "
    "one, and jax[cuda12], the same command measures everything."
)


def main(benchmark: Benchmark) -> None:
    """The command line of one benchmark module."""
    for axis, values in benchmark.grid.items():
        flags.DEFINE_list(axis, None, f"by default {','.join(map(str, values))}")
    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # for --help
    app.run(functools.partial(_main, benchmark))


def refuse_words(arguments: Sequence[str]) -> None:
    """Refuses arguments that are no flags."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected: {' '.join(arguments[1:])}")


def _main(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    refuse_words(arguments)
    memory.fix_pool()
    plans = [_plan(benchmark, mode) for mode in _MODES.value or benchmark.modes]
    folder = _folder(benchmark)
    if not timing.on_gpu():
        print(NO_GPU)
    with runner.progress_bar() as progress:
        if _SWEEP.value:
            return _swept(benchmark, plans, progress)
        works = [work for one in plans for work in plan.everything(benchmark, one)]
        result = runner.run(works, folder, progress)[0][0]
    print(report.markdown(result))
    if folder:
        publish.write(folder)
    return int(result.failed())


def _swept(benchmark: Benchmark, plans: list[Plan], progress: Progress) -> int:
    """Prints each case's configs, fastest first; a folder for files must be named."""
    with tempfile.TemporaryDirectory() as cache:
        memory.keep_compilations(cache)
        for one in plans:
            task = progress.add_task("")

            def advance(text: str, task: TaskID = task) -> None:
                progress.update(task, description=text)

            for result in sweep.run(benchmark, one, advance):
                print("\n".join(sweep.lines(result)), flush=True)
                if OUT.value:
                    records.save(result, pathlib.Path(OUT.value))
    return 0


def _plan(benchmark: Benchmark, mode: str) -> Plan:
    shorter = benchmark.quick if QUICK.value else {}
    grid = {**benchmark.grid, **(shorter if timing.on_gpu() else benchmark.small)}
    for axis, values in benchmark.grid.items():
        if chosen := flags.FLAGS[axis].value:
            grid[axis] = [_of_axis(axis, value, values) for value in chosen]
    by_name = {provider.name: provider for provider in plan.available(benchmark, mode)}
    return Plan(
        mode=_known(mode, ("fwd", "bwd")),
        dtypes=[_known(dtype, cases.DTYPES) for dtype in _DTYPES.value or benchmark.dtypes],
        grid=grid,
        providers=[by_name[_known(name, by_name)] for name in _PROVIDERS.value or by_name],
        metrics=[_known(metric, ("speed", "memory")) for metric in _METRICS.value],
        calls=_CALLS.value or (10 if QUICK.value else 50),
        jobs=_JOBS.value,
        has=benchmark.has,
    )


def _of_axis(axis: str, word: str, values: Sequence[Any]) -> Any:
    """A value of a grid axis: one of its names, or a size."""
    if isinstance(values[0], str):
        return _known(word, values)
    if not word.isdecimal() or not int(word):
        raise app.UsageError(f"--{axis}: {word!r} is no integer of at least 1")
    return int(word)


def _known(word: str, words: Collection[str]) -> str:
    if word not in words:
        raise app.UsageError(f"{word!r} is not one of {', '.join(words)}")
    return word


def _folder(benchmark: Benchmark) -> pathlib.Path | None:
    """Where results go. The committed ones are replaced table by table, so by whole tables only."""
    if OUT.value:
        return pathlib.Path(OUT.value)
    partial = _PROVIDERS.value or flags.FLAGS[benchmark.x].value or len(_METRICS.value) < 2
    if QUICK.value or partial or not timing.on_gpu():
        return None
    return publish.folder()
