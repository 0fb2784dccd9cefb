"""Imports point one way, cost what they should, and no name is used twice."""

import ast
import importlib
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


PRIVATE_OUTSIDE = {
    "sampling/answering.py": "it answers requests inside the server of transformers, whose methods are private",
    "training/trainer.py": "it overrides how the Trainer saves, loads and measures, in methods that are private",
    "modes.py": "the core imports no peft, and reads which copy of a router its wrapper uses",
    "__main__.py": "os._exit, which is public, ends a process inside an import",
    "cli/parser.py": "argparse has no public list of the flags of a parser",
}
"""Files besides hf/private.py that may touch private names of transformers, peft and accelerate, with the reason."""

LIBRARIES = ("accelerate", "peft", "transformers")
OF_TORCH = {"_modules", "_non_persistent_buffers_set", "_orig_mod"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_name(node, *names):
    return isinstance(node, ast.Name) and node.id in names


def private_names_of_ours():
    """The private names that the package defines itself: functions, classes, arguments and attributes."""
    names = {"_replace", "_asdict", "_fields"}  # of every NamedTuple
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).as_posix() in {"hf/private.py", *PRIVATE_OUTSIDE}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, "self"):
                names.add(node.attr)
    return names


def private_names_used(file):
    """The private names that a file reads from other modules or from objects, by a dot, an import or getattr."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            if not is_name(node.value, "torch"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr", "delattr"):
            yield from (argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant))


def test_private_names_of_other_libraries_stand_in_one_module():
    ours = private_names_of_ours()
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        if place == "hf/private.py" or place in PRIVATE_OUTSIDE:
            continue
        theirs = {name for name in private_names_used(file) if is_private(name)} - ours - OF_TORCH
        assert not theirs, f"{place} uses {theirs}: give it a function in hf/private.py, with the reason"


def test_private_methods_of_other_libraries_are_overridden_in_one_module():
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        if place == "hf/private.py" or place in PRIVATE_OUTSIDE or file.stem.startswith("__"):
            continue
        module = importlib.import_module("mixdepth." + place.removesuffix(".py").replace("/", "."))
        for value in vars(module).values():
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            others = [base for base in value.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
            overridden = {name for name in vars(value) if is_private(name) and any(name in vars(b) for b in others)}
            overridden.discard("_abc_impl")  # every abstract class has one
            assert not overridden, f"{value.__name__} in {place} overrides {overridden}"


def test_every_exception_to_the_rule_about_private_names_is_needed():
    ours = private_names_of_ours()
    for place in PRIVATE_OUTSIDE:
        names = {name for name in private_names_used(PACKAGE / place) if is_private(name)}
        assert names - ours, f"{place} uses no private name: take it off the list"


def imported_by(code):
    """The modules that are there after this code has run in a new process."""
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["--version"],
        ["train", "--out", "runs/new", "--capacity", "12.5"],
        ["trian"],
    ],
)
def test_help_and_refusals_import_neither_torch_nor_transformers(arguments):
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
