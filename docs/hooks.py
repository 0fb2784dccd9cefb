"""What the site needs beyond its pages: what lies beside docs/, as the changelog and the log, and links out of it.

mkdocs calls these functions by their names.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PLOTS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("studies/*/*.svg"))]
BESIDE = ("CHANGELOG.md", "LOG.md", *PLOTS)
"""Pages and pictures of the repository that are the site's too."""


def on_files(files: Any, config: Any) -> Any:
    for name in BESIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to other files of the repository, which the site does not hold, become their words."""
    for name in BESIDE:
        markdown = markdown.replace(f"](../{name})", f"]({name})")
    return re.sub(r"\[([^][]+)\]\(\.\./[^)]*\)", r"\1", markdown)
