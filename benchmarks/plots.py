"""One plot: log-log lines, each labelled where it ends, over the floor they cannot pass."""

import dataclasses
import io
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

BOLD = "#0b3d91"
OURS = ("#228be6", "#0ca678", "#15aabf", "#74b816")  # cool, solid: kernels
OTHERS = ("#e8590c", "#f08c00", "#c2255c", "#9c36b5", "#846358")  # warm, dashed: the rest
INK, GREY = "#343a40", "#868e96"
LABEL_GAP = 0.052  # between the labels' centres, in heights of the axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line; `bold` is the one to look at."""

    name: str
    points: list[tuple[float, float]]
    kernel: bool = False
    bold: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
    """Where a line ends, and what to write there."""

    x: float
    y: float
    name: str
    color: str
    bold: bool


def draw(
    path: pathlib.Path,
    *,
    title: str,
    subtitle: str,
    x_label: str,
    floor: Series,
    series: Sequence[Series],
) -> None:
    figure = Figure(figsize=(9.6, 5.4))
    axes = figure.add_axes((0.07, 0.11, 0.79, 0.73))
    figure.text(0.02, 0.945, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 0.893, subtitle, fontsize=10, color=GREY, va="center")
    axes.set_xlabel(x_label)

    ours, others = itertools.cycle(OURS), itertools.cycle(OTHERS)
    ends = [_floor(axes, floor)] if floor.points else []
    for line in series:
        color = BOLD if line.bold else next(ours if line.kernel else others)
        if line.points:
            ends.append(_line(axes, line, color))
    _frame(axes, [point for line in (floor, *series) for point in line.points])
    _label(axes, ends)
    _save(figure, path)


def _save(figure: Figure, path: pathlib.Path) -> None:
    """In 64 colours, a quarter of the bytes."""
    image = io.BytesIO()
    figure.savefig(image, dpi=200)
    Image.open(image).convert("RGB").quantize(64).save(path, optimize=True)


def _line(axes: Axes, line: Series, color: str) -> _End:
    axes.plot(
        *zip(*line.points, strict=True),
        color=color,
        linewidth=3.0 if line.bold else 1.5,
        linestyle="-" if line.kernel else (0, (5, 1.5)),
        marker="o",
        markersize=5.5 if line.bold else 3.5,
        zorder=4 if line.bold else 3,
    )
    x, y = line.points[-1]
    return _End(x=x, y=y, name=line.name, color=color, bold=line.bold)


def _floor(axes: Axes, floor: Series) -> _End:
    """Nothing can be below it: shaded."""
    xs, ys = zip(*floor.points, strict=True)
    axes.plot(xs, ys, color=GREY, linewidth=1.2, linestyle=":")
    axes.fill_between(xs, ys, [min(ys) / 100] * len(ys), color=GREY, alpha=0.16, linewidth=0)
    return _End(x=xs[-1], y=ys[-1], name=floor.name, color=GREY, bold=False)


def _frame(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Scales that fit the lines, the measured x as ticks, and no more ink than that."""
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(min(ys) / 1.6, max(ys) * 1.6)
    axes.set_xlim(xs[0] / 1.06, xs[-1] * 1.04)
    axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.tick_params(colors=INK, length=0, labelsize=9.5)
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(axes: Axes, ends: Sequence[_End]) -> None:
    """Names where the lines end; at the right, moved apart where they would overlap."""
    last = max(end.x for end in ends)
    for end in ends:
        if end.x < last:
            place: dict[str, Any] = {
                "xytext": (0, 7),
                "textcoords": "offset points",
                "ha": "center",
            }
            axes.annotate(end.name, (end.x, end.y), color=end.color, fontsize=10.5, **place)
    ends = sorted((end for end in ends if end.x == last), key=lambda end: end.y)
    low, high = (math.log(y) for y in axes.get_ylim())
    exact = [(math.log(end.y) - low) / (high - low) for end in ends]
    for end, at, height in zip(ends, exact, _apart(exact), strict=True):
        weight = "bold" if end.bold else "normal"
        style: dict[str, Any] = {"color": end.color, "transform": axes.transAxes, "clip_on": False}
        axes.plot((1.005, 1.022), (at, height), linewidth=0.8, **style)
        axes.text(1.028, height, end.name, fontsize=10.5, fontweight=weight, va="center", **style)


def _apart(heights: Sequence[float]) -> list[float]:
    """Sorted heights, each moved as little as needed to be LABEL_GAP from its neighbours."""
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            lack = LABEL_GAP - (moved[i + 1] - moved[i])
            if lack > 1e-4:
                moved[i] -= lack / 2
                moved[i + 1] += lack / 2
    return moved
