"""The Python of the README, the op pages and the guides runs as pasted; links lead somewhere.

The blocks of one page run in order in one namespace, as a reader would run them. A block that
begins with `# needs a GPU` is compiled and not run.
"""

import csv
import importlib.util
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RUN = ("README.md", "docs/index.md", "docs/ops/*.md", "docs/guides/*.md")
LINKED = ("*.md", "docs/**/*.md")
GPU_ONLY = "# needs a GPU\n"
OPTIONAL = ("flax", "chex", "optax")


def pages(*patterns: str) -> list[str]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def text(page: str) -> str:
    return (ROOT / page).read_text()


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def prose_of(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> list[str]:
    """What links to the headings of a page end with."""
    found = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return [re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in found]


@pytest.mark.parametrize("page", [p for p in pages(*RUN) if python_of(p)])
def test_the_code_of_a_page_runs(page: str) -> None:
    blocks = python_of(page)
    for module in OPTIONAL:
        used = any(re.search(rf"^(import|from) {module}\b", b, re.MULTILINE) for b in blocks)
        if used and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        code = compile(block, f"{page}, block {number}", "exec")
        if not block.startswith(GPU_ONLY):
            exec(code, names)


@pytest.mark.parametrize("page", pages(*LINKED))
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), link
        if heading:
            assert heading in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", pages(*LINKED))
def test_a_page_of_the_site_is_in_its_menu(page: str) -> None:
    if page != "README.md":
        assert f": {page.removeprefix('docs/')}\n" in text("mkdocs.yml")


CARDS = "nvidia-h200", "nvidia-h100-80gb-hbm3"
# Of rows of the README's table of speeds: the tables of an op.
TABLES = {
    "last axis of": "batch12-dim2048",
    "axis 1 of [12": "batch12-dim2048-axis1",
    "axis 1 of [1,": "batch1-dim64-columns64-length4n",
    "128 features a head": "b16-h16-d128-reverse_False",
    "one number a head": "b(4|16)-h16-d1-reverse_(False|True)",
    "`lrpe_cosine`, `md": "batch12-head12-dim128-act_none",
    "softmax over": "batch12-head12-dim128-act_softmax-dim_-2",
    "32 sequences": "batch32-head32-dim128-rank16",
    "without factors": r"batch16-head\d+-dim64-full-ranks2",
    "T6 models": r"batch16-head\d+-dim64-rank6-ranks2",
}


def fractions(mode: str, table: str, column: str) -> str:
    """The least and the most of a copy, of each card, at the largest size."""
    shown = []
    for card in CARDS:
        with (ROOT / "benchmarks/results" / card / "numbers.csv").open() as file:
            rows = list(csv.DictReader(file))
        last = {  # the largest size of a table comes last
            row["table"]: float(row["of_copy"])
            for row in rows
            if (row["mode"], row["column"]) == (mode, column) and re.fullmatch(table, row["table"])
        }
        ends = dict.fromkeys(f"{y:.2f}" for y in (min(last.values()), max(last.values())))
        shown.append(" to ".join(ends))
    return ", ".join(shown)


@pytest.mark.skipif(not (ROOT / "benchmarks/results").exists(), reason="a copy without tables")
@pytest.mark.parametrize("row", TABLES)
def test_the_readme_has_the_numbers_of_the_tables(row: str) -> None:
    """Backward too, where all of it was measured in the run of all tables."""
    (line,) = (line for line in text("README.md").split("\n") if line[:1] == "|" and row in line)
    forward, backward, jitted = (cell.strip() for cell in line.split("|")[2:5])
    assert forward == fractions("fwd", TABLES[row], "pallas")
    assert jitted == fractions("fwd", TABLES[row], "jit")
    if "heads)" not in line:
        assert backward.startswith(fractions("bwd", TABLES[row], "pallas"))
