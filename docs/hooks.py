"""Adds pages from outside docs/ to the site: the changelog, the log, and the README of each experiment.

mkdocs calls these functions by their names.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PATTERNS = ("CHANGELOG.md", "CONTRIBUTING.md", "LOG.md", "experiments/*/README.md", "studies/*/*.svg")
OUTSIDE = [path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
"""Files of the repository outside docs/ that the site holds, at the same path."""
LINK = re.compile(r"\[(?P<words>[^][]*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")
"""A Markdown link to a file of the repository."""


def on_files(files: Any, config: Any) -> Any:
    """Add the files from outside docs/."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at the places that files have in the site. A link to a file that is not there becomes its words."""
    source = page.file.src_uri
    folder_in_site = posixpath.dirname(source)
    folder = folder_in_site if source in OUTSIDE else posixpath.join("docs", folder_in_site)

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"]))
        path_in_site = path if path in OUTSIDE else path.removeprefix("docs/")
        if files.get_file_from_path(path_in_site) is None:
            return match["words"]
        target = posixpath.relpath(path_in_site, folder_in_site or ".")
        return f"[{match['words']}]({target}{match['anchor'] or ''})"

    return LINK.sub(replace, markdown)
