"""Imports point one way, and the command line speaks plainly."""

import ast
import subprocess
import sys
from pathlib import Path

import torch
from corpora import call
from tiny import routed

import mixdepth

PACKAGE = Path(mixdepth.__file__).parent
ORDER = [
    "config",
    "routing",
    "losses",
    "router",
    "routed",
    "encoder",
    "experts",
    "hf",
    "shape",
    "flops",
    "evaluation",
    "statistics",
    "settings",
    "files",
    "digests",
    "foreign",
    "table",
    "smollm2",
    "tokens",
    "sources",
    "data",
    "adapters",
    "run",
    "schedule",
    "callbacks",
    "trainer",
    "loading",
    "card",
    "importance",
    "pretrained",
    "conversion",
    "training",
    "tuning",
    "compare",
    "tasks",
    "generation",
    "trace",
    "limits",
    "requests",
    "gate",
    "answering",
    "serving",
    "report",
    "isoflop",
    "bench",
    "demo",
    "cli",
]
"""A module may import those before it; the package's own __init__ only gathers names."""


def test_imports_point_one_way():
    for file in PACKAGE.rglob("*.py"):
        module = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if module in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mixdepth."):
                imported = node.module.split(".")[1]
                assert ORDER.index(imported) <= ORDER.index(module), f"{file} imports {node.module}"


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
        ([str(folder), "--width", "64"], "width has no meaning beside a folder"),
    ):
        process = call("flops", *arguments)
        assert process.returncode == 2, process.stdout
        assert process.stderr.startswith("mixdepth: ")
        assert message in process.stderr
