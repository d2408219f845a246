"""Does the work of a plan: saves each row as it comes, shows one bar, stops when time is up."""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Collection, Sequence

from absl import app
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from benchmarks import memory, records, suite, timing
from benchmarks.plan import Work
from benchmarks.records import Report

SAME = ("card", "jax", "kernels")  # of one run


def progress_bar() -> Progress:
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def run(
    works: Sequence[Work],
    folder: pathlib.Path | None,
    progress: Progress,
    *,
    minutes: float | None = None,
    resume: bool = False,
) -> tuple[list[Report], list[Work]]:
    """The reports, one an op, and the optional works that there was no time for.

    All times come first, then peaks of memory, then optional works, those that move least first.
    """
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    reports = {
        op: _opened(op, folder, resume) for op in dict.fromkeys(w.benchmark.op for w in works)
    }
    compiled: dict[str, Collection[str]] = {}
    on_gpu = timing.on_gpu()
    peaks = [w for w in works if on_gpu and w.peaks and "memory" in w.plan.metrics]
    steps = sum(len(work.providers) for work in (*works, *peaks))
    advance = functools.partial(_advance, progress, progress.add_task("", total=steps))

    def save(work: Work) -> None:
        if folder:
            records.save(reports[work.benchmark.op], folder)

    def add_times(work: Work) -> None:
        compiled[str(work)] = suite.measure(work, reports[work.benchmark.op], advance)
        save(work)

    def add_peaks(work: Work) -> None:
        if work in peaks:
            suite.add_peaks(work, reports[work.benchmark.op], advance, compiled[str(work)])
            save(work)

    with tempfile.TemporaryDirectory() as cache:
        if peaks:
            memory.keep_compilations(cache)
        main = [work for work in works if not work.optional]
        for work in main:
            add_times(work)
        for work in main:
            add_peaks(work)
        optional = sorted((work for work in works if work.optional), key=lambda work: work.bytes)
        for i, work in enumerate(optional):
            if time.monotonic() > deadline:
                return list(reports.values()), optional[i:]
            add_times(work)
            add_peaks(work)
    return list(reports.values()), []


def _advance(progress: Progress, task: object, text: str) -> None:
    progress.update(task, advance=1, description=text)  # type: ignore[arg-type]


def _opened(op: str, folder: pathlib.Path | None, resume: bool) -> Report:
    """A new report; or the one that a run left there, if it is of the same card and programs."""
    new = Report(op=op, environment=suite.environment())
    path = folder / f"{op}.json" if folder else None
    if not resume or path is None or not path.exists():
        return new
    old = Report.from_json(path.read_text())
    for name in SAME:
        was, now = old.environment.get(name), new.environment.get(name)
        if was != now:
            raise app.UsageError(
                f"{path} has results of {name} {was}, and this is {name} {now}: a run is of one. "
                "Delete that file, or name another folder with --out."
            )
    return dataclasses.replace(old, environment=new.environment)
