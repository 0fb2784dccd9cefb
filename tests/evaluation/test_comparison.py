"""Models are compared side by side. The numbers are those of `evaluate`, and the same each time."""

import json
import math

import pytest
import torch
from corpora import TINY, call, documents, write_folder

import mixdepth
from mixdepth.cli import main
from mixdepth.data.corpus import load_corpus
from mixdepth.evaluation.intervals import interval


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("MIXDEPTH_CACHE", str(folder / "cache"))
    settings = {**TINY, "corpus": write_folder(folder / "texts", documents()), "steps": 60, "save_every": 20}
    mixdepth.train(folder / "mod", **settings, depth=mixdepth.DepthConfig(capacity=0.25))
    mixdepth.train(folder / "dense", **settings, depth=None)
    mixdepth.train(folder / "bpe", **settings, depth=None, tokenizer="bpe:300")
    yield folder
    patch.undo()


def test_runs_are_evaluated_on_all_their_held_out_text(runs):
    names = [str(runs / "mod"), str(runs / "dense")]
    found = mixdepth.evaluate_runs(names)
    text = load_corpus(str(runs / "texts")).validation
    for entry, name in zip(found.entries, names, strict=True):
        model = mixdepth.load(name).model
        expected = mixdepth.evaluate(model, text.windows(32).batches(16))
        assert entry.evaluation == expected
        assert entry.flops_per_token == mixdepth.count_flops(model, 32).total / 32
        told = entry.to_dict()
        assert told["loss"] == expected.loss
        nats = expected.loss * len(text.tokens)  # of all the text, were it all in windows
        assert told["bits_per_byte"] == pytest.approx(nats / math.log(2) / text.num_bytes)
    difference = found.difference(found.entries[1])
    pairs = zip(*(entry.evaluation.rows for entry in found.entries), strict=True)
    differences = torch.tensor([dense.loss - mod.loss for mod, dense in pairs])
    error = 1.96 * differences.std() / len(differences) ** 0.5
    assert difference.mean == pytest.approx(differences.mean().item(), abs=1e-6)
    assert difference.high - difference.mean == pytest.approx(error.item(), rel=1e-4)
    assert found.difference(found.entries[0]) is None


def test_the_test_text_is_evaluated_on_when_asked_for_by_name(runs, tmp_path):
    settings = {**TINY, "corpus": str(runs / "texts"), "steps": 3, "test": 0.2}
    run = mixdepth.train(tmp_path / "run", **settings, depth=None)
    (entry,) = mixdepth.evaluate_runs([str(run.folder)], split="test").entries
    text = load_corpus(str(runs / "texts"), test=0.2).test
    model = mixdepth.load(str(run.folder)).model
    assert entry.evaluation == mixdepth.evaluate(model, text.windows(32).batches(16))
    (other,) = mixdepth.evaluate_runs([str(run.folder)]).entries
    assert other.text != entry.text
    run_and_model = [str(run.folder), str(tmp_path / "plain")]
    model.save_pretrained(run_and_model[1])
    mixdepth.load(str(run.folder)).tokenizer.save_pretrained(run_and_model[1])
    found = mixdepth.evaluate_runs(run_and_model, corpus=str(runs / "texts"), split="test")
    assert found.entries[0].evaluation == found.entries[1].evaluation  # the model takes the split of the run next to it
    assert found.entries[0].text == found.entries[1].text == entry.text
    with pytest.raises(ValueError, match="split must be one of validation, test, not 'train'"):
        mixdepth.evaluate_runs([str(run.folder)], split="train")
    with pytest.raises(ValueError, match=r"the test text of .* is shorter than a window"):
        mixdepth.evaluate_runs([str(runs / "dense")], split="test")


def test_the_gap_is_causal_minus_lookahead_with_an_interval(runs):
    (entry,) = mixdepth.evaluate_runs([str(runs / "mod")]).entries
    gap = entry.evaluation.gap
    assert gap.mean == pytest.approx(entry.evaluation.loss - entry.evaluation.lookahead_loss, abs=1e-12)
    assert gap.low < gap.mean < gap.high


def test_an_interval_covers_the_mean_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    trials = 1.0 + torch.randn(1000, 60, generator=generator)
    covered = sum(found.low <= 1 <= found.high for found in (interval(row.tolist(), [1.0] * 60) for row in trials))
    assert 0.92 < covered / 1000 < 0.97


def test_rows_count_by_their_labels():
    assert interval([1.0, 4.0], [2.0, 1.0]).mean == pytest.approx(2.0)


