"""What is shown, and the command line."""

import pathlib
import sys

import pytest

from benchmarks import command, records, report, suite
from benchmarks.records import Report
from tests.benchmarks.toy import TOY, explode, provider, toy_plan


def test_markdown_has_every_number_and_every_reason() -> None:
    text = report.markdown(suite.run(TOY, toy_plan()))
    assert "toy-wall-fwd-k2-f32:" in text
    assert "toy-speed" not in text  # no kernel was timed
    row = next(line for line in text.split("\n") if line.startswith("| 2048 |"))
    pallas, jnp_, jit, *bad, copy, of_copy = (cell.strip() for cell in row.split("|")[2:-1])
    assert (pallas, bad, of_copy) == ("ok", ["-1"] * 3, "")
    assert min(map(float, (jnp_, jit, copy))) > 0
    assert "broken at n = 8, 2048: -1, RuntimeError: boom" in text


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_a_mean_is_not_passed_off_as_a_median() -> None:
    found = suite.run(TOY, toy_plan(calls=3, metrics=["speed"]))  # four kernels in three calls
    assert "jit at n = 8, 2048: calls launched different kernels" in report.markdown(found)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_seconds_to_compile_are_those_of_what_is_jitted() -> None:
    text = report.markdown(suite.run(TOY, toy_plan(metrics=["speed"])))
    rows = text[text.index("toy-compile-fwd-k1-f32:") :].split("\n")
    cells = [cell.strip() for cell in rows[4].split("|")[1:-1]]
    names = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    found = dict(zip(names, cells, strict=True))
    assert float(found["jit"]) >= 0  # some milliseconds
    assert (found["jnp"], found["broken"]) == ("", "-1")
    assert "copy" not in found


@pytest.mark.slow
def test_json_tells_all_and_another_run_replaces_its_own_tables(tmp_path: pathlib.Path) -> None:
    both = suite.run(TOY, toy_plan())
    assert Report.from_json(both.to_json()) == both
    records.save(both, tmp_path)
    again = suite.run(TOY, toy_plan(grid={"k": (1,), "n": (8,)}, calls=1))
    records.save(again, tmp_path)
    kept = records.load(tmp_path)["toy"]
    assert kept.tables == [again.tables[0], both.tables[1]]
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json"]


def test_a_table_of_failures_is_still_shown() -> None:
    found = suite.run(TOY, toy_plan(providers=[provider("broken", explode)]))
    assert "broken at n = 8, 2048: -1, RuntimeError: boom" in report.markdown(found)


def test_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    words = ["toy", "--quick", "--n=16,32", "--providers=jit,pallas", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        command.main(TOY)
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("No NVIDIA GPU")
    assert "k2" not in shown  # a small machine's grid
    found = Report.from_json((tmp_path / "toy.json").read_text())
    assert [row.point["n"] for row in found.tables[0].rows] == [16, 32]
    assert [column.name for column in found.tables[0].columns] == ["jit", "pallas"]
