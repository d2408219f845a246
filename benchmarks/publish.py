"""Pages, figures, one CSV file and the summary of a folder of results.

`python -m benchmarks.publish FOLDER...` writes them anew from the folder's JSON files.
"""

import pathlib
from collections.abc import Sequence

from absl import app

from benchmarks import headline, plots, records, report, suite, summary


def folder(*, quick: bool = False) -> pathlib.Path:
    """The folder with the results of this machine's card."""
    card = "-".join(suite.card().lower().split())
    return pathlib.Path(__file__).with_name("results") / (f"{card}-quick" if quick else card)


def write(folder: pathlib.Path) -> None:
    reports = list(records.load(folder).values())
    for one in reports:
        figures = []
        for mode in one.modes:
            figures.append(f"{one.op}-{mode}.png")
            plots.op(folder / figures[-1], one, mode)
        (folder / f"{one.op}.md").write_text(report.markdown(one, figures))
    headline.draw(folder / "summary.png", reports)
    (folder / "numbers.csv").write_text(report.csv_text(reports))
    text = summary.markdown(reports, sorted(folder.glob("*.json")))
    (folder / "README.md").write_text(text)


def main(arguments: Sequence[str]) -> None:
    folders = [pathlib.Path(name) for name in arguments[1:]]
    if not folders or not all(records.load(folder) for folder in folders):
        raise app.UsageError("folders with the JSON of a run: FOLDER...")
    for folder in folders:
        write(folder)


if __name__ == "__main__":
    app.run(main)
