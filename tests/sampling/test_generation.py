"""Text from models is that of transformers' generate(), with the routes that its tokens took."""

import shutil

import pytest
import torch
from corpora import TINY, call, documents, write_folder

import mixdepth
from mixdepth.cli import main
from mixdepth.sampling.generation import COLOURS, paint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("MIXDEPTH_CACHE", str(folder / "cache"))
    settings = {**TINY, "layers": 4, "corpus": write_folder(folder / "texts", documents()), "steps": 150}
    mixdepth.train(folder / "mod", **settings, depth=mixdepth.DepthConfig(capacity=0.5, causal="threshold"))
    yield folder / "mod"
    patch.undo()


def test_text_is_what_the_model_generates(run):
    model, tokenizer, *_ = mixdepth.load(str(run))
    (text,) = mixdepth.generate(str(run), "import o", max_new_tokens=20, do_sample=False)
    ids = model.generate(torch.tensor([list(b"import o")]), max_new_tokens=20, do_sample=False)
    assert text.prompt + text.completion == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert "".join(text.pieces) == text.prompt + text.completion


def test_several_prompts_at_once_are_each_as_if_alone(run):
    model, tokenizer, *_ = mixdepth.load(str(run))
    prompts = ["def f(x):", "i", "class Gr\u00f6\u00dfe:"]
    options = {"max_new_tokens": 12, "do_sample": False, "tokenizer": tokenizer, "show_routes": True}
    together = mixdepth.generate(model.double(), prompts, **options)
    for prompt, text in zip(prompts, together, strict=True):
        assert text == mixdepth.generate(model, prompt, **options)[0]


def test_a_seed_gives_the_same_sample_and_another_one_another(run):
    samples = [mixdepth.generate(str(run), "x = ", max_new_tokens=20, do_sample=True, seed=s)[0] for s in (1, 1, 2)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


@pytest.mark.parametrize("prompts", [["def f("], ["def f(", "a much longer prompt than the first\n"]])
def test_the_first_text_is_streamed_as_it_comes(run, prompts):
    parts = []
    texts = mixdepth.generate(str(run), prompts, max_new_tokens=30, do_sample=True, seed=0, stream=parts.append)
    assert "".join(parts).rstrip("\n") == (texts[0].prompt + texts[0].completion).rstrip("\n")
    assert len(parts) > 2


def test_a_text_ends_where_the_model_ends_it(run):
    model, tokenizer, *_ = mixdepth.load(str(run))
    (plain,) = mixdepth.generate(model, "import", tokenizer=tokenizer, max_new_tokens=8, do_sample=False)
    end = plain.completion.encode()[3]
    (cut,) = mixdepth.generate(
        model, "import", tokenizer=tokenizer, max_new_tokens=8, do_sample=False, eos_token_id=end, show_routes=True
    )
    assert plain.completion.startswith(cut.completion)
    assert len(cut.completion) < len(plain.completion)
    assert len(cut.depths) == len(cut.pieces)


def test_nothing_follows_the_end_of_a_text_that_ends_before_others(run):
    options = {"max_new_tokens": 30, "do_sample": True, "seed": 0, "eos_token_id": ord(" "), "show_routes": True}
    texts = mixdepth.generate(str(run), ["import", "x = 1", "class A:", "def f("], **options)
    lengths = [len(text.completion) for text in texts]
    assert min(lengths) < max(lengths)
    for text in texts:
        assert " " not in text.completion[:-1]
        assert all(text.pieces)  # padding would be pieces without text
        assert len(text.pieces) == len(text.depths)


def test_the_depth_of_a_token_is_the_number_of_routed_layers_that_chose_it(run):
    model, tokenizer, *_ = mixdepth.load(str(run))
    prompt = "def f(x): # How?\n    return [1, 'a']"
    (text,) = mixdepth.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=30, seed=0, show_routes=True)
    ids = torch.tensor([tokenizer("".join(text.pieces))["input_ids"]])
    routes = model(ids, output_routes=True).routes
    expected = torch.stack([route.mask[0] for route in routes]).sum(0).tolist()
    assert list(text.depths) == expected
    assert len(set(expected)) > 1
    assert text.num_routed == 2


def test_characters_of_several_bytes_are_shown_whole(run):
    (text,) = mixdepth.generate(str(run), "# \u4e2d\u6587 gr\u00fcn", max_new_tokens=2, show_routes=True)
    assert "\u4e2d" in text.pieces
    assert "\u00fc" in text.pieces


def test_colours_go_from_none_to_all_and_can_be_left_out(run, monkeypatch):
    assert paint("x", 0, 4) == f"\x1b[38;5;{COLOURS[0]}mx\x1b[0m"
    assert paint("x", 4, 4) == f"\x1b[38;5;{COLOURS[-1]}mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in paint("x", 4, 4)


def test_text_of_a_run_that_is_not_finished_says_so(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "mod")
    (tmp_path / "mod" / "result.json").unlink()
    assert main(["generate", str(tmp_path / "mod"), "x", "--max-new-tokens", "2"]) == 0
    assert "is not finished: this is checkpoint-150" in capsys.readouterr().err


def test_the_command_writes_text_and_colours(run):
    process = call("generate", str(run), "def f(", "x = ", "--max-new-tokens", "10", "--greedy")
    assert process.returncode == 0, process.stderr
    expected = mixdepth.generate(str(run), ["def f(", "x = "], max_new_tokens=10, do_sample=False)
    for text in expected:
        assert (text.prompt + text.completion).rstrip() in process.stdout
    process = call("generate", str(run), "def f(", "--max-new-tokens", "10", "--show-routes")
    assert "of 2:" in process.stdout
    assert "\x1b[38;5;" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "x"], "'nowhere' is neither a run nor a model's folder nor a model of the hub"),
        (["RUN", ""], "give at least one prompt, and none that is empty"),
        (["RUN", "x", "--temperature", "0"], "temperature"),
        (["RUN", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["RUN", "x", "--num-beams", "0"], "num_beams must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_generated_is_answered_in_a_sentence(arguments, message, run, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["generate", *(str(run) if part == "RUN" else part for part in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_dense_model_has_no_routes_to_show(tmp_path):
    from tiny import dense

    from mixdepth.data.tokenizers import byte_tokenizer

    with pytest.raises(ValueError, match="LlamaForCausalLM has no routed layers: there are no routes to show"):
        mixdepth.generate(dense(), "x", tokenizer=byte_tokenizer(), show_routes=True)
    with pytest.raises(ValueError, match="needs its tokenizer too"):
        mixdepth.generate(dense(), "x")
