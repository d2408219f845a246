"""What a run found, as JSON keeps it: reports of tables, of rows, of cells."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(kw_only=True)
class Cell:
    """What came of one provider on one case; a number that is missing has its reason."""

    kernel_ms: float | None = None
    wall_ms: float | None = None
    kernels: int | None = None
    compile_s: float | None = None  # until the first call's result was ready
    memory_mib: float | None = None
    error: float | None = None  # see cases.deviation
    of_copy: float | None = None  # the copy's kernel time over this one's
    calls: int | None = None  # that the times are medians of; None: as many as the table says
    spread: float | None = None  # interquartile range of the calls' kernel times over the median
    reason: str | None = None
    memory_reason: str | None = None


@dataclasses.dataclass(kw_only=True)
class Row:
    """One case: a point of the table, a copy of as many bytes, and a cell per provider."""

    point: dict[str, Any]
    moved_bytes: int  # inputs + results, each once
    truth: str  # the dtype of the reference that results were held against
    copy: Cell = dataclasses.field(default_factory=Cell)
    cells: dict[str, Cell] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Column:
    """One provider, for a reader of the table."""

    name: str
    kernel: bool = False  # ours, in Pallas
    jit: bool = True
    note: str = ""


@dataclasses.dataclass(kw_only=True)
class Table:
    """The cases that differ in `x` only; `title` leaves room for the metric."""

    title: str
    x: str
    mode: str
    dtype: str
    columns: list[Column]
    metrics: list[str]  # what was measured: names of report.METRICS
    date: str
    calls: int  # that times are medians of, at most
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def default(self) -> str:
        """The column that a user gets, or else the first."""
        names = [column.name for column in self.columns]
        return "pallas" if "pallas" in names else names[0]

    @property
    def name(self) -> str:
        """What tells this table from the others of its op and mode."""
        tail = self.title.partition(f"-{self.mode}-")[2]
        return tail.replace(f"-{self.dtype}", "") if self.dtype == "bf16" else tail

    def row(self, point: dict[str, Any]) -> Row | None:
        return next((row for row in self.rows if row.point == point), None)


@dataclasses.dataclass(kw_only=True)
class Report:
    """One run: where it ran, and what it found."""

    op: str
    environment: dict[str, Any]
    tables: list[Table] = dataclasses.field(default_factory=list)

    @property
    def dates(self) -> list[str]:
        """A table that a run went on with on another day has two."""
        return sorted({date for table in self.tables for date in table.date.split(", ")})

    @property
    def modes(self) -> list[str]:
        return [mode for mode in ("fwd", "bwd") if any(x.mode == mode for x in self.tables)]

    def of_mode(self, mode: str) -> "Report":
        return dataclasses.replace(self, tables=[x for x in self.tables if x.mode == mode])

    def cells(self) -> Iterator[tuple[Table, Row, Column, Cell]]:
        for table in self.tables:
            for row in table.rows:
                for column in table.columns:
                    if column.name in row.cells:
                        yield table, row, column, row.cells[column.name]

    def failed(self) -> bool:
        """Whether a result was wrong, or the column that users get has none."""
        return any(
            cell.reason and (cell.reason.startswith("wrong") or column.name == table.default)
            for table, _, column, cell in self.cells()
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        raw = json.loads(text)
        for table in raw["tables"]:
            table["columns"] = [Column(**column) for column in table["columns"]]
            for row in table["rows"]:
                row["copy"] = Cell(**row["copy"])
                row["cells"] = {name: Cell(**cell) for name, cell in row["cells"].items()}
            table["rows"] = [Row(**row) for row in table["rows"]]
        raw["tables"] = [Table(**table) for table in raw["tables"]]
        return cls(**raw)


def noise(one: Cell, other: Cell, *, least: float = 0.02, unknown: float = 0.05) -> float:
    """The relative difference below which two times count as equal: both ranges over medians."""
    if one.spread is None or other.spread is None:
        return max(least, unknown)
    return max(least, one.spread + other.spread)


def merged(reports: Sequence[Report]) -> Report:
    """A table replaces one of the same title; with the environments of what is left."""
    tables = {table.title: table for report in reports for table in report.tables}
    left = [r.environment for r in reports if any(tables[t.title] is t for t in r.tables)]
    names = dict.fromkeys(name for environment in left for name in environment)
    environment = {
        name: " / ".join(
            dict.fromkeys(x for each in left for x in str(each.get(name, "-")).split(" / "))
        )
        for name in names
    }
    return Report(op=reports[0].op, environment=environment, tables=list(tables.values()))


def load(folder: pathlib.Path) -> dict[str, Report]:
    """The ops of a folder; tables of OP.json, which a run writes, replace those of other files."""
    found: dict[str, list[tuple[bool, Report]]] = {}
    for path in sorted(folder.glob("*.json")):
        raw = json.loads(path.read_text())
        if isinstance(raw, dict) and "tables" in raw:
            report = Report.from_json(path.read_text())
            found.setdefault(report.op, []).append((path.stem == report.op, report))
    return {
        op: merged([report for _, report in sorted(reports, key=lambda x: x[0])])
        for op, reports in sorted(found.items())
    }


def save(report: Report, folder: pathlib.Path) -> None:
    """OP.json; tables that it has stay, unless measured again.

    Raises:
      ValueError: if they are of another card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.op}.json"
    if path.exists():
        old = Report.from_json(path.read_text())
        was, now = (each.environment.get("card") for each in (old, report))
        if was != now:
            raise ValueError(f"{path} has results of {was}, and these are of {now}: use --out")
        report = merged([old, report])
    part = path.with_suffix(".part")
    part.write_text(report.to_json())
    part.replace(path)
