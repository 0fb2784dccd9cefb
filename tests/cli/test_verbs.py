"""The command line answers with a result, or with one sentence and exit code 2."""

import pytest
import torch
from corpora import call
from tiny import routed

import mixdepth


@pytest.fixture
def folder(tmp_path):
    """A folder with a small routed model."""
    path = tmp_path / "model"
    routed(dtype=torch.float32).save_pretrained(path)
    return path


def test_the_version_is_printed():
    process = call("--version")
    assert process.returncode == 0
    assert process.stdout == f"mixdepth {mixdepth.__version__}\n"


def test_a_wrong_setting_ends_with_one_sentence():
    process = call("demo", "--capacity", "1.5")
    assert process.returncode == 2
    assert process.stderr == "mixdepth: capacity must be a fraction in (0, 1], not 1.5\n"


def test_without_a_verb_all_verbs_are_listed():
    process = call()
    assert process.returncode == 2
    assert "train a model, dense or routed, within a budget" in process.stdout


def test_flops_are_counted_for_a_shape():
    process = call("flops", "--layers", "4", "--width", "64", "--tokens", "256", "--capacity", "0.125")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[3].split()[1] == "32"
    assert " of the dense model's " in process.stdout


def test_flops_are_counted_for_a_folder(folder):
    process = call("flops", str(folder), "--tokens", "31")
    assert f"{mixdepth.count_flops(routed(), 31).total:,}" in process.stdout


def test_flops_are_counted_where_only_experts_are_routed():
    process = call("flops", "--num-experts", "4", "--experts", "token_choice", "--routed-layers", "none")
    assert process.stdout.startswith("MixdepthMixtralForCausalLM")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is not a model's folder: it has no config.json"),
        (["--tokens", "0"], "num_tokens must be a whole number of at least 1, not 0"),
        (["--width", "33"], "width must be a multiple of 16"),
        (["--scheme", "soft", "--capacity", "0.5"], "scheme='soft' processes every token"),
        (["--routed-layers", "9"], "layers must be below the model's 8 layers, not 9"),
        (["--experts", "token_choice"], "needs a mixture of experts"),
        (["--num-experts", "-1"], "num_experts must be a whole number of at least 0, not -1"),
    ],
)
def test_flops_of_an_impossible_shape_are_refused(arguments, message):
    check_refusal(call("flops", *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0.5"], "is routed already: leave out --capacity"),
        (["--every", "1", "--routed-layers", "1"], "leave out --every and --routed-layers"),
        (["--width", "64"], "width has no meaning next to a folder"),
    ],
)
def test_settings_next_to_a_routed_folder_are_refused(folder, arguments, message):
    check_refusal(call("flops", str(folder), *arguments), message)


def test_a_damaged_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    check_refusal(call("flops", str(tmp_path)), "config")


def check_refusal(process, message):
    assert process.returncode == 2, process.stdout
    assert process.stderr.startswith("mixdepth: ")
    assert message in process.stderr
