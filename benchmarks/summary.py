"""The summary of a folder of results: what was measured when, how fast, and where others win."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.headline import DIRECTIONS
from benchmarks.plots import of_copy
from benchmarks.records import Cell, Report, Row, Table, noise
from benchmarks.report import aligned, calls, digits

PEERS = {
    "torch": "PyTorch",
    "torch_compile": "torch.compile",
    "fla": "flash-linear-attention",
    "lax": "jax.lax.cumlogsumexp",
    "scan": "jax.lax.associative_scan",
    "xopes": "xopes' Triton kernels",
    "einsum": "jax.numpy with every product in bfloat16, jitted",
}

NOISE = "noise (2 %, or the sum of the two interquartile ranges)"

NAMES = (
    "In names of tables: `axis1` sums along axis 1 of 3, others of logcumsumexp along the last; "
    "`padded` has -inf in up to a quarter of each row, on the left; in `wide` every tenth row "
    "ranges over several hundred; `length4n` has 4 n positions; `packed` has sequences of "
    "different lengths; `ranks2`: keys and values of rank 2; `full`: queries without factors; "
    "`pages64`: a cache in pages of 64 tokens; `int8`, `float8_e4m3fn`: its features in these."
)


def markdown(reports: Sequence[Report], others: Sequence[pathlib.Path]) -> str:
    parts = [
        "# Results",
        _about(reports),
        "![Fraction of a copy](summary.png)",
        "Each op at the largest size of each table: the time of a copy of the same bytes over the "
        "op's. 1 is the speed of a copy. `jit` is the jitted `jax.numpy` reference. The figure has "
        "one table an op and direction, that with most functions; bars are over all of its tables.",
        NAMES,
        aligned(list(_headlines(reports)), texts=4),
        f"Pages with every table: {', '.join(f'[{r.op}]({r.op}.md)' for r in reports)}. Every "
        "number in one file: [numbers.csv](numbers.csv).",
        "## Where we lose",
        _lost(reports),
        *_failed(reports),
        *_other_files(others),
    ]
    return "\n\n".join(parts) + "\n"


def _about(reports: Sequence[Report]) -> str:
    """Where and when; whether it was one run; and who was there to be compared with."""
    facts = {
        name: sorted({str(r.environment.get(name, "")) for r in reports})
        for name in ("card", "driver", "jax")
    }
    lines = [f"- {name}: {', '.join(values)}" for name, values in facts.items() if any(values)]
    dates = sorted({date for report in reports for date in report.dates})
    one_run = len(dates) == 1 and all(len(values) == 1 for values in facts.values())
    count = calls(*(table for report in reports for table in report.tables))
    lines.append(
        f"- measured on {dates[0]}"
        if one_run
        else f"- **not one run**: measured on {', '.join(dates)}; each table says when"
    )
    by_cupti = any(cell.kernel_ms for report in reports for *_, cell in report.cells())
    clock = "kernel times by CUPTI, cold cache" if by_cupti else "wall-clock times"
    lines.append(f"- {clock}, medians of {count} calls")
    measured = {
        name: [
            r.op for r in reports if any(c.name == name and not x.reason for *_, c, x in r.cells())
        ]
        for name in PEERS
    }
    present = [
        f"{PEERS[name]} (`{name}`: {', '.join(ops)})" for name, ops in measured.items() if ops
    ]
    absent = [PEERS[name] for name, ops in measured.items() if not ops]
    lines += [f"- compared with: {', '.join(present)}"] if present else []
    lines += [f"- not in these tables: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _headlines(reports: Sequence[Report]) -> Iterator[list[str]]:
    yield ["op", "direction", "table", "size", "of a copy", "jit", "best of others"]
    for report in reports:
        for table in sorted(report.tables, key=lambda table: table.mode != "fwd"):
            row = max(table.rows, key=lambda row: row.point[table.x])
            shares = {
                name: share for name, cell in row.cells.items() if (share := of_copy(row, cell))
            }
            ours = shares.pop(table.default, None)
            jit = shares.pop("jit", None)
            best = max(((v, k) for k, v in shares.items() if k in PEERS), default=None)
            yield [
                report.op,
                DIRECTIONS[table.mode],
                table.name,
                f"{table.x} = {row.point[table.x]}",
                f"{ours:.2f}" if ours else "",
                f"{jit:.2f}" if jit else "",
                f"{best[0]:.2f} ({best[1]})" if best else "",
            ]


class Loss(NamedTuple):
    """A function that is faster than the default."""

    times: float
    report: Report
    table: Table
    row: Row
    name: str


def losses(reports: Sequence[Report]) -> list[Loss]:
    """Of all rows, beyond noise, the greatest first.

    Kernel times, or the wall clock where they are missing.
    """
    found = []
    for report in reports:
        for table, row, column, cell in report.cells():
            default = row.cells.get(table.default)
            if column.name == table.default or not default:
                continue
            ours, theirs = _times(default, cell)
            if ours and theirs and ours / theirs > 1 + noise(default, cell):
                found.append(Loss(ours / theirs, report, table, row, column.name))
    return sorted(found, key=lambda loss: -loss.times)


def _times(one: Cell, other: Cell) -> tuple[float | None, float | None]:
    """Both times, by the same clock."""
    if one.kernel_ms or other.kernel_ms:
        return one.kernel_ms, other.kernel_ms
    return one.wall_ms, other.wall_ms


def _lost(reports: Sequence[Report]) -> str:
    found = losses(reports)
    if not found:
        return f"Nothing that was measured is faster than the default by more than {NOISE}."
    rows = sum(len(table.rows) for report in reports for table in report.tables)
    lost = len({(loss.table.title, str(loss.row.point)) for loss in found})
    lines = [
        ["op", "direction", "table", "size", "default, ms", "faster", "its ms", "times faster"]
    ]
    for times, report, table, row, name in found:
        column = next(column for column in table.columns if column.name == name)
        ours, theirs = _times(row.cells[table.default], row.cells[name])
        size = f"{table.x} = {row.point[table.x]}"
        place = [report.op, DIRECTIONS[table.mode], table.name, size]
        whose = f"{name} (ours)" if column.kernel else name
        lines.append([*place, digits(ours or 0), whose, digits(theirs or 0), f"{times:.3f}"])
    text = (
        f"In {lost} of {rows} rows something is faster than the default by more than {NOISE}: "
        "another launch of our kernel (ours), or another function. Functions whose products are "
        "rounded, or that compute less, are listed with the others; the pages say what each is."
    )
    return f"{text}\n\n{aligned(lines, texts=4)}"


def _failed(reports: Sequence[Report]) -> list[str]:
    """Where the default has no number."""
    lines = [
        f"- {report.op}, {DIRECTIONS[table.mode]}, {table.name}, {row.point[table.x]}: "
        f"{cell.reason}"
        for report in reports
        for table, row, column, cell in report.cells()
        if column.name == table.default and cell.reason
    ]
    return ["The default failed:", "\n".join(lines)] if lines else []


def _other_files(paths: Sequence[pathlib.Path]) -> list[str]:
    """JSON of another form, from measurements that no table has."""
    lines = []
    for path in paths:
        raw = json.loads(path.read_text())
        if isinstance(raw, dict) and "tables" not in raw:
            about = " ".join([raw.get("date", ""), raw.get("note", "")]).strip()
            lines.append(f"- [{path.name}]({path.name}): {about}")
    return ["## Other measurements", "\n".join(lines)] if lines else []
