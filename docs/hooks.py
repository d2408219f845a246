"""Hooks of MkDocs: pages and figures of the site that lie outside of docs/.

Links in Markdown name files as they lie in the repository, so they work there too. A file outside
of docs/ has another place in the site; links to it, and from it, are rewritten.
"""

import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("BUILD_NOTES.md", "CHANGELOG.md", "CONTRIBUTING.md")
FIGURES = pathlib.Path("benchmarks/results/nvidia-h200")
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages, and the figures that pages show."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    shown = "\n".join(path.read_text() for path in (ROOT / "docs/ops").glob("*.md"))
    for name in sorted(set(re.findall(rf"{FIGURES}/([\w.-]+\.png)", shown))):
        path = str(ROOT / FIGURES / name)
        files.append(File.generated(config, f"assets/{name}", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Links by place in the repository become links by place in the site."""
    places = {pathlib.Path(f.abs_src_path): f.src_uri for f in files if f.abs_src_path}
    folder = pathlib.Path(page.file.abs_src_path).parent

    def moved(link: re.Match[str]) -> str:
        before, path, heading, after = link.groups(default="")
        place = places.get((folder / path).resolve())
        if place is not None:
            path = os.path.relpath(place, os.path.dirname(page.file.src_uri) or ".")
        return before + path + heading + after

    return LINK.sub(moved, markdown)
