"""Figures: an op in one direction as small multiples, and all ops in one picture.

All show fractions: a copy's time over a function's, and the bytes of inputs and results over the
peak of memory. 1 is the best that can be expected. Colours can be told apart by the colour-blind.
"""

import io
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from benchmarks.records import Cell, Column, Report, Row, Table

INK, GREY, FAINT = "#343a40", "#868e96", "#e9ecef"
DEFAULT, VARIANT = "#0072b2", "#56b4e9"
OTHERS = {  # colour and marker
    "jit": ("#e69f00", "D"),
    "jnp": ("#e69f00", "x"),
    "torch": ("#d55e00", "X"),
    "torch_compile": ("#cc79a7", "p"),
    "fla": ("#000000", "h"),
    "xopes": ("#000000", "^"),
    "lax": ("#009e73", "*"),
    "scan": ("#009e73", "<"),
    "einsum": ("#009e73", "d"),
    "naive": ("#adb5bd", "x"),
    "naive jit": ("#adb5bd", "D"),
}
PANELS = 4  # beside each other


def of_copy(row: Row, cell: Cell) -> float | None:
    """By kernel times; by the wall clock where no kernel was timed."""
    if cell.kernel_ms and row.copy.kernel_ms:
        return row.copy.kernel_ms / cell.kernel_ms
    timed = cell.wall_ms and row.copy.wall_ms and not row.copy.kernel_ms
    return row.copy.wall_ms / cell.wall_ms if timed else None  # type: ignore[operator]


def of_least(row: Row, cell: Cell) -> float | None:
    return row.moved_bytes / 2**20 / cell.memory_mib if cell.memory_mib else None


def short_names(tables: Sequence[Table]) -> list[str]:
    """Without the words that all tables share."""
    words = [re.split(r"-(?!\d+(?:-|$))", table.name) for table in tables]
    shared = set.intersection(*map(set, words)) if len(words) > 1 else set()
    return [
        " ".join(w for w in each if w not in shared) or table.name
        for each, table in zip(words, tables, strict=True)
    ]


def op(path: pathlib.Path, report: Report, mode: str) -> None:
    """Tables of three sizes or more as lines; of every table the largest size as dots."""
    report = report.of_mode(mode)
    tables = report.tables
    names = dict(zip((table.title for table in tables), short_names(tables), strict=True))
    drawn = styles(tables)
    lines = [table for table in tables if len(table.rows) > 2]
    across = min(PANELS, max(2, len(lines)))
    down = -(-len(lines) // across)
    heights = [2.15 * down + 0.2, 0.85 + 0.23 * len(tables)]
    figure = Figure(figsize=(11, sum(heights) + 1.0), layout="constrained")
    head, top, bottom = stacked(figure, [1.0, *heights])
    title(head, f"{report.op}, {'forward' if mode == 'fwd' else 'backward'}", report, drawn)
    if lines:
        panels = top.subplots(down, across, sharey=True, squeeze=False).flat
        for axes, table in itertools.zip_longest(panels, lines):
            _lines(axes, table, names, drawn) if table else axes.set_visible(False)
        top.supylabel("copy's time / time", fontsize=9, color=INK)
        top.supxlabel(lines[0].x, fontsize=9, color=INK)
    left, right = bottom.subplots(1, 2, sharey=True)
    _dots(left, tables, names, drawn, of_copy, "copy's time / time at the largest size")
    _dots(right, tables, names, drawn, of_least, "bytes of inputs and results / peak memory")
    save(figure, path)


Styles = Mapping[str, dict[str, Any]]


def styles(tables: Sequence[Table]) -> Styles:
    """How each column is drawn, the default first."""
    markers = itertools.cycle("s^vP<>")
    columns: dict[str, Column] = {c.name: c for table in tables for c in table.columns}
    measured = {name for table in tables for row in table.rows for name in row.cells}
    found: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        if name in {table.default for table in tables}:
            style = dict(color=DEFAULT, marker="o", linewidth=2.6, markersize=5, zorder=5)
        elif column.kernel:
            style = dict(color=VARIANT, marker=next(markers), linewidth=1.3, markersize=4, zorder=4)
        else:
            color, marker = OTHERS.get(name, (GREY, "."))
            style = dict(color=color, marker=marker, linewidth=1.3, markersize=4, zorder=3)
            style["linestyle"] = (0, (4, 1.5))
        if name in measured:
            found[name] = style
    return dict(sorted(found.items(), key=lambda item: -item[1]["zorder"]))


def stacked(figure: Figure, heights: Sequence[float]) -> Any:
    figure.get_layout_engine().set(w_pad=0.1)  # type: ignore[union-attr,call-arg]
    return figure.subfigures(len(heights), 1, height_ratios=heights)


def title(place: Any, text: str, report: Report, drawn: Styles) -> None:
    card, jax = report.environment["card"], report.environment["jax"]
    place.text(0.01, 0.93, text, fontsize=15, fontweight="bold", color=INK, va="top")
    best = "1 is the speed of a copy of the same bytes"
    about = "  ·  ".join([card, f"JAX {jax}", ", ".join(report.dates), best])
    place.text(0.01, 0.58, about, fontsize=9.5, color=GREY, va="top")
    handles = [Line2D([], [], label=name, **style) for name, style in drawn.items()]
    options: dict[str, Any] = dict(frameon=False, fontsize=9.5, handlelength=2.4, columnspacing=1.4)
    beside = len(handles) if len(handles) < 11 else -(-len(handles) // 2)
    place.legend(handles=handles, loc="lower left", ncols=beside, borderaxespad=0, **options)


def _lines(axes: Axes, table: Table, names: Mapping[str, str], drawn: Styles) -> None:
    rows = sorted(table.rows, key=lambda row: row.point[table.x])
    xs = [row.point[table.x] for row in rows]
    for name, style in drawn.items():
        found = [
            (x, of_copy(r, r.cells[name])) for x, r in zip(xs, rows, strict=True) if name in r.cells
        ]
        points = [(x, y) for x, y in found if y]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    axes.set_title(names[table.title], fontsize=9.5, color=INK, loc="left")
    axes.set_xscale("log", base=2)
    ticks = xs[:: 1 if len(xs) < 5 else 2]
    axes.set_xticks(ticks, [_short(x) for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    plain(axes, "y")


def _dots(
    axes: Axes,
    tables: Sequence[Table],
    names: Mapping[str, str],
    drawn: Styles,
    value: Any,
    label: str,
) -> None:
    for y, table in enumerate(reversed(tables)):
        row = max(table.rows, key=lambda row: row.point[table.x])
        for name, style in drawn.items():
            x = value(row, row.cells[name]) if name in row.cells else None
            if x:
                axes.plot(
                    [x], [y], **{**style, "linestyle": "", "markersize": style["markersize"] + 1.5}
                )
    axes.set_yticks(range(len(tables)), [names[table.title] for table in reversed(tables)])
    axes.set_ylim(-0.6, len(tables) - 0.4)
    axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
    axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
    axes.set_xlabel(label, fontsize=9, color=INK)
    plain(axes, "both")


def plain(axes: Axes, grid: Any) -> None:
    axes.tick_params(colors=INK, length=0, labelsize=8.5)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def _short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def save(figure: Figure, path: pathlib.Path) -> None:
    """In 96 colours, a third of the bytes; those of a few points are kept, too."""
    image = io.BytesIO()
    figure.savefig(image, dpi=130)
    Image.open(image).convert("RGB").quantize(96, Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )
