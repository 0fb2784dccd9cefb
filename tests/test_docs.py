"""Code blocks of the documentation run or parse, the names in it exist, and generated pages are current."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mixdepth
from mixdepth.cli import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = ("*.md", "benchmarks/*.md", "experiments/**/*.md", "mixdepth/**/README.md")
LINKED_PAGES = PAGES[1:] + [page for pattern in OTHER_PAGES for page in ROOT.glob(pattern)]
LANGUAGES_OF_COMMANDS = ("", "sh")
COMMAND = re.compile(r"(mixdepth|torchrun|accelerate|python|make|\w+=\S+) ")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_the_pages_python_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_pages_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def commands(text):
    """Find the commands in the code blocks of a page. Each is a list of words."""
    result = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language not in LANGUAGES_OF_COMMANDS:
            continue
        lines = block.replace("\\\n", " ").splitlines()  # a backslash continues a line
        for line in lines:
            if COMMAND.match(line):
                words = shlex.split(line, comments=True)
                result += split_at(words, "&&")
    return result


def split_at(words, separator):
    """Split a list of words at each separator.

    >>> split_at(["a", "&&", "b", "c"], "&&")
    [['a'], ['b', 'c']]
    """
    parts = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def arguments_of(command):
    """Return the arguments that a command gives to mixdepth, or None if it runs another program.

    In the pages `...` stands for arguments that are left out.
    """
    if command[0] == "mixdepth":
        arguments = command[1:]
    elif "-m" in command and command[command.index("-m") + 1] == "mixdepth":
        arguments = command[command.index("-m") + 2 :]
    else:
        return None
    if "..." not in arguments:
        return arguments
    arguments = [word for word in arguments if word != "..."]
    if "--out" not in arguments:
        arguments += ["--out", "OUT"]
    return arguments


def test_commands_are_found_in_blocks_with_continuations_comments_and_launchers():
    page = """
`mixdepth nothing` in a line is no block
```
mixdepth eval a \\
    b   # it's a comment
mixdepth isoflop run s && mixdepth isoflop fit s
torchrun --nproc-per-node 2 -m mixdepth train ...
make demo
run.json    mixdepth
```
```python
mixdepth = 1
```
"""
    listed = commands(page)
    assert [arguments_of(command) for command in listed] == [
        ["eval", "a", "b"],
        ["isoflop", "run", "s"],
        ["isoflop", "fit", "s"],
        ["train", "--out", "OUT"],
        None,
    ]
    assert listed[-1] == ["make", "demo"]


@every_page
def test_the_pages_commands_parse(page, capsys):
    parser = make_parser()
    for command in commands(page.read_text()):
        arguments = arguments_of(command)
        if arguments is not None:
            try:
                parser.parse_args(arguments)
            except SystemExit:
                pytest.fail(f"{shlex.join(command)}: {capsys.readouterr().err}")


@every_page
def test_the_pages_make_targets_exist(page):
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands(page.read_text()):
        if command[0] == "make":
            assert set(command[1:]) <= {*targets}, command


@every_page
def test_the_tests_that_a_page_names_exist(page):
    text = page.read_text()
    folder = ROOT / "tests"
    sources = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("test_*.py")}
    for file, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(\w+))?`", text):
        assert file in sources, file
        assert not test or f"def {test}(" in sources[file], test
    for test in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {test}(" in source for source in sources.values()), test


def test_each_row_of_the_papers_table_names_a_test_or_says_why_not():
    rows = re.findall(r"^\|.*\|.*\|(.*)\|.*\|$", (ROOT / "docs" / "paper.md").read_text(), flags=re.MULTILINE)
    tests = [cell.strip() for cell in rows if cell.strip() not in ("test", "---")]
    assert len(tests) > 40
    for cell in tests:
        assert cell == "-" or "::test_" in cell or cell.startswith("a measurement: "), cell


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: mixdepth\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(mixdepth.__all__)


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mixdepth.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["references"][0]["url"].endswith("2404.02258")


@pytest.mark.parametrize("maker", ["make_architectures", "make_family"])
def test_a_generated_page_is_current(maker):
    module = docs_module(maker)
    assert module.PAGE.read_text() == module.page(), "run make docs"


def test_the_pictures_of_concepts_are_current():
    module = docs_module("make_pictures")
    for name, draw in module.PICTURES.items():
        assert (module.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw(), "run make docs"


def docs_module(name):
    """Import a script of docs/."""
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module(name)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*https?://[^>]*>", page.read_text(encoding="utf-8"))
        assert not loaded, (page, loaded)


@pytest.mark.parametrize("readme", sorted((ROOT / "mixdepth").glob("*/README.md")), ids=lambda path: path.parent.name)
def test_the_readme_of_a_folder_names_its_modules(readme):
    modules = {path.name for path in readme.parent.glob("*.py")} - {"__init__.py"}
    named = set(re.findall(r"^- `(\w+\.py)`", readme.read_text(), flags=re.MULTILINE)) - {"__init__.py"}
    assert named == modules
