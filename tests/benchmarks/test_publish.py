"""What a folder of results is turned into, and what two of them are compared for."""

import csv
import json
import pathlib
from typing import Any

import pytest
from absl import app, flags
from PIL import Image

from benchmarks import compare, headline, plots, publish, records, summary
from benchmarks.records import Cell, Column, Report, Row, Table

ENVIRONMENT = {"card": "Card", "driver": "1", "jax": "0.11"}


def table(name: str = "k1", *, mode: str = "fwd", date: str = "2026-01-01", **cells: Any) -> Table:
    """Three sizes at which a copy takes 1 ms; a cell for each of the times given."""
    rows = [
        Row(
            point={"n": n},
            moved_bytes=2**20,
            truth="float64",
            copy=Cell(kernel_ms=1.0, wall_ms=2.0),
            cells={name: Cell(kernel_ms=ms, memory_mib=2.0) for name, ms in cells.items()},
        )
        for n in (256, 1024, 4096)
    ]
    return Table(
        title=f"toy-{{metric}}-{mode}-{name}-bf16",
        x="n",
        mode=mode,
        dtype="bf16",
        columns=[Column(name=name, kernel=name in ("pallas", "other")) for name in cells],
        metrics=["speed", "memory"],
        date=date,
        calls=10,
        rows=rows,
    )


def toy(*tables: Table, op: str = "toy") -> Report:
    return Report(op=op, environment=dict(ENVIRONMENT), tables=list(tables))


