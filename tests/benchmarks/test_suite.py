"""A run has every number or the reason why not."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import backend
from rich.progress import Progress

from benchmarks import cases, memory, report, runner, suite
from benchmarks.cases import Case
from benchmarks.plan import everything
from benchmarks.records import Report
from tests.benchmarks.toy import TOY, explode, provider, square, toy_plan


def test_a_case_that_goes_wrong_has_its_reason_and_stops_no_other() -> None:
    found = suite.run(TOY, toy_plan())
    assert [table.title for table in found.tables] == [
        f"toy-{{metric}}-fwd-k{k}-f32" for k in (1, 2)
    ]
    for row in (row for table in found.tables for row in table.rows):
        assert str(row.cells["wrong"].reason).startswith("wrong: error ")
        assert row.cells["broken"].reason == "RuntimeError: boom"
        assert row.cells["refused"].reason == "square of nothing"
        assert row.cells["pallas"].reason is None  # interpreted: right, and not timed
        assert row.cells["pallas"].wall_ms is None
        assert (row.cells["jit"].wall_ms or 0) > 0
        assert row.cells["jit"].kernel_ms is None
    assert found.failed()


def test_a_row_without_a_truth_says_so_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = cases.truth

    def of_small_ones(case: Case, *args: Any, **kwargs: Any) -> Any:
        if case.inputs[0].shape[-1] > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return truth(case, *args, **kwargs)

    monkeypatch.setattr(cases, "truth", of_small_ones)
    found = suite.run(TOY, toy_plan(grid={"k": (1,), "n": (8, 16)}))
    small, large = found.tables[0].rows
    assert small.cells["jit"].reason is None
    assert large.truth == "nothing"
    for cell in large.cells.values():
        assert str(cell.reason).endswith("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory")


def test_seconds_to_load_a_program_are_not_seconds_to_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = toy_plan(providers=[p for p in TOY.providers if p.name == "jit"])
    for found, compiled in ((itertools.repeat(0), True), (itertools.count(), False)):
        monkeypatch.setattr(memory, "programs_found", found.__next__)
        for table in suite.run(TOY, works).tables:
            assert all((row.cells["jit"].compile_s is not None) == compiled for row in table.rows)


def test_only_wrong_results_and_the_default_fail_a_run() -> None:
    others = [p for p in TOY.providers if p.name in ("pallas", "jit", "broken", "refused")]
    assert not suite.run(TOY, toy_plan(providers=others)).failed()
    default = provider("pallas", explode, kernel=True)
    assert suite.run(TOY, toy_plan(providers=[default])).failed()


def test_tolerances_of_the_case_and_of_the_provider_multiply() -> None:
    def is_accepted(of_case: float, of_provider: float) -> bool:
        def case(dtype: Any, **sizes: Any) -> Case:
            return dataclasses.replace(TOY.case(dtype, **sizes), tolerance=of_case)

        benchmark = dataclasses.replace(TOY, case=case)
        near = provider("near", lambda x: square(x) + 3e-4, tolerance=of_provider)
        found = suite.run(benchmark, toy_plan(grid={"k": (1,), "n": (8,)}, providers=[near]))
        return found.tables[0].rows[0].cells["near"].reason is None

    assert [is_accepted(*x) for x in ((1, 1), (4, 1), (1, 4), (2, 2))] == [False, True, True, True]


@pytest.mark.usefixtures("gpu")
def test_a_gpu_times_kernels_and_the_copy() -> None:
    found = suite.run(TOY, toy_plan())
    row = found.tables[0].rows[0]
    assert (row.copy.kernel_ms, row.copy.kernels) == (0.5, 2)
    assert (row.cells["pallas"].kernel_ms, row.cells["pallas"].of_copy) == (0.5, 1.0)
    assert row.cells["wrong"].kernel_ms is None
    assert "toy-speed-fwd-k1-f32:" in report.markdown(found)


# Memory


def test_planned_memory_counts_arguments_and_results() -> None:
    x = jnp.zeros(2**18, jnp.float32)
    assert 2 <= (memory.planned(jax.jit(square), (x,)) or 0) < 2.1
    assert memory.planned(square, (x,)) is None
    cells = suite.run(TOY, toy_plan()).tables[0].rows[1].cells
    assert (cells["jit"].memory_mib or 0) >= 2 * 4 * 2048 / memory.MIB
    assert "not jitted" in str(cells["jnp"].memory_reason)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_an_eager_function_has_the_peak_of_a_pool_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    log: list[str] = []
    peaks: Iterator[float | str] = iter([12.5, "full"])

    def peak() -> float:
        if isinstance(found := next(peaks), str):
            raise RuntimeError(found)
        return found

    monkeypatch.setattr(memory, "keep_compilations", lambda _: log.append("keep"))
    monkeypatch.setattr(backend, "clear_backends", lambda: log.append("new"))
    monkeypatch.setattr(memory, "peak", peak)
    some = [p for p in TOY.providers if p.name in ("jit", "jnp", "wrong")]
    works = everything(TOY, toy_plan(grid={"k": (1, 2), "n": (8,)}, providers=some))
    (found,), dropped = runner.run(works, tmp_path, Progress(disable=True))
    assert (log, dropped) == (["keep", "new", "new"], [])
    first, second = (table.rows[0].cells for table in found.tables)
    assert (first["jnp"].memory_mib, second["jnp"].memory_reason) == (12.5, "RuntimeError: full")
    assert (first["jit"].memory_mib or 0) > 0
    assert first["wrong"].memory_mib is None
    assert Report.from_json((tmp_path / "toy.json").read_text()) == found
    assert "toy-memory-fwd-k2-f32:" in report.markdown(found)
