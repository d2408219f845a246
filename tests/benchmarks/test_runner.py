"""A run goes on where it was stopped, is of one card, and fits its time."""

import dataclasses
import pathlib
import time
from typing import Any

import pytest
from absl import app
from rich.progress import Progress

from benchmarks import __main__ as everything
from benchmarks import peers, plan, runner, suite
from benchmarks.cases import Sizes
from benchmarks.plan import Work
from benchmarks.records import Report
from tests.benchmarks.toy import TOY, provider, toy_plan

COLUMNS = (provider("pallas"), provider("jnp", jit=False, sizes="largest"))
WORKS = plan.selected(TOY, toy_plan(providers=COLUMNS), step=1)


def run(folder: pathlib.Path | None, **options: Any) -> tuple[Report, list[Work]]:
    (report,), dropped = runner.run(WORKS, folder, Progress(disable=True), resume=True, **options)
    return report, dropped


def test_slow_columns_are_works_of_their_own_at_the_largest_size() -> None:
    assert [(w.point["k"], w.point["n"], w.optional) for w in WORKS] == [
        (k, n, optional)
        for k in (1, 2)
        for n, optional in ((8, False), (2048, False), (2048, True))
    ]


def test_sizes_are_those_that_table_and_column_ask_for() -> None:
    def chosen(table: Sizes, column: Sizes, step: int = 1) -> list[int]:
        toy = dataclasses.replace(TOY, sizes=lambda **_: table)
        one = toy_plan(
            grid={"k": (1,), "n": (1, 2, 4, 8, 16)}, providers=[provider("", sizes=column)]
        )
        return [work.point["n"] for work in plan.selected(toy, one, step=step)]

    assert chosen("all", "all") == [1, 2, 4, 8, 16]
    assert chosen("all", "all", step=2) == [1, 4, 16]
    assert chosen("all", "few") == chosen("few", "all") == [1, 16]
    assert chosen("largest", "all") == [16]
    assert chosen("few", "few") == chosen("none", "all") == []


def test_a_stopped_run_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fill, done = suite._fill_row, []

    def stop_at_the_third(work: Work, *rest: Any) -> None:
        done.append(work)
        if len(done) == 3:
            raise KeyboardInterrupt
        fill(work, *rest)

    monkeypatch.setattr(suite, "_fill_row", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    report, _ = run(tmp_path)
    assert len(done) == len(WORKS) + 1
    assert [sorted(row.cells) for table in report.tables for row in table.rows] == 2 * [
        ["pallas"],
        ["jnp", "pallas"],
    ]
    again, _ = run(tmp_path)
    assert len(done) == len(WORKS) + 1  # nothing was left
    assert again == report


@pytest.mark.parametrize("name", runner.SAME)
def test_a_run_is_of_one_card_and_of_one_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    run(tmp_path)
    other = suite.environment() | {name: "another"}
    monkeypatch.setattr(suite, "environment", lambda: other)
    with pytest.raises(
        app.UsageError, match=f"has results of {name} .*, and this is {name} another"
    ):
        run(tmp_path)


def test_what_is_slow_is_dropped_when_time_is_up_the_largest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report, dropped = run(None, minutes=1e-9)
    assert [(work.point, work.optional) for work in dropped] == [
        ({"k": k, "n": 2048}, True) for k in (1, 2)
    ]
    assert [list(row.cells) for table in report.tables for row in table.rows] == 4 * [["pallas"]]
    clock = iter((0.0, 0.0, 1e9))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    _, dropped = run(None, minutes=1)
    assert [work.point["k"] for work in dropped] == [2]


def test_the_run_of_all_ops_fits_25_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every peer but xopes; the estimate is no more than one."""
    monkeypatch.setattr(peers, "installed", lambda *modules: "xopes" not in modules)
    works = everything.works(quick=False, gpu=True)
    assert sum(work.seconds() for work in works) < 25 * 60
    assert sum(work.seconds() for work in works if not work.optional) < 20 * 60
    assert sum(w.seconds() for w in everything.works(quick=True, gpu=True)) < 5 * 60
    titles = {(work.benchmark.op, work.plan.mode) for work in works}
    assert titles == {(op.BENCHMARK.op, mode) for op in everything.OPS for mode in ("fwd", "bwd")}
    assert "not installed" in everything.estimate(works).lower()
