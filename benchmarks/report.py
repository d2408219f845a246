"""A report as Markdown tables, which can be read as plain text too, and as lines of a CSV file."""

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator

from benchmarks.plots import of_copy
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


def markdown(report: Report, figures: Iterable[str] = ()) -> str:
    """Who was compared, the figures, then all tables, each under its title and over footnotes."""
    notes = {c.name: c.note for table in report.tables for c in table.columns if c.note}
    parts = [
        f"# {report.op}",
        " · ".join(f"{name} {value}" for name, value in report.environment.items()),
        "\n".join([*(f"- {name}: {note}" for name, note in notes.items()), *LEGEND]),
        *(f"![{name}]({name})" for name in figures),
    ]
    for table in sorted(report.tables, key=lambda table: table.mode != "fwd"):
        for metric in METRICS:
            if metric.name in table.metrics:
                parts += [f"{table.title.format(metric=metric.name)}:", _grid(table, metric)]
                parts += ["\n".join(f"- {note}" for note in _footnotes(table, metric))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _grid(table: Table, metric: Metric) -> str:
    """The table itself, readable as plain text too; of the rows that have numbers."""
    ours, names = table.default, _measured(table)
    rows = [r for r in table.rows if any(_shown(r.cells.get(n), metric) for n in names)]
    floor = [metric.floor, f"{metric.floor} / {ours}"] if metric.floor else []
    lines = [[table.x, *names, *floor]]
    for row in sorted(rows, key=lambda row: row.point[table.x]):
        least = metric.least(row)
        best = metric.value(row.cells[ours]) if ours in row.cells else None
        cells = [_shown(row.cells.get(name), metric) for name in names]
        shares = [digits(least) if least else "", f"{least / best:.3f}" if least and best else ""]
        lines.append([str(row.point[table.x]), *cells, *(shares if floor else [])])
    return aligned(lines)


def digits(value: float) -> str:
    """Four that count: files of data have all."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.4g}"


def aligned(lines: list[list[str]], *, texts: int = 0) -> str:
    """Markdown of a head and rows; the first columns are texts, the others numbers."""
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(lines[0]))]
    rules = ["-" * (w - 1) + ("-" if i < texts else ":") for i, w in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            text.ljust(w) if i < texts else text.rjust(w)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (lines[0], rules, *lines[1:])
    )


def _measured(table: Table) -> list[str]:
    return [c.name for c in table.columns if any(c.name in row.cells for row in table.rows)]


def _shown(cell: Cell | None, metric: Metric) -> str:
    """The number; or -1, for which a footnote has the reason; or "ok": right, but not timed.

    Of slow functions and of memory some sizes are measured only; what is not jitted has no time to
    compile.
    """
    if cell is None:
        return ""
    value = metric.value(cell)
    if value is not None:
        return f"{value:.2f}" if metric.unit == "s" else digits(value)
    return "-1" if metric.reason(cell) else "ok" if metric.unit == "ms" else ""


def _footnotes(table: Table, metric: Metric) -> Iterator[str]:
    """When it was measured, how far from the truth all came, and what is to be said of cells."""
    names = _measured(table)
    if metric.unit == "ms":
        yield f"measured on {table.date}, medians of {calls(table)} calls"
        truths = " or ".join(sorted({row.truth for row in table.rows}))
        worst = {n: max(r.cells[n].error or 0 for r in table.rows if n in r.cells) for n in names}
        errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items() if error)
        if errors:
            yield f"largest error against {truths}: {errors}"
    for name in names:
        remarks: dict[str, list[str]] = {}
        for row in table.rows:
            if name in row.cells and (remark := _remark(row.cells[name], metric)):
                remarks.setdefault(remark, []).append(str(row.point[table.x]))
        for remark, xs in remarks.items():
            yield f"{name} at {table.x} = {', '.join(xs)}: {remark}"


def calls(*tables: Table) -> str:
    """How many; slow functions are called fewer times."""
    found = {
        cell.calls or table.calls
        for table in tables
        for row in table.rows
        for cell in row.cells.values()
    }
    least, most = min(found, default=0), max(found, default=0)
    return str(most) if least == most else f"{least} to {most}"


def _remark(cell: Cell, metric: Metric) -> str | None:
    if reason := metric.reason(cell):
        return f"-1, {reason}"
    if metric.name == "speed" and cell.kernel_ms and not cell.kernels:
        return "calls launched different kernels, so this is the mean of their sums"
    return None


def csv_text(reports: Iterable[Report]) -> str:
    """Every number of every cell."""
    fields = [field.name for field in dataclasses.fields(Cell) if field.name != "of_copy"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    about = ("op", "mode", "dtype", "table", "size", "column", "ours", "date", "moved_bytes")
    writer.writerow([*about, "copy_ms", "of_copy", *fields])
    for report in reports:
        for table, row, column, cell in report.cells():
            size = f"{table.x}={row.point[table.x]}"
            place = [report.op, table.mode, table.dtype, table.name, size, column.name]
            copy_ms = row.copy.kernel_ms or row.copy.wall_ms
            share = of_copy(row, cell)
            numbers = [getattr(cell, name) for name in fields]
            numbers[fields.index("calls")] = cell.calls or table.calls
            writer.writerow(
                [*place, column.kernel, table.date, row.moved_bytes]
                + [_brief(x) for x in (copy_ms, share, *numbers)]
            )
    return file.getvalue()


def _brief(x: object) -> object:
    """Six digits: JSON has all."""
    return f"{x:.6g}" if isinstance(x, float) else x
