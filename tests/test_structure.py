"""Imports point one way, and the command line speaks plainly."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from corpora import call
from tiny import routed

import mixdepth

PACKAGE = Path(mixdepth.__file__).parent
LAYERS = [
    ("version", "lazy", "announcing"),
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


def test_the_version_is_told():
    process = call("--version")
    assert process.stdout == f"mixdepth {mixdepth.__version__}\n"
    assert process.returncode == 0


def test_a_wrong_setting_ends_with_code_2_and_no_traceback():
    arguments = [sys.executable, "-m", "mixdepth", "demo", "--capacity", "1.5"]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "mixdepth: capacity must be a fraction in (0, 1], not 1.5\n"


def test_without_a_verb_all_are_listed():
    process = call()
    assert process.returncode == 2
    assert "train a model, dense or routed, within a budget" in process.stdout


def test_flops_are_counted_for_a_shape_and_a_folder(tmp_path):
    process = call("flops", "--layers", "4", "--width", "64", "--tokens", "256", "--capacity", "0.125")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[3].split()[1] == "32"
    assert " of the dense model's " in process.stdout
    folder = tmp_path / "model"
    routed(dtype=torch.float32).save_pretrained(folder)
    process = call("flops", str(folder), "--tokens", "31")
    assert f"{mixdepth.count_flops(routed(), 31).total:,}" in process.stdout
    process = call("flops", "--num-experts", "4", "--experts", "token_choice", "--routed-layers", "none")
    assert process.stdout.startswith("MixdepthMixtralForCausalLM")


def test_flops_of_what_makes_no_sense_end_with_code_2_and_one_sentence(tmp_path):
    folder = tmp_path / "model"
    routed(dtype=torch.float32).save_pretrained(folder)
    (tmp_path / "config.json").write_text("{")
    for arguments, message in (
        (["nowhere"], "'nowhere' is not a model's folder: it has no config.json"),
        ([str(tmp_path)], "config"),
        ([str(folder), "--capacity", "0.5"], "is routed already: leave out --capacity"),
        ([str(folder), "--every", "1", "--routed-layers", "1"], "leave out --every and --routed-layers"),
        (["--tokens", "0"], "num_tokens must be a whole number of at least 1, not 0"),
        (["--width", "33"], "width must be a multiple of 16"),
        (["--scheme", "soft", "--capacity", "0.5"], "scheme='soft' processes every token"),
        (["--routed-layers", "9"], "layers must be below the model's 8 layers, not 9"),
        (["--experts", "token_choice"], "needs a mixture of experts"),
        (["--num-experts", "-1"], "num_experts must be a whole number of at least 0, not -1"),
        ([str(folder), "--width", "64"], "width has no meaning next to a folder"),
    ):
        process = call("flops", *arguments)
        assert process.returncode == 2, process.stdout
        assert process.stderr.startswith("mixdepth: ")
        assert message in process.stderr
