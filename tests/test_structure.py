"""Imports point one way, cost what they should, and no name is used twice."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixdepth

PACKAGE = Path(mixdepth.__file__).parent
LAYERS = [
    ("version", "lazy", "announcing"),
    ("schemes",),
    ("config",),
    ("routes",),
    ("losses",),
    ("router",),
    ("modes",),
    ("block",),
    ("experts",),
    ("encoder",),
    ("files", "text", "machine"),
    ("hf",),
    ("data",),
    ("runs",),
    ("models",),
    ("evaluation",),
    ("conversion",),
    ("training",),
    ("sampling",),
    ("report",),
    ("bench",),
    ("isoflop",),
    ("demo",),
    ("cli",),
]
"""A module or folder may import those above it. `docs/design.md` has them as a table."""

LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
LATER = {("announcing", "hf"), ("hf/registration.py", "hf")}
"""Imported inside a function, once transformers is there."""


def imported_parts(file):
    """The modules and folders at the top of the package that a file imports, in whatever way."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            first, _, rest = node.module.partition(".")
            if first == "mixdepth":
                yield from [rest.split(".")[0]] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == "mixdepth":
                    yield rest.split(".")[0]


def test_imports_point_one_way():
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if part in ("__init__", "__main__", "cli"):  # these use the package as its users do
            continue
        for imported in imported_parts(file):
            assert imported in LAYER_OF, f"{file} imports {imported!r} from the package itself, and not from its module"
            is_above = LAYER_OF[imported] < LAYER_OF[part] or imported == part
            assert is_above or (part, imported) in LATER, f"{file} imports {imported}"


def test_the_design_page_has_the_layers():
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    table = page.split("## What may import what")[1].split("\n\n")[2]
    first_cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert named == [name for names in LAYERS for name in names]


def imported_by(code):
    """The modules that are there after this code has run in a new process."""
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_transformers(arguments):
    call = f"from mixdepth.cli import main\ntry: main({arguments})\nexcept SystemExit: pass"
    assert not {"torch", "transformers"} & imported_by(call)


def test_settings_import_neither_torch_nor_transformers():
    assert not {"torch", "transformers"} & imported_by("import mixdepth.config, mixdepth; mixdepth.DepthConfig()")


def test_a_routed_block_imports_torch_and_not_transformers():
    block = "import torch, mixdepth\nmixdepth.Routed(torch.nn.Linear(8, 8), width=8)(torch.zeros(1, 4, 8))"
    assert "transformers" not in imported_by(block)


def test_routing_a_model_imports_no_trainer():
    imported = imported_by("import mixdepth; mixdepth.route")
    assert not {"peft", "bitsandbytes", "transformers.trainer"} & imported


def test_no_two_modules_have_one_name():
    stems = [file.stem for file in PACKAGE.rglob("*.py") if not file.stem.startswith("__")]
    assert sorted(set(stems)) == sorted(stems)


def test_no_module_has_the_name_of_a_public_function():
    assert not {file.stem for file in PACKAGE.rglob("*.py")} & {*mixdepth.__all__}
    assert not {file.stem for file in (PACKAGE / "isoflop").glob("*.py")} & {*mixdepth.isoflop.__all__}


def comparisons_of_schemes(source):
    """The lines of a module that compare a scheme with something: `==`, `in`, or `match`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            compared = [node.subject]
        else:
            continue
        for operand in compared:
            name = getattr(operand, "attr", getattr(operand, "id", None))
            if isinstance(operand, ast.Subscript) and isinstance(operand.slice, ast.Constant):
                name = operand.slice.value
            if name == "scheme":
                yield node.lineno if isinstance(node, ast.Compare) else node.subject.lineno


@pytest.mark.parametrize(
    "line",
    [
        'router.scheme == "soft"',
        'scheme in ("random", "soft")',
        '"random" != config.depth.scheme',
        'settings["scheme"] == "random"',
        'match scheme:\n    case "soft": pass',
    ],
)
def test_a_comparison_of_a_scheme_is_found(line):
    assert [*comparisons_of_schemes(f"x = 1\n{line}")] == [2]


def test_only_the_module_of_schemes_compares_schemes():
    for file in PACKAGE.rglob("*.py"):
        lines = [*comparisons_of_schemes(file.read_text())]
        assert not lines or file.name == "schemes.py", f"{file}, line {lines[0]}: ask a function of schemes.py"
