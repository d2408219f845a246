"""One run: each case is held to the truth, then timed, then its memory is measured."""

import dataclasses
import itertools
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cases, memory, records, timing
from benchmarks.cases import Benchmark, Case, Function, Grid, Point, Provider

Advance = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run measures."""

    mode: str
    dtypes: Sequence[str]
    grid: Grid
    providers: Sequence[Provider]
    metrics: Sequence[str] = ("speed", "memory")
    calls: int = 50
    jobs: int = 4  # programs compiled at a time, by a sweep
    has: Callable[..., bool] = lambda **_: True

    def __len__(self) -> int:
        return len(list(self.points())) * len(self.providers)

    def points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for dtype, values in itertools.product(self.dtypes, itertools.product(*self.grid.values())):
            point = dict(zip(self.grid, values, strict=True))
            if self.has(**point):
                yield dtype, point


def run(benchmark: Benchmark, plan: Plan, advance: Advance = lambda _: None) -> records.Report:
    """Everything in the plan, but peaks; a case that goes wrong does not stop the others."""
    report = records.Report(op=benchmark.op, environment=environment())
    for dtype, point in plan.points():
        case = benchmark.case(cases.DTYPES[dtype], **point)
        title = case.title.format(metric="{metric}", mode=plan.mode, dtype=dtype)
        if not report.tables or report.tables[-1].title != title:
            table = records.Table(
                title=title,
                x=benchmark.x,
                mode=plan.mode,
                dtype=dtype,
                columns=[provider.column() for provider in plan.providers],
                metrics=_metrics(plan),
                date=f"{datetime.now(UTC):%Y-%m-%d}",
                calls=plan.calls,
            )
            report.tables.append(table)
        report.tables[-1].rows.append(_row(case, point, dtype, plan, advance))
    return report


def _metrics(plan: Plan) -> list[str]:
    """What `run` measures: kernel and compile times take a GPU, and peaks there come later."""
    times = ["speed", "wall", "compile"] if timing.on_gpu() else ["wall"]
    sizes = [] if timing.on_gpu() else ["memory"]
    return times * ("speed" in plan.metrics) + sizes * ("memory" in plan.metrics)


def _row(case: Case, point: Point, dtype: str, plan: Plan, advance: Advance) -> records.Row:
    inputs = cases.inputs(case)
    want = cases.truth(case, inputs, mode=plan.mode)
    moved = cases.moved_bytes(case, mode=plan.mode)
    row = records.Row(point=point, moved_bytes=moved, truth=str(jax.tree.leaves(want)[0].dtype))
    if "speed" in plan.metrics:
        blocks = -(-moved // (4 * timing.COPY_BLOCK))  # 2 bytes an element, in and out
        source = jax.ShapeDtypeStruct((blocks * timing.COPY_BLOCK,), jnp.bfloat16)
        row.copy = _timed(timing.copy, (cases.normal(source, seed=2),), plan)
    for provider in plan.providers:
        advance(" ".join([*(f"{axis}={value}" for axis, value in point.items()), provider.name]))
        try:
            function, arguments = cases.prepare(
                provider, point, inputs, mode=plan.mode, constants=len(case.further)
            )
            limit = provider.tolerance * cases.TOLERANCE[dtype]
            cell = _cell(provider, function, arguments, want, limit, plan)
        except Exception as error:
            cell = records.Cell(reason=_reason(error))
        if row.copy.kernel_ms and cell.kernel_ms:
            cell.of_copy = row.copy.kernel_ms / cell.kernel_ms
        row.cells[provider.name] = cell
    return row


def _cell(
    provider: Provider,
    function: Function,
    arguments: tuple[Any, ...],
    want: Any,
    limit: float,
    plan: Plan,
) -> records.Cell:
    """Right first, then fast; without a GPU a kernel is interpreted and only held to the truth."""
    started = time.perf_counter()
    got = jax.block_until_ready(function(*arguments))
    compile_s = time.perf_counter() - started
    error = cases.deviation(got, want)
    if not error <= limit:  # NaN, too
        return records.Cell(reason=f"wrong: error {error:.1e}, accepted {limit:.1e}")
    if provider.kernel and not timing.on_gpu():
        return records.Cell(error=error)
    cell = _timed(function, arguments, plan) if "speed" in plan.metrics else records.Cell()
    cell.error, cell.compile_s = error, compile_s if provider.jit else None
    if "memory" in plan.metrics and not timing.on_gpu():
        try:
            cell.memory_mib = memory.planned(function, arguments)
        except ValueError as refusal:
            cell.memory_reason = str(refusal)
    return cell


def _timed(function: Function, arguments: tuple[Any, ...], plan: Plan) -> records.Cell:
    return records.Cell(**dataclasses.asdict(timing.measure(function, arguments, calls=plan.calls)))


def _reason(error: Exception) -> str:
    """The error's first line, with its type unless it was a plain refusal."""
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    refusal = isinstance(error, ValueError | NotImplementedError)
    return text if refusal else f"{type(error).__name__}: {text}"


def add_peaks(benchmark: Benchmark, report: records.Report, advance: Advance) -> None:
    """Runs each case that came out right once more, in a pool of its own."""
    for table in report.tables:
        table.metrics.append("memory")
        for row, provider in itertools.product(table.rows, benchmark.providers):
            cell = row.cells.get(provider.name)
            if cell and not cell.reason:
                advance("peak memory")
                memory.new_pool()
                case = benchmark.case(cases.DTYPES[table.dtype], **row.point)
                try:
                    cell.memory_mib = _peak(case, provider, row.point, table.mode)
                except Exception as error:
                    cell.memory_reason = _reason(error)


def _peak(case: Case, provider: Provider, point: Point, mode: str) -> float:
    function, arguments = cases.prepare(
        provider, point, cases.inputs(case), mode=mode, constants=len(case.further)
    )
    jax.block_until_ready(function(*arguments))
    return memory.peak()


def environment() -> dict[str, Any]:
    """Where and how the numbers came about."""
    found = {
        "card": card(),
        "driver": _driver(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "torch": getattr(sys.modules.get("torch"), "__version__", ""),
        "cache": "cold" if timing.on_gpu() else "warm",
        "memory": "allocator's peak, fixed pool" if timing.on_gpu() else "XLA's plan, not measured",
    }
    return {name: value for name, value in found.items() if value}


def card() -> str:
    return str(jax.devices()[0].device_kind)


def _driver() -> str:
    if not timing.on_gpu() or not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return answer.partition("\n")[0].strip()
