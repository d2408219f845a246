"""Which points became slower: `python -m benchmarks.compare OLD.json NEW.json`.

Run before a change to a kernel is merged, on one card; folders can be compared as well. Two times
differ if their ratio is further from 1 than the noise. Noise is the sum of both interquartile
ranges over their medians, or, if that is more, how much the copies of that row differ; and never
less than --least. Where a record has no spread it is --threshold. The exit status is 1 if one of
our kernels became slower or failed.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from absl import app, flags

from benchmarks import records
from benchmarks.records import Cell, Report, Row

_THRESHOLD = flags.DEFINE_float("threshold", 0.05, "noise of records that hold no spread")
_LEAST = flags.DEFINE_float("least", 0.02, "noise is taken to be no less")
_ALL = flags.DEFINE_bool("all", False, "other columns than our kernels, too")

Key = tuple[str, str, str]  # a table's title, a point, a column
BAD = ("slower", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One point that is not what it was."""

    key: Key
    what: str  # slower, faster, failed, not measured, new
    ratio: float = 1.0  # new time over old
    noise: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        title, point, column = self.key
        detail = self.reason or f"{self.ratio:.3f} times the old time, noise {self.noise:.3f}"
        shown = f": {detail}" if self.what in (*BAD, "faster") else ""
        return f"{self.what:>12}: {title.format(metric='speed')} {point} {column}{shown}"


def changes(
    old: Sequence[Report],
    new: Sequence[Report],
    *,
    threshold: float = 0.05,
    least: float = 0.02,
    every_column: bool = False,
) -> Iterator[Change]:
    """Of all points, the old ones first."""
    before, after = _points(old, every_column), _points(new, every_column)
    for key, (row, cell) in before.items():
        if _time(cell) is None:
            continue
        if key not in after:
            yield Change(key=key, what="not measured")
            continue
        new_row, new_cell = after[key]
        if new_cell.reason:
            yield Change(key=key, what="failed", reason=new_cell.reason)
            continue
        was, now = _time(cell), _time(new_cell)
        if was and now:
            noise = records.noise(cell, new_cell, least=least, unknown=threshold)
            if cell.spread is not None and new_cell.spread is not None:
                noise = max(noise, _drift(row, new_row))
            if max(now / was, was / now) > 1 + noise:
                what = "slower" if now > was else "faster"
                yield Change(key=key, what=what, ratio=now / was, noise=noise)
    for key in after.keys() - before.keys():
        yield Change(key=key, what="new")


def _points(reports: Sequence[Report], every_column: bool) -> dict[Key, tuple[Row, Cell]]:
    return {
        (table.title, " ".join(f"{k}={v}" for k, v in row.point.items()), column.name): (row, cell)
        for report in reports
        for table, row, column, cell in report.cells()
        if column.kernel or every_column
    }


def _time(cell: Cell) -> float | None:
    return cell.kernel_ms or cell.wall_ms


def _drift(row: Row, new_row: Row) -> float:
    """How much the copy of the same bytes differs."""
    was, now = _time(row.copy), _time(new_row.copy)
    return max(was, now) / min(was, now) - 1 if was and now else 0.0


def read(name: str) -> list[Report]:
    path = pathlib.Path(name)
    if path.is_dir():
        found = list(records.load(path).values())
        if not found:
            raise app.UsageError(f"{name} holds no run")
        return found
    try:
        return [Report.from_json(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise app.UsageError(f"{name} is not the JSON of a run") from error


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        raise app.UsageError("two files or two folders: OLD NEW")
    old, new = read(arguments[1]), read(arguments[2])
    for name in ("card", "jax"):
        was, now = ({report.environment.get(name) for report in side} for side in (old, new))
        if was != now:
            text = f"{name} differs: {', '.join(map(str, was))} and {', '.join(map(str, now))}"
            if name == "card":
                raise app.UsageError(f"{text}; times of two cards cannot be compared")
            print(text)
    found = list(
        changes(old, new, threshold=_THRESHOLD.value, least=_LEAST.value, every_column=_ALL.value)
    )
    for change in sorted(found, key=lambda change: (change.what not in BAD, -change.ratio)):
        print(change)
    count = sum(change.what in BAD for change in found)
    points = len(_points(old, _ALL.value))
    print(
        f"{count} of {points} points became slower or failed, {len(found) - count} other changes."
    )
    return int(count > 0)


if __name__ == "__main__":
    app.run(main)
