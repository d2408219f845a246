"""The benchmarks' suite: that it measures what it says, and says so when it cannot."""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend
from rich.progress import Progress

from benchmarks import (
    cases,
    chunk_cumsum_decay,
    command,
    memory,
    peers,
    plots,
    report,
    suite,
    timing,
    tpa_decode,
)
from benchmarks.cases import Benchmark, Case, Provider
from benchmarks.records import Report
from pallas_ops.core import launch
from tests import h200


def square(x: jax.Array) -> jax.Array:
    return x * x


def off_by_one(x: jax.Array) -> jax.Array:
    return square(x).at[3].add(1)


def refuse(**_: Any) -> Any:
    raise NotImplementedError("square of nothing")


def explode(_: jax.Array) -> jax.Array:
    raise RuntimeError("boom\nand more")


def provider(name: str, function: Callable[..., Any] = square, **options: Any) -> Provider:
    return Provider(name=name, make=lambda **_: function, **options)


TOY = Benchmark(
    op="toy",
    case=lambda dtype, *, k, n: Case(
        title=f"toy-{{metric}}-{{mode}}-k{k}-{{dtype}}",
        inputs=(jax.ShapeDtypeStruct((n,), dtype),),
        reference=square,
    ),
    providers=(
        provider("pallas", kernel=True),
        provider("jnp", jit=False),
        provider("jit"),
        provider("wrong", off_by_one),
        provider("broken", explode),
        Provider(name="refused", make=refuse),
    ),
    x="n",
    grid={"k": (1, 2), "n": (8, 2048)},
    quick={"n": (8,)},
    small={"k": (1,)},
)


def toy_plan(**changes: Any) -> suite.Plan:
    given = {"mode": "fwd", "dtypes": ["f32"], "grid": TOY.grid, "providers": TOY.providers}
    return suite.Plan(**{**given, "calls": 2, **changes})


@contextlib.contextmanager
def fake_cupti() -> Iterator[list[timing.Kernel]]:
    kernels: list[timing.Kernel] = []
    yield kernels
    kernels += [("square", 0.25), ("merge", 0.25)] * 2


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tests on any machine."""
    monkeypatch.setattr(timing, "on_gpu", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card that takes half a millisecond for everything, as far as the suite can tell."""
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing, "cupti", fake_cupti)
    monkeypatch.setattr(timing, "COLD_BYTES", 2**16)
    with launch.interpreted(True):
        yield


# Time


def test_kernel_time_is_the_median_of_the_calls_sums() -> None:
    calls = [(1.0, 2.0), (1.0, 7.0), (1.5, 2.0)]
    kernels = [kernel for a, b in calls for kernel in (("attend", a), ("merge", b))]
    assert timing.per_call(kernels, calls=3) == (3.5, 2)


@pytest.mark.parametrize("names", ["ab", "abc", "abba"])
def test_kernel_time_is_a_mean_where_calls_cannot_be_told_apart(names: str) -> None:
    kernels = [(name, float(i)) for i, name in enumerate(names)]
    mean = sum(range(len(names))) / 2
    assert timing.per_call(kernels, calls=2) == (mean, None)


def test_no_kernels_is_an_error_and_not_a_time_of_zero() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel"):
        timing.per_call([], calls=5)


def test_cupti_is_detached_even_if_the_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    def stop(finalize: bool) -> list[timing.Kernel]:
        log.append(finalize)
        return [("k", 1.0)]

    monkeypatch.setattr(timing, "_cupti_functions", lambda: (lambda: log.append("start"), stop))
    with pytest.raises(RuntimeError, match="boom"), timing.cupti() as kernels:
        explode(jnp.ones(1))
    assert log == ["start", True]
    assert kernels == [("k", 1.0)]


def test_without_cupti_the_error_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", None)
    with pytest.raises(RuntimeError, match="kernel times need jax"), timing.cupti():
        pass


def test_rotation_deals_every_copy_before_it_repeats_one() -> None:
    x = jnp.arange(256, dtype=jnp.float32)
    rotation = timing.Rotation((x,), cold_bytes=4 * 1024)
    dealt: list[jax.Array] = []
    for _ in range(8):
        rotation.call(dealt.append)
    places = [x.unsafe_buffer_pointer() for x in dealt]
    assert places[:4] == places[4:]
    assert len(set(places)) == 4
    assert all((x == dealt[0]).all() for x in dealt)


def test_rotation_needs_no_copy_of_what_exceeds_the_cache() -> None:
    rotation = timing.Rotation((jnp.zeros(1024),), cold_bytes=4 * 1024)
    assert rotation._results.maxlen == 1