def test_a_folder_has_pages_figures_a_csv_file_and_a_summary(tmp_path: pathlib.Path) -> None:
    records.save(toy(table(pallas=1.25, jit=4.0), table("k2", mode="bwd", pallas=2.0)), tmp_path)
    (tmp_path / "more.json").write_text(json.dumps({"date": "2026-01-02", "note": "by hand"}))
    publish.main(["", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {
        *("toy.json", "toy.md", "toy-fwd.png", "toy-bwd.png"),
        *("more.json", "README.md", "summary.png", "numbers.csv"),
    }
    for name in ("toy-fwd.png", "toy-bwd.png", "summary.png"):
        assert (tmp_path / name).stat().st_size < 150_000
        with Image.open(tmp_path / name) as image:
            assert image.width > 1000
    page = (tmp_path / "toy.md").read_text()
    assert "![toy-fwd.png](toy-fwd.png)" in page
    assert "toy-speed-fwd-k1-bf16:" in page
    lines = list(csv.DictReader((tmp_path / "numbers.csv").read_text().splitlines()))
    assert len(lines) == 9
    assert (lines[0]["column"], lines[0]["of_copy"], lines[0]["kernel_ms"]) == (
        "pallas",
        "0.8",
        "1.25",
    )
    text = (tmp_path / "README.md").read_text()
    assert "measured on 2026-01-01\n" in text
    assert "not in these tables: PyTorch, torch.compile" in text
    assert "Nothing that was measured is faster" in text
    assert "more.json](more.json): 2026-01-02 by hand" in text


def test_results_of_several_days_are_not_one_run() -> None:
    text = summary.markdown(
        [toy(table(pallas=1.0), table("k2", date="2026-01-02", pallas=1.0))], []
    )
    assert "**not one run**: measured on 2026-01-01, 2026-01-02" in text


def test_a_run_replaces_tables_of_other_files(tmp_path: pathlib.Path) -> None:
    old = toy(table(pallas=1.0), table("k2", pallas=1.0))
    old.environment["jax"] = "0.10"
    (tmp_path / "toy-old.json").write_text(old.to_json())
    oldest = toy(table(pallas=2.0))
    oldest.environment["jax"] = "0.9"  # which no table is of
    (tmp_path / "toy-ancient.json").write_text(oldest.to_json())
    records.save(toy(table(pallas=0.5)), tmp_path)
    both = records.load(tmp_path)["toy"]
    assert both.environment == ENVIRONMENT | {"jax": "0.10 / 0.11"}
    first, second = both.tables
    assert first.rows[0].cells["pallas"].kernel_ms == 0.5
    assert second == old.tables[1]


def test_where_we_lose_is_every_row_where_something_is_faster() -> None:
    lost = table("k2", mode="bwd", pallas=2.0, other=1.0, jit=1.5, jnp=2.0)
    reports = [toy(table(pallas=1.0, jit=1.1), lost)]
    found = summary.losses(reports)
    assert [(x.times, x.name) for x in found] == 3 * [(2.0, "other")] + 3 * [(2.0 / 1.5, "jit")]
    text = summary.markdown(reports, [])
    assert "In 3 of 6 rows something is faster" in text
    assert "other (ours)" in text
    lost.rows[0].cells["pallas"] = Cell(reason="wrong: error 1")
    text = summary.markdown(reports, [])
    assert "In 2 of 6 rows something is faster" in text
    assert "The default failed:\n\n- toy, backward, k2, 256: wrong: error 1" in text


def test_what_is_within_noise_is_no_loss() -> None:
    close = table(pallas=1.0, other=0.97)
    assert not summary.losses([toy(close)])
    for row in close.rows:
        for cell in row.cells.values():
            cell.spread = 0.01
    assert len(summary.losses([toy(close)])) == len(close.rows)


def test_a_figure_compares_functions_in_one_table() -> None:
    alone, beside = table("k1", pallas=1.0), table("k2", pallas=2.0, jit=4.0)
    assert headline.shown([alone, beside]) is beside


def test_tables_of_other_programs_stay_and_those_of_another_card_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    records.save(toy(table("k1", pallas=1.0)), tmp_path)
    for kernels in ("1", "2", "2"):
        records.save(
            Report(
                op="toy",
                environment=ENVIRONMENT | dict(kernels=kernels),
                tables=[table("k2", pallas=2.0)],
            ),
            tmp_path,
        )
    found = records.load(tmp_path)["toy"]
    assert [each.name for each in found.tables] == ["k1", "k2"]
    assert found.environment["kernels"] == "- / 1 / 2"
    with pytest.raises(ValueError, match="has results of Card, and these are of Other: use --out"):
        records.save(Report(op="toy", environment=ENVIRONMENT | dict(card="Other")), tmp_path)


def test_names_of_tables_are_what_they_do_not_share() -> None:
    tables = [table("b4-d1-act_-1", pallas=1.0), table("b4-d128", pallas=1.0)]
    assert plots.short_names(tables) == ["d1 act_-1", "d128"]
    assert plots.short_names(tables[:1]) == ["b4 d1 act_-1"]


# Comparing


def changed(
    new_ms: float, *, spread: float | None, copy_ms: float = 1.0, **options: Any
) -> list[str]:
    old, new = toy(table(pallas=1.0, jit=1.0)), toy(table(pallas=new_ms, jit=9.0))
    for report, ms in ((old, 1.0), (new, copy_ms)):
        for *_, row, _, cell in report.cells():
            row.copy.kernel_ms, cell.spread = ms, spread
    return [change.what for change in compare.changes([old], [new], **options)]


def test_only_more_than_noise_is_a_change() -> None:
    assert changed(1.07, spread=0.03) == 3 * ["slower"]
    assert changed(1.05, spread=0.03) == []
    assert changed(0.9, spread=0.03) == 3 * ["faster"]
    assert changed(1.07, spread=0.03, copy_ms=1.08) == []  # the card itself was slower
    assert changed(1.015, spread=0.0) == []
    assert changed(1.04, spread=None) == []
    assert changed(1.04, spread=None, threshold=0.03) == 3 * ["slower"]
    assert changed(1.0, spread=0.0, every_column=True) == 3 * ["slower"]


def test_points_that_failed_are_told_from_those_not_measured() -> None:
    old, new = toy(table(pallas=1.0)), toy(table(pallas=1.0), table("k2", pallas=1.0))
    del new.tables[0].rows[0]
    new.tables[0].rows[0].cells["pallas"] = Cell(reason="wrong: error 1")
    found = list(compare.changes([old], [new]))
    assert [change.what for change in found] == ["not measured", "failed", "new", "new", "new"]
    assert "failed: toy-speed-fwd-k1-bf16 n=1024 pallas: wrong: error 1" in str(found[1])


@pytest.mark.parametrize(("ms", "status"), [(1.0, 0), (1.2, 1), (0.8, 0)])
def test_exit_status(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], ms: float, status: int
) -> None:
    names = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    for name, each in zip(names, (1.0, ms), strict=True):
        pathlib.Path(name).write_text(toy(table(pallas=each)).to_json())
    flags.FLAGS(["compare"])
    assert compare.main(["compare", *names]) == status
    assert f"{3 * status} of 3 points became slower or failed" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["# A page", '{"tables": 3}', "[]", None])
def test_what_is_no_run_is_not_compared(tmp_path: pathlib.Path, text: str | None) -> None:
    path = tmp_path
    if text is not None:
        path /= "run.json"
        path.write_text(text)
    with pytest.raises(app.UsageError, match=r"is not the JSON of a run|holds no run"):
        compare.read(str(path))