def test_the_command_prints_a_table_and_the_same_numbers_each_time(runs, capsys, tmp_path):
    arguments = ["eval", str(runs / "mod"), str(runs / "dense"), "--windows", "9"]
    assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    table = capsys.readouterr().out
    for words in ("bits per byte", "causal - look-ahead", "realised capacity", "FLOPs per token"):
        assert words in table
    assert main([*arguments, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "found.json").read_text())
    assert [model["windows"] for model in told["models"]] == [9, 9]
    assert f"{told['models'][0]['loss']:.4f}" in table
    assert told["models"][1]["difference_to_first"]["mean"] == pytest.approx(
        told["models"][1]["loss"] - told["models"][0]["loss"]
    )


def test_another_text_is_read_with_the_runs_own_tokens(runs, tmp_path):
    other = write_folder(tmp_path / "other", documents(60)[40:])
    model, tokenizer, *_ = mixdepth.load(str(runs / "bpe"))
    (entry,) = mixdepth.evaluate_runs([str(runs / "bpe")], corpus=other).entries
    text = load_corpus(other, str(runs / "bpe"))
    assert text.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert entry.evaluation == mixdepth.evaluate(model, text.validation.windows(32).batches(16))
    assert load_corpus(other, "bpe:300").tokenizer.get_vocab() != tokenizer.get_vocab()


def test_a_single_window_has_no_interval(runs):
    (entry,) = mixdepth.evaluate_runs([str(runs / "mod")], windows=1).entries
    assert entry.evaluation.gap.low is None
    assert "[" not in str(mixdepth.evaluate_runs([str(runs / "mod")], windows=1))


def test_models_with_other_tokens_are_compared_by_bits_per_byte_alone(runs):
    found = mixdepth.evaluate_runs([str(runs / "dense"), str(runs / "bpe")])
    assert found.difference(found.entries[1]) is None
    assert found.entries[1].bits_per_nat < found.entries[0].bits_per_nat
    assert "not on the same windows" in str(found)


def test_a_checkpoint_and_a_plain_folder_can_be_evaluated_too(runs, tmp_path):
    checkpoint = str(runs / "mod" / "checkpoint-40")
    entry = mixdepth.evaluate_runs([checkpoint]).entries[0]
    assert entry.evaluation.loss > mixdepth.evaluate_runs([str(runs / "mod")]).entries[0].evaluation.loss
    loaded = mixdepth.load(str(runs / "mod"))
    loaded.model.save_pretrained(tmp_path / "plain")
    loaded.tokenizer.save_pretrained(tmp_path / "plain")
    plain = mixdepth.evaluate_runs([str(tmp_path / "plain")], corpus=str(runs / "texts"), context=32).entries[0]
    assert plain.evaluation == mixdepth.evaluate_runs([str(runs / "mod")]).entries[0].evaluation


def test_what_cannot_be_evaluated_is_answered_in_a_sentence(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = mixdepth.load(str(runs / "mod"))
    loaded.model.save_pretrained(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text((runs / "mod" / "run.json").read_text())
    mod = str(runs / "mod")
    for arguments, message in (
        (["nowhere"], "'nowhere' is neither a run nor a model's folder nor a model of the hub"),
        ([str(tmp_path / "empty")], "is neither a run nor a model's folder"),
        ([str(tmp_path / "begun")], "is a run without a finished checkpoint: start its training again"),
        ([str(tmp_path / "plain")], "has no tokenizer"),
        ([mod, "--context", "100000"], "is shorter than a window of 100000 tokens"),
        ([mod, "--windows", "0"], "windows must be a whole number of at least 1, not 0"),
    ):
        assert main(["eval", *arguments]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert message in last
    mixdepth.load(str(runs / "bpe")).tokenizer.save_pretrained(tmp_path / "plain")
    assert main(["eval", str(tmp_path / "plain"), "--corpus", str(runs / "texts")]) == 2
    assert "has 300 tokens and its model 256: they do not belong together" in capsys.readouterr().err
    loaded.tokenizer.save_pretrained(tmp_path / "whole")
    loaded.model.save_pretrained(tmp_path / "whole")
    assert main(["eval", str(tmp_path / "whole")]) == 2
    assert "has no corpus of its own: give one by --corpus" in capsys.readouterr().err


def test_a_run_that_is_not_finished_is_evaluated_as_far_as_it_got(runs, tmp_path):
    import shutil

    shutil.copytree(runs / "mod", tmp_path / "mod")
    (tmp_path / "mod" / "result.json").unlink()
    process = call("eval", str(tmp_path / "mod"), "--windows", "4")
    assert process.returncode == 0, process.stderr
    assert "is not finished: this is checkpoint-60" in process.stdout
