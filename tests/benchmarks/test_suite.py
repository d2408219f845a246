"""A run has every number or the reason why not, and peaks of memory come last."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import backend
from rich.progress import Progress

from benchmarks import command, memory, report, suite
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


def test_only_wrong_results_and_the_default_fail_a_run() -> None:
    others = [p for p in TOY.providers if p.name in ("pallas", "jit", "broken", "refused")]
    assert not suite.run(TOY, toy_plan(providers=others)).failed()
    default = provider("pallas", explode, kernel=True)
    assert suite.run(TOY, toy_plan(providers=[default])).failed()


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
    assert 2 <= memory.planned(jax.jit(square), (x,)) < 2.1
    with pytest.raises(ValueError, match="not jitted"):
        memory.planned(square, (x,))


def test_peaks_come_from_processes_and_failures_are_tried_again_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []
    pools: list[float] = []

    def answer(
        command: list[str], *, env: dict[str, str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "benchmarks.toy"]
        assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
        pools.append(float(env["XLA_PYTHON_CLIENT_MEM_FRACTION"]))
        n = json.loads(command[3].removeprefix("--memory_case="))["n"]
        tries.append(n)
        if n == 1 and tries.count(1) == 1:
            return subprocess.CompletedProcess(command, 0, '{"memory_reason": "full"}\n')
        if n == 2:
            return subprocess.CompletedProcess(command, -6, "", "warning\nkilled: no memory\n\n")
        return subprocess.CompletedProcess(command, 0, f'noise\n{{"memory_mib": {n}.5}}\n')

    monkeypatch.setattr(subprocess, "run", answer)
    peaks = dict(memory.peaks("benchmarks.toy", [{"n": n} for n in range(3)], jobs=2))
    assert peaks == {
        0: {"memory_mib": 0.5},
        1: {"memory_mib": 1.5},
        2: {"memory_reason": "killed: no memory"},
    }
    assert sorted(tries) == [0, 1, 1, 2, 2]
    assert pools == [0.4, 0.4, 0.4, 0.8, 0.8]


def test_a_process_runs_the_case_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak", lambda: 12.5)
    spec = {"provider": "jit", "mode": "bwd", "dtype": "f32", "point": {"k": 1, "n": 8}}
    assert suite.memory_case(TOY, json.dumps(spec)) == {"memory_mib": 12.5}
    refused = suite.memory_case(TOY, json.dumps(spec | {"provider": "refused"}))
    assert refused == {"memory_reason": "square of nothing"}


@pytest.mark.usefixtures("gpu")
def test_peaks_come_last_when_the_card_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    log: list[str] = []
    saved = tmp_path / "toy-fwd.md"

    def peaks(_: str, specs: list[memory.Spec], **__: Any) -> Iterator[tuple[int, memory.Peak]]:
        for i, spec in reversed([*enumerate(specs)]):
            yield i, {"memory_mib": 100.0 * spec["point"]["k"] + spec["point"]["n"]}

    monkeypatch.setattr(memory, "peaks", peaks)
    monkeypatch.setattr(memory, "share_compilations", lambda _: log.append("share"))
    monkeypatch.setattr(backend, "clear_backends", lambda: log.append(saved.read_text()))
    (found,) = command._measured(TOY, [toy_plan()], tmp_path, Progress(disable=True))
    shared, before = log
    assert shared == "share"
    assert "toy-speed" in before
    assert "toy-memory" not in before
    assert saved.read_text() == report.markdown(found)
    row = found.tables[1].rows[0]
    assert row.cells["jit"].memory_mib == 208
    assert "toy-memory-fwd-k2-f32:" in report.markdown(found)
    assert row.cells["wrong"].memory_mib is None
