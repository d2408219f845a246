"""The Python of the README, the op pages and the guides runs as pasted; links lead somewhere.

The blocks of one page run in order in one namespace, as a reader would run them. A block that
begins with `# needs a GPU` is compiled and not run.
"""

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
