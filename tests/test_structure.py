"""Imports point one way, and the command line speaks plainly."""

import ast
import subprocess
import sys
from pathlib import Path

import mixdepth

PACKAGE = Path(mixdepth.__file__).parent
ORDER = ["config", "routing", "losses", "router", "routed", "experts", "hf", "flops", "evaluate", "demo", "cli"]
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


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "mixdepth", *arguments], capture_output=True, text=True)


def test_the_version_is_told():
    process = run("--version")
    assert process.stdout == f"mixdepth {mixdepth.__version__}\n"
    assert process.returncode == 0


def test_no_verb_and_a_wrong_setting_end_with_code_2_and_no_traceback():
    assert run().returncode == 2
    assert run("demo", "--steps", "0").stderr == "mixdepth: steps must be at least 1, not 0\n"
    process = run("demo", "--capacity", "1.5")
    assert process.returncode == 2
    assert process.stderr == "mixdepth: capacity must be a fraction in (0, 1], not 1.5\n"


def test_the_demo_trains_and_samples():
    process = run("demo", "--steps", "5")
    assert process.returncode == 0, process.stderr
    assert "realised capacity" in process.stdout
    assert "def get_" in process.stdout
