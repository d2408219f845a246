"""Does the work of a plan: saves each row as it comes, shows one bar, stops when time is up."""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence

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

    The optional ones come last, those that move least first.
    """
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    reports = {
        op: _opened(op, folder, resume) for op in dict.fromkeys(w.benchmark.op for w in works)
    }
    steps = sum(len(work.providers) for work in works)
    advance = functools.partial(_advance, progress, progress.add_task("", total=steps))

    ordered = sorted(works, key=lambda work: work.bytes if work.optional else -1)
    with tempfile.TemporaryDirectory() as cache:
        if timing.on_gpu():
            memory.keep_compilations(cache)
        for i, work in enumerate(ordered):
            if work.optional and time.monotonic() > deadline:
                return list(reports.values()), ordered[i:]
            suite.measure(work, reports[work.benchmark.op], advance)
            if folder:
                records.save(reports[work.benchmark.op], folder)
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
