"""One picture of all ops: how close to the speed of a copy each is, and who is beside it."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.records import Report, Table, merged

SHOWN = ("jit", "torch", "torch_compile", "fla", "xopes", "lax", "scan", "einsum")
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def draw(path: pathlib.Path, reports: Sequence[Report]) -> None:
    lines = [(report, mode) for report in reports for mode in report.modes][::-1]
    height = 0.75 + 0.42 * len(lines)
    figure = Figure(figsize=(11, 1.0 + height), layout="constrained")
    head, body = plots.stacked(figure, [1.0, height])
    axes: Axes = body.subplots()
    drawn: dict[str, dict[str, Any]] = {}
    for y, (report, mode) in enumerate(lines):
        drawn |= _line(axes, y, report.of_mode(mode).tables)
    names = [
        f"{report.op}, {DIRECTIONS[mode]}\n{shown(report.of_mode(mode).tables).name}"
        for report, mode in lines
    ]
    axes.set_yticks(range(len(lines)), names)
    axes.set_ylim(-0.5, len(lines) - 0.3)
    axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
    axes.axvline(1, color=plots.GREY, linewidth=1, linestyle=":")
    label = "copy's time / time, in the table that is named, at its largest size"
    axes.set_xlabel(f"{label} (bar: over all tables)", fontsize=9, color=plots.INK)
    plots.plain(axes, "x")
    axes.tick_params(axis="y", labelsize=10.5)
    legend = {name: drawn[name] for name in ("pallas", *SHOWN) if name in drawn}
    plots.title(head, "How close to the speed of a copy", merged(reports), legend)
    plots.save(figure, path)


def _line(axes: Axes, y: float, tables: Sequence[Table]) -> dict[str, dict[str, Any]]:
    """One op in one direction: all in one table, and the default's range over all tables."""
    drawn: dict[str, dict[str, Any]] = {}
    table = shown(tables)
    for name, style in plots.styles(tables).items():
        values = [x for each in tables if (x := _largest(each, name))]
        middle = _largest(table, name)
        ours = style["color"] == plots.DEFAULT
        if not middle or not (ours or name in SHOWN):
            continue
        if ours:
            bar: dict[str, Any] = dict(linewidth=5, alpha=0.25, solid_capstyle="round")
            axes.plot([min(values), max(values)], [y, y], color=plots.DEFAULT, **bar)
            text: dict[str, Any] = dict(textcoords="offset points", ha="center", fontsize=9.5)
            text |= dict(fontweight="bold", color=plots.DEFAULT)
            axes.annotate(f"{middle:.2f}", (middle, y), (0, 8), **text)
        dot = style | {"linestyle": "", "markersize": style["markersize"] * 1.7}
        axes.plot([middle], [y], **dot)
        drawn["pallas" if ours else name] = style
    return drawn


def shown(tables: Sequence[Table]) -> Table:
    """The table with results of the most functions; of several, that of the most bytes."""

    def order(table: Table) -> tuple[int, int]:
        functions = sum(_largest(table, name) is not None for name in SHOWN)
        return functions, max(row.moved_bytes for row in table.rows)

    return max(tables, key=order)


def _largest(table: Table, name: str) -> float | None:
    """Of a copy, at the largest size that has a number."""
    rows = sorted(table.rows, key=lambda row: row.point[table.x], reverse=True)
    found = (plots.of_copy(row, row.cells[name]) for row in rows if name in row.cells)
    return next((x for x in found if x), None)
