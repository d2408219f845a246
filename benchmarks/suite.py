"""One run: each case is held to the truth, then timed, and its memory counted."""

import dataclasses
import hashlib
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp

import pallas_ops
from benchmarks import cases, memory, peers, records, timing
from benchmarks.cases import Benchmark, Case, Function, Point, Provider
from benchmarks.plan import Plan, Work, everything

Advance = Callable[[str], None]


def measure(work: Work, report: records.Report, advance: Advance = lambda _: None) -> None:
    """Adds to the report the columns that a row lacks.

    What goes wrong stops nothing else.
    """
    plan, today = work.plan, f"{datetime.now(UTC):%Y-%m-%d}"
    table = next((table for table in report.tables if table.title == work.title), None)
    if table is None:
        table = records.Table(
            title=work.title,
            x=work.benchmark.x,
            mode=plan.mode,
            dtype=work.dtype,
            columns=[provider.column() for provider in plan.providers],
            metrics=_metrics(plan),
            date=today,
            calls=plan.calls,
        )
        report.tables.append(table)
    known = {column.name for column in table.columns}
    table.columns += [p.column() for p in plan.providers if p.name not in known]
    row = table.row(work.point)
    todo = [p for p in work.providers if row is None or p.name not in row.cells]
    for _ in range(len(work.providers) - len(todo)):
        advance(str(work))
    if todo:
        table.date += "" if today in table.date else f", {today}"
        row = _fill_row(work, table, row, todo, advance)
        if timing.on_gpu() and "memory" in plan.metrics:
            _fill_peaks(work, row, todo)


def run(benchmark: Benchmark, plan: Plan, advance: Advance = lambda _: None) -> records.Report:
    """Everything in the plan."""
    report = records.Report(op=benchmark.op, environment=environment())
    for work in everything(benchmark, plan):
        measure(work, report, advance)
    return report


def _metrics(plan: Plan) -> list[str]:
    """What `run` measures: kernel and compile times take a GPU."""
    times = ["speed", "wall", "compile"] if timing.on_gpu() else ["wall"]
    return times * ("speed" in plan.metrics) + ["memory"] * ("memory" in plan.metrics)


def _fill_row(
    work: Work,
    table: records.Table,
    row: records.Row | None,
    providers: Sequence[Provider],
    advance: Advance,
) -> records.Row:
    case, plan = work.case, work.plan
    inputs: Any = ()
    try:
        inputs = cases.inputs(case)
        want, failure = cases.truth(case, inputs, mode=plan.mode), ""
    except jax.errors.JaxRuntimeError as error:  # a card with too little memory
        want, failure = None, f"nothing to be held to: {_reason(error)}"
    if row is None:
        truth = "nothing" if failure else str(jax.tree.leaves(want)[0].dtype)
        row = records.Row(point=work.point, moved_bytes=work.bytes, truth=truth)
        if "speed" in plan.metrics:
            blocks = -(-row.moved_bytes // (4 * timing.COPY_BLOCK))  # 2 bytes an element, in, out
            source = jax.ShapeDtypeStruct((blocks * timing.COPY_BLOCK,), jnp.bfloat16)
            try:
                row.copy = _timed(timing.copy, (cases.normal(source, seed=2),), plan)
            except jax.errors.JaxRuntimeError as error:
                row.copy = records.Cell(reason=_reason(error))
        table.rows.append(row)
    for provider in providers:
        advance(f"{work} {provider.name}")
        if failure:
            row.cells[provider.name] = records.Cell(reason=failure)
            continue
        try:
            function, arguments = cases.prepare(
                provider, work.point, inputs, mode=plan.mode, constants=len(case.further)
            )
            limit = case.tolerance * provider.tolerance * cases.TOLERANCE[work.dtype]
            cell = _cell(provider, function, arguments, want, limit, plan)
        except Exception as error:
            cell = records.Cell(reason=_reason(error))
        if row.copy.kernel_ms and cell.kernel_ms:
            cell.of_copy = row.copy.kernel_ms / cell.kernel_ms
        row.cells[provider.name] = cell
    return row


def _fill_peaks(work: Work, row: records.Row, providers: Sequence[Provider]) -> None:
    """Runs what came out right, and nobody counted, once more: each in a pool of its own."""
    for provider in providers:
        cell = row.cells[provider.name]
        if cell.memory_mib is None and not cell.reason:
            try:
                memory.new_pool()
                cell.memory_mib = _peak(work.case, provider, work.point, work.plan.mode)
            except Exception as error:
                cell.memory_reason = _reason(error)


def _cell(
    provider: Provider,
    function: Function,
    arguments: tuple[Any, ...],
    want: Any,
    limit: float,
    plan: Plan,
) -> records.Cell:
    """Right first, then fast; without a GPU a kernel is interpreted and only held to the truth."""
    started, found = time.perf_counter(), memory.programs_found()
    got = jax.block_until_ready(function(*arguments))
    compile_s = time.perf_counter() - started
    is_new = provider.jit and memory.programs_found() == found
    error = cases.deviation(got, want)
    if not error <= limit:  # NaN, too
        return records.Cell(reason=f"wrong: error {error:.1e}, accepted {limit:.1e}")
    if provider.kernel and not timing.on_gpu():
        return records.Cell(error=error)
    cell = _timed(function, arguments, plan) if "speed" in plan.metrics else records.Cell()
    cell.error, cell.compile_s = error, compile_s if is_new else None
    if "memory" in plan.metrics:
        cell.memory_mib = memory.planned(function, arguments)
        if cell.memory_mib is None and not timing.on_gpu():
            cell.memory_reason = "not jitted, so there is no one program to analyse"
    return cell


def _timed(function: Function, arguments: tuple[Any, ...], plan: Plan) -> records.Cell:
    return records.Cell(**dataclasses.asdict(timing.measure(function, arguments, calls=plan.calls)))


def _reason(error: Exception) -> str:
    """The error's first line, with its type unless it was a plain refusal."""
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    refusal = isinstance(error, ValueError | NotImplementedError)
    return text if refusal else f"{type(error).__name__}: {text}"


def _peak(case: Case, provider: Provider, point: Point, mode: str) -> float:
    function, arguments = cases.prepare(
        provider, point, cases.inputs(case), mode=mode, constants=len(case.further)
    )
    jax.block_until_ready(function(*arguments))
    return memory.peak()


def environment() -> dict[str, Any]:
    """Where and how the numbers came about, and with which programs."""
    versions = peers.versions()
    found = {
        "card": card(),
        "driver": memory.nvidia_smi("driver_version") if timing.on_gpu() else "",
        "jax": jax.__version__,
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version != "absent"},
        "absent": ", ".join(name for name, version in versions.items() if version == "absent"),
        "kernels": _fingerprint(),
        "cache": "cold" if timing.on_gpu() else "warm",
        "memory": "XLA's plan; of eager functions the allocator's peak",
    }
    return {name: value for name, value in found.items() if value}


def _fingerprint() -> str:
    """A hash of the package's source: a run must not mix two."""
    folder = pathlib.Path(pallas_ops.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:10]


def card() -> str:
    return str(jax.devices()[0].device_kind)
