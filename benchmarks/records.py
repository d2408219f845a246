"""What a run found, as JSON keeps it: reports of tables, of rows, of cells."""

import dataclasses
import json
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
    calls: int  # that times are medians of
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def default(self) -> str:
        """The column that a user gets, or else the first."""
        names = [column.name for column in self.columns]
        return "pallas" if "pallas" in names else names[0]


@dataclasses.dataclass(kw_only=True)
class Report:
    """One run: where it ran, and what it found."""

    op: str
    environment: dict[str, Any]
    tables: list[Table] = dataclasses.field(default_factory=list)

    def failed(self) -> bool:
        """Whether a result was wrong, or the column that users get has none."""
        return any(
            cell.reason and (cell.reason.startswith("wrong") or name == table.default)
            for table in self.tables
            for row in table.rows
            for name, cell in row.cells.items()
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
