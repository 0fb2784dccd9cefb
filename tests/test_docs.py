"""Every code block of the documentation runs, and generated pages are current."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_python_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_page_of_architectures_is_current():
    sys.path.insert(0, str(ROOT / "docs"))
    import make_architectures

    assert make_architectures.PAGE.read_text() == make_architectures.page(), "run make docs"