@pytest.mark.usefixtures("gpu")
def test_copy_copies() -> None:
    x = jnp.arange(4 * timing.COPY_BLOCK, dtype=jnp.float32)
    np.testing.assert_array_equal(timing.copy(x), x)


def test_copy_lowers_for_a_card() -> None:
    x = jax.ShapeDtypeStruct((5 * timing.COPY_BLOCK,), jnp.bfloat16)
    assert "pallas_ops_copy" in h200.lower_for_cuda(timing.pallas_copy, x).as_text()


# Truth


def test_truth_is_float64_and_one_wrong_element_is_far_from_it() -> None:
    case = TOY.case(jnp.bfloat16, k=1, n=1000)
    inputs = cases.inputs(case)
    want = cases.truth(case, inputs, mode="fwd")
    assert want.dtype == np.float64
    assert 0 < cases.deviation(square(*inputs), want) < cases.TOLERANCE["bf16"]
    assert cases.deviation(off_by_one(*inputs), want) > 0.1
    assert np.isnan(cases.deviation(square(*inputs).at[5].set(jnp.nan), want))


def test_large_cases_are_held_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "FLOAT64_BYTES", 15)
    case = TOY.case(jnp.bfloat16, k=1, n=4)
    assert cases.truth(case, cases.inputs(case), mode="fwd").dtype == np.float32


@pytest.mark.parametrize("jit", [True, False])
def test_backward_is_the_gradient_with_random_cotangents(jit: bool) -> None:
    case = TOY.case(jnp.float32, k=1, n=64)
    (x,) = inputs = cases.inputs(case)
    function, arguments = cases.prepare(provider("", jit=jit), {}, inputs, mode="bwd")
    (dx,) = function(*arguments)
    dy = arguments[1]
    assert 0.5 < jnp.std(dy) < 2
    np.testing.assert_allclose(dx, 2 * x * dy, rtol=1e-6)
    assert cases.deviation((dx,), cases.truth(case, inputs, mode="bwd")) < 1e-6


def test_moved_bytes() -> None:
    case = Case(
        title="",
        inputs=(
            jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
            jax.ShapeDtypeStruct((3,), jnp.float32),
        ),
        reference=lambda x, s: jnp.sum(x, axis=1).astype(jnp.float32) * s,
        extra_bytes=7,
    )
    assert cases.moved_bytes(case, mode="fwd") == 30 + 12 + 12
    assert cases.moved_bytes(case, mode="bwd") == 2 * (30 + 12) + 12 + 7


def test_inputs_are_normal_and_differ_from_each_other() -> None:
    x, y = cases.normal((jax.ShapeDtypeStruct((512, 64), jnp.bfloat16),) * 2, seed=0)
    assert x.dtype == jnp.bfloat16
    assert abs(np.corrcoef(np.ravel(x).astype(float), np.ravel(y).astype(float))[0, 1]) < 0.05
    assert abs(np.std(np.asarray(x, np.float32)) - 1) < 0.05


# A run


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

    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "benchmarks.toy"]
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


# What is shown


def test_markdown_has_every_number_and_every_reason() -> None:
    text = report.markdown(suite.run(TOY, toy_plan()))
    assert "toy-wall-fwd-k2-f32:" in text
    assert "toy-speed" not in text  # no kernel was timed
    row = next(line for line in text.split("\n") if line.startswith("| 2048 |"))
    pallas, jnp_, jit, *bad, copy, of_copy = (cell.strip() for cell in row.split("|")[2:-1])
    assert (pallas, bad, of_copy) == ("ok", ["-1"] * 3, "")
    assert min(map(float, (jnp_, jit, copy))) > 0
    assert "broken at n = 8, 2048: -1, RuntimeError: boom" in text


@pytest.mark.usefixtures("gpu")
def test_a_mean_is_not_passed_off_as_a_median() -> None:
    found = suite.run(TOY, toy_plan(calls=3))  # four kernels in three calls
    assert "jit at n = 8, 2048: calls launched different kernels" in report.markdown(found)


def test_json_tells_all_and_another_run_replaces_its_own_tables(tmp_path: pathlib.Path) -> None:
    both = suite.run(TOY, toy_plan())
    assert Report.from_json(both.to_json()) == both
    report.write(both, tmp_path)
    again = suite.run(TOY, toy_plan(grid={"k": (1,), "n": (8,)}))
    report.write(again, tmp_path)
    kept = Report.from_json((tmp_path / "toy-fwd.json").read_text())
    assert kept.tables == [both.tables[1], again.tables[0]]
    report.main(["", str(tmp_path / "toy-fwd.json")])
    assert (tmp_path / "toy-fwd.md").read_text() == report.markdown(kept)
    assert len(list(tmp_path.glob("toy-*-fwd-k[12]-f32.png"))) == 4


