"""How results are shown: as Markdown tables that can be read as plain text, and as plots.

`python -m benchmarks.report RESULTS.json...` writes each file's tables and plots anew, beside it.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from absl import app

from benchmarks import plots
from benchmarks.records import Cell, Report, Row, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a cell: one table, one plot."""

    name: str  # as in the title
    field: str
    label: str
    unit: str
    floor: str  # what the op could at best come to, if that is known

    def value(self, cell: Cell) -> float | None:
        value: float | None = getattr(cell, self.field)
        return value

    def least(self, row: Row) -> float | None:
        if not self.floor:
            return None
        return row.moved_bytes / 2**20 if self.name == "memory" else self.value(row.copy)

    def reason(self, cell: Cell) -> str | None:
        return cell.reason or (cell.memory_reason if self.name == "memory" else None)


METRICS = (
    Metric(name="speed", field="kernel_ms", label="kernel time", unit="ms", floor="copy"),
    Metric(name="wall", field="wall_ms", label="wall-clock time", unit="ms", floor="copy"),
    Metric(name="compile", field="compile_s", label="first call", unit="s", floor=""),
    Metric(name="memory", field="memory_mib", label="peak memory", unit="MiB", floor="in + out"),
)
LEGEND = (
    "- speed: ms that a call's kernels ran, by CUPTI; wall: ms until its result was ready; medians",
    "- compile: s until the result of the first call was ready, of what is jitted",
    "- memory: MiB at the peak, inputs included; in + out: what inputs and results alone take",
    "- copy: a kernel that reads and writes as many bytes as the op's inputs and results have",
    "- -1: wrong, failed or not applicable, for the reason given; ok: right, but interpreted",
)


def markdown(report: Report) -> str:
    """Who was compared, then all tables, each under its title and over its footnotes."""
    columns = [f"- {c.name}: {c.note}" for c in report.tables[0].columns if c.note]
    parts = [
        f"# {report.op}",
        " · ".join(f"{name} {value}" for name, value in report.environment.items()),
        "\n".join([*columns, *LEGEND]),
    ]
    for table in report.tables:
        for metric in METRICS:
            if metric.name in table.metrics:
                parts += [f"{table.title.format(metric=metric.name)}:", _grid(table, metric)]
                parts += ["\n".join(f"- {note}" for note in _footnotes(table, metric))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _grid(table: Table, metric: Metric) -> str:
    """The table itself, aligned so that it can be read as plain text too."""
    ours, names = table.default, [column.name for column in table.columns]
    floor = [metric.floor, f"{metric.floor} / {ours}"] if metric.floor else []
    lines = [[table.x, *names, *floor]]
    for row in table.rows:
        least, best = metric.least(row), metric.value(row.cells[ours])
        share = f"{least / best:.3f}" if least and best else ""
        cells = [_shown(row.cells[name], metric) for name in names]
        shares = [f"{least:.6f}" if least else "", share] if floor else []
        lines.append([str(row.point[table.x]), *cells, *shares])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(
        "| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _shown(cell: Cell, metric: Metric) -> str:
    """The number; or -1, for which a footnote has the reason; or "ok": right, but not timed.

    Peaks may be measured in some rows only, and what is not jitted has no time to compile.
    """
    value = metric.value(cell)
    if value is not None:
        return f"{value:.2f}" if metric.unit == "s" else f"{value:.6f}"
    return "-1" if metric.reason(cell) else "ok" if metric.unit == "ms" else ""


def _footnotes(table: Table, metric: Metric) -> Iterator[str]:
    """When it was measured, how far from the truth all came, and what is to be said of cells."""
    names = [column.name for column in table.columns]
    if metric.unit == "ms":
        yield f"measured on {table.date}, medians of {table.calls} calls"
        truths = " or ".join(sorted({row.truth for row in table.rows}))
        worst = {n: max(row.cells[n].error or 0 for row in table.rows) for n in names}
        errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items() if error)
        if errors:
            yield f"largest error against {truths}: {errors}"
    for name in names:
        remarks: dict[str, list[str]] = {}
        for row in table.rows:
            if remark := _remark(row.cells[name], metric):
                remarks.setdefault(remark, []).append(str(row.point[table.x]))
        for remark, xs in remarks.items():
            yield f"{name} at {table.x} = {', '.join(xs)}: {remark}"


def _remark(cell: Cell, metric: Metric) -> str | None:
    if reason := metric.reason(cell):
        return f"-1, {reason}"
    if metric.name == "speed" and cell.kernel_ms and not cell.kernels:
        return "calls launched different kernels, so this is the mean of their sums"
    return None


def write(report: Report, folder: pathlib.Path) -> None:
    """OP-MODE.json and .md, and plots of memory and of kernel time, or wall-clock if there is none.

    Tables of an earlier run in the same environment stay, unless measured again.
    """
    stem = folder / f"{report.op}-{report.tables[0].mode}"
    folder.mkdir(parents=True, exist_ok=True)
    report = _merged(stem.with_suffix(".json"), report)
    stem.with_suffix(".json").write_text(report.to_json())
    stem.with_suffix(".md").write_text(markdown(report))
    for table in report.tables:
        drawn = set(table.metrics) - {"compile"} - ({"wall"} if "speed" in table.metrics else set())
        for metric in METRICS:
            if metric.name in drawn:
                _plot(report, table, metric, folder)


def _merged(path: pathlib.Path, new: Report) -> Report:
    try:
        old = Report.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError):  # none, or of another form
        return new
    if old.environment != new.environment:
        return new
    tables = {table.title: table for table in [*old.tables, *new.tables]}  # each in its place
    return dataclasses.replace(new, tables=list(tables.values()))


def _plot(report: Report, table: Table, metric: Metric, folder: pathlib.Path) -> None:
    xs = [float(row.point[table.x]) for row in table.rows]

    def points(values: Iterable[float | None]) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(xs, values, strict=True) if y]

    series = [
        plots.Series(
            name=column.name,
            points=points(metric.value(row.cells[column.name]) for row in table.rows),
            kernel=column.kernel,
            bold=column.name == table.default,
        )
        for column in table.columns
    ]
    if not any(line.points for line in series):
        return
    name = table.title.format(metric=metric.name)
    shape = ", ".join(table.title.partition("-{metric}-")[2].split("-"))
    plots.draw(
        folder / f"{name}.png",
        title=f"{report.op}: {metric.label} [{metric.unit}]",
        subtitle=f"{shape}  ·  {report.environment['card']}  ·  JAX {report.environment['jax']}",
        x_label=table.x,
        floor=plots.Series(name=metric.floor, points=points(map(metric.least, table.rows))),
        series=series,
    )


def main(argv: Sequence[str]) -> None:
    for name in argv[1:]:
        path = pathlib.Path(name)
        write(Report.from_json(path.read_text()), path.parent)


if __name__ == "__main__":
    app.run(main)