def test_a_table_of_failures_is_still_shown(tmp_path: pathlib.Path) -> None:
    found = suite.run(TOY, toy_plan(providers=[provider("broken", explode)]))
    assert "broken at n = 8, 2048: -1, RuntimeError: boom" in report.markdown(found)
    report.write(found, tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_labels_of_close_lines_are_moved_apart_in_order() -> None:
    moved = plots._apart([0.1, 0.5, 0.5, 0.505, 0.9])
    assert moved == sorted(moved)
    assert min(np.diff(moved)) > 0.9 * plots.LABEL_GAP
    assert (moved[0], moved[-1]) == (0.1, 0.9)


def test_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    words = ["toy", "--quick", "--n=16,32", "--providers=jit,pallas", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        command.main(TOY)
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("No NVIDIA GPU")
    assert "k2" not in shown  # a small machine's grid
    found = Report.from_json((tmp_path / "toy-fwd.json").read_text())
    assert [row.point["n"] for row in found.tables[0].rows] == [16, 32]
    assert [column.name for column in found.tables[0].columns] == ["jit", "pallas"]


# PyTorch


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a PyTorch that has NumPy's arrays for tensors."""
    calls: list[str] = []
    torch = SimpleNamespace(
        from_dlpack=np.asarray,
        no_grad=lambda: lambda function: function,
        cuda=SimpleNamespace(
            synchronize=lambda: calls.append("wait"),
            reset_peak_memory_stats=lambda: calls.append("reset"),
            max_memory_allocated=lambda: 3 * memory.MIB,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return calls


def on_tensors(_: Any, **__: Any) -> Callable[..., Any]:
    return lambda x: x * x


@pytest.mark.usefixtures("gpu")
def test_pytorch_is_a_column_like_any_other(log: list[str]) -> None:
    column = peers.provider("torch", on_tensors, "squares")
    table = suite.run(TOY, toy_plan(providers=[column], metrics=["speed"])).tables[0]
    cells = [row.cells["torch"] for row in table.rows]
    assert [(cell.reason, cell.kernel_ms, cell.of_copy) for cell in cells] == 2 * [(None, 0.5, 1.0)]
    assert log[:3] == ["wait", "reset", "wait"]  # what the first call tuned is no part of the peak
    assert log.count("reset") == 4  # one a case


def test_pytorch_says_that_it_needs_a_card() -> None:
    column = peers.provider("torch", on_tensors, "squares")
    table = suite.run(TOY, toy_plan(providers=[column])).tables[0]
    assert table.rows[0].cells["torch"].reason == "no NVIDIA GPU for PyTorch to run on"


def test_pytorch_keeps_an_account_of_its_own(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 2 * memory.MIB})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert memory.peak() == 5
    monkeypatch.delitem(sys.modules, "torch")
    assert memory.peak() == 2
    assert log == []


# The ops


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


def test_chunk_cumsum_decay_columns_agree() -> None:
    benchmark = chunk_cumsum_decay.BENCHMARK
    grid = {"where": ("b4-d1-reverse", "b16-d128-forward-f32", "b16-d128-packed"), "n": (3,)}
    plan = suite.Plan(
        mode="fwd",
        dtypes=["bf16"],
        grid=grid,
        providers=benchmark.providers[:3],
        metrics=["memory"],
    )
    for table in suite.run(benchmark, plan).tables:
        (row,) = table.rows
        assert {name: cell.reason for name, cell in row.cells.items() if cell.reason} == {}


def test_tpa_decode_has_the_tables_of_its_seeds() -> None:
    benchmark = tpa_decode.BENCHMARK
    assert benchmark.grid["m"] == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    titles = {benchmark.case(jnp.bfloat16, batch=b, m=256).title for b in benchmark.grid["batch"]}
    assert {title.format(metric="speed", mode="fwd", dtype="bf16") for title in titles} == {
        "tpa_decode-speed-fwd-batch8-head32-dim128-rank16-bf16",
        "tpa_decode-speed-fwd-batch32-head32-dim128-rank16-bf16",
    }


def test_tpa_decode_columns_agree() -> None:
    benchmark = tpa_decode.BENCHMARK
    grid = {"batch": (1,), "m": (80,)}
    plan = suite.Plan(
        mode="fwd", dtypes=["bf16"], grid=grid, providers=benchmark.providers, metrics=["memory"]
    )
    (row,) = suite.run(benchmark, plan).tables[0].rows
    assert {name: cell.reason for name, cell in row.cells.items() if cell.reason} == {}
