"""Damaged and foreign folders: each is refused in one sentence, or loads with a note that says what has changed."""

import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from corpora import TINY, call, documents, flags, refusal, write_folder
from safetensors.torch import load_file, save_file
from tiny import dense, routed

import mixdepth
from mixdepth import DepthConfig
from mixdepth.models.finite import check_finite
from mixdepth.runs.run import Run

QUERY = "model.layers.0.self_attn.q_proj.weight"
TO_GENERATE = ("--max-new-tokens", "2", "--greedy")


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(finished / "mod", tmp_path / "copy")


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder, name, value):
    """Set the first number of a tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file, metadata={"format": "pt"})


def fill_weights(folder, name, value):
    """Set all numbers of a tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].fill_(value)
    save_file(tensors, file, metadata={"format": "pt"})


def seal(checkpoint):
    """Write the marker of a checkpoint for the files as they are now."""
    marker = json.loads((checkpoint / "complete.json").read_text())
    marker["files"] = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in marker["files"]}
    (checkpoint / "complete.json").write_text(json.dumps(marker))


def commands(folder, tmp_path):
    """The commands that read a model, each on this folder."""
    yield "eval", str(folder), "--windows", "2"
    yield "generate", str(folder), "def f(x):", *TO_GENERATE
    yield "page", str(folder), "--text", "def f(x):", "--out", str(tmp_path / "page.html")


# --- a run and its corpus belong together ---


def test_a_page_of_a_corpus_that_the_run_was_not_trained_on_is_refused(copy, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("root:x:0:0:secret\n" * 2000)
    settings = Run(copy).about["settings"]
    edit(copy / "run.json", settings={**settings, "corpus": str(secret)})
    page = tmp_path / "page.html"
    for command in (["page", str(copy), "--out", str(page)], ["eval", str(copy), "--windows", "2"]):
        assert f"the corpus '{secret}' is no longer what '{copy}' was trained on" in refusal(*command)
    assert not page.exists()
    assert call("page", str(copy), "--text", "x = 1", "--out", str(page)).returncode == 0


def test_a_context_that_the_model_cannot_have_been_trained_with_is_refused(copy, tmp_path):
    settings = Run(copy).about["settings"]
    edit(copy / "run.json", settings={**settings, "context": 10**9})
    for command in (*commands(copy, tmp_path), ("page", str(copy), "--out", str(tmp_path / "page.html"))):
        assert "says context=1000000000, and its model takes 32 tokens" in refusal(*command)


# --- weights that are not finite ---


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [QUERY, "model.layers.1.depth_router.predictor.up.bias"])
def test_weights_that_are_not_finite_are_refused_by_every_command_with_the_tensor_s_name(name, value, copy, tmp_path):
    change_weights(copy, name, value)
    written = ["--out", str(tmp_path / "out")]
    corpus = Run(copy).settings.corpus
    others = [
        ("convert", str(copy), "--dense", *written),
        ("tune", str(copy), "--capacity", "0.25", "--steps", "2", "--context", "32", "--corpus", corpus, *written),
    ]
    for command in (*commands(copy, tmp_path), *others):
        assert f"the weights of '{copy}' are not finite: {name!r} holds" in refusal(*command)
    with pytest.raises(ValueError, match="are not finite"):
        mixdepth.load(str(copy))


def test_a_checkpoint_whose_weights_are_not_finite_is_refused(copy):
    (copy / "result.json").unlink()
    shard = copy / "checkpoint-60" / "state" / "shard-00001-model-00001-of-00001.safetensors"
    with open(shard, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(size))[f"model.{QUERY}"]["data_offsets"]
    data = bytearray(shard.read_bytes())
    data[8 + size + start : 8 + size + end] = b"\xff" * (end - start)
    shard.write_bytes(data)
    seal(copy / "checkpoint-60")
    assert f"are not finite: {QUERY!r} holds NaN" in refusal("eval", str(copy))


def test_a_checkpoint_whose_marker_does_not_name_its_weights_is_damaged(copy):
    from mixdepth.runs.checkpoints import damage

    edit(copy / "checkpoint-60" / "complete.json", files={})
    assert "was added" in damage(copy / "checkpoint-60")


def test_the_first_tensor_that_is_not_finite_is_named():
    model = dense()
    with torch.no_grad():
        for name in ("model.norm.weight", "model.layers.2.mlp.up_proj.weight"):
            model.get_parameter(name).view(-1)[-1] = -torch.inf
    with pytest.raises(ValueError, match=r"'model.layers.2.mlp.up_proj.weight' holds infinity"):
        check_finite(model, "it")
    model = dense("gpt2")
    model.get_parameter("lm_head.weight").data[3, 1] = torch.nan  # tied to the embedding, which comes first
    with pytest.raises(ValueError, match=r"'transformer.wte.weight' holds NaN"):
        check_finite(model, "it")


def test_what_is_rightly_not_finite_is_no_damage():
    model = routed(causal="threshold", dtype=torch.float32)
    router = model.depth_routers[1]
    check_finite(model, "it")
    router.threshold.fill_(torch.nan)  # never estimated
    model.register_buffer("mask", torch.full((3, 3), -torch.inf), persistent=False)
    model.register_buffer("counts", torch.zeros(0))
    check_finite(model, "it")
    with torch.device("meta"):
        check_finite(dense(), "it")


@pytest.mark.parametrize(
    ("settings", "fill"),
    [
        ({"causal": "threshold"}, lambda threshold: threshold.fill_(torch.inf)),
        ({"causal": "predictor"}, lambda threshold: threshold.fill_(torch.nan)),
        ({"experts": "expert_choice"}, lambda threshold: threshold[:1].fill_(torch.nan)),
    ],
)
def test_a_threshold_that_no_training_leaves_is_refused(settings, fill):
    architecture = "mixtral" if "experts" in settings else "llama"
    model = routed(architecture, dtype=torch.float32, **settings)
    routers = model.depth_expert_routers if "experts" in settings else model.depth_routers
    check_finite(model, "it")
    fill(routers[0].threshold)
    with pytest.raises(ValueError, match=r"threshold' holds"):
        check_finite(model, "it")


# --- what cannot be sampled, what is no number ---


@pytest.mark.parametrize("more", [[], ["--show-routes"], ["--num-beams", "2"]])
def test_settings_that_leave_nothing_to_sample_from_are_refused(more, finished):
    message = refusal("generate", str(finished / "mod"), "x", *TO_GENERATE[:2], "--temperature", "1e-320", *more)
    assert "there are no probabilities to sample from with temperature=1e-320" in message


def overflow_late(folder):
    """Let rotary angles overflow from about the 18th token on."""
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 2.3e-43})


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit(folder / "config.json", rms_norm_eps=float("nan")),
        lambda folder: fill_weights(folder, "model.norm.weight", 3e38),
        lambda folder: fill_weights(folder, "model.layers.0.mlp.up_proj.weight", 3e38),
    ],
)
def test_a_model_that_computes_nan_of_finite_weights_is_refused(change, copy, tmp_path):
    change(copy)
    for command in commands(copy, tmp_path):
        assert "computes no numbers, though its weights are finite" in refusal(*command)


def test_generation_and_page_of_a_text_on_which_the_model_computes_nan_are_refused(copy, tmp_path):
    overflow_late(copy)
    text = "def f(x): return x + 1"
    for more in ((), ("--greedy",), ("--num-beams", "2", "--greedy")):
        message = refusal("generate", str(copy), text, "--max-new-tokens", "2", *more)
        assert "the model computes NaN on this text" in message or "no probabilities to sample from" in message
    assert "the model computes NaN on this text" in refusal(
        "page", str(copy), "--text", text, "--out", str(tmp_path / "page.html")
    )


def test_numbers_that_are_none_are_null_in_json(copy):
    def refuse(constant):
        raise AssertionError(constant)

    overflow_late(copy)
    process = call("eval", str(copy), "--windows", "2", "--json", "-")
    assert process.returncode == 0
    (entry,) = json.loads(process.stdout, parse_constant=refuse)["models"]
    assert entry["loss"] is None
    assert "its loss is not a number" in entry["note"]


# --- digests of a finished model ---


@pytest.fixture(scope="module")
def converted(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "model"
    assert call("convert", str(finished / "dense"), "--out", str(folder), "--capacity", "0.5").returncode == 0
    return folder


def flip(file):
    """Flip the lowest bit of a number in the middle of the weights."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 & ~3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["run", "conversion"])
def test_a_model_that_was_changed_after_it_was_finished_is_used_with_a_note(kind, finished, converted, tmp_path):
    folder = shutil.copytree(finished / "mod" if kind == "run" else converted, tmp_path / "copy")
    corpus = Run(finished / "mod").settings.corpus

    def said():
        for command in commands(folder, tmp_path):
            process = call(*command, *(["--corpus", corpus] if command[0] == "eval" else []))
            assert process.returncode == 0, process.stderr
            yield command[0], process.stdout + process.stderr

    note = f"{folder} was changed after it was written (model.safetensors is not what was written)"
    for command, text in said():
        assert "was changed" not in text, command
    flip(folder / "model.safetensors")
    for command, text in said():
        assert text.count(note) == 1, command
    assert note in (tmp_path / "page.html").read_text()
    assert mixdepth.load(str(folder)).note == note
    (folder / "digests.json").unlink()  # as versions before left it
    for command, text in said():
        assert "was changed" not in text, command


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_changed_setting_of_a_finished_model_is_named(file, copy):
    edit(copy / file, **{"rms_norm_eps": 1e-3} if file == "config.json" else {})
    assert f"({file} is not what was written)" in mixdepth.load(str(copy)).note


@pytest.mark.parametrize("content", ["{", "[]", '{"files": 3}', '{"files": {"/etc/passwd": "x"}}'])
def test_damaged_digests_are_a_note(content, copy):
    (copy / "digests.json").write_text(content)
    assert "digests.json" in mixdepth.load(str(copy)).note


def add_adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def add_shards(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def forget_files(folder):
    edit(folder / "digests.json", files={})


def forget_weights(folder):
    digests = json.loads((folder / "digests.json").read_text())["files"]
    edit(folder / "digests.json", files={"config.json": digests["config.json"]})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_adapter, "adapter_config.json"),
        (add_shards, "model.safetensors.index.json"),
        (forget_files, "config.json"),
        (forget_weights, "generation_config.json"),
    ],
)
def test_a_file_that_was_added_to_a_finished_model_is_named(change, name, copy):
    from mixdepth.runs.digests import change as change_of

    change(copy)
    assert change_of(copy) == f"{name!r} was added"


def test_digests_that_are_no_file_are_a_note(copy):
    (copy / "digests.json").unlink()
    (copy / "digests.json").symlink_to(copy / "nothing")
    assert "digests.json is damaged" in mixdepth.load(str(copy)).note
    (copy / "digests.json").unlink()
    (copy / "digests.json").mkdir()
    assert "digests.json is damaged" in mixdepth.load(str(copy)).note


def test_digests_of_impossible_names_are_a_note(copy):
    edit(copy / "digests.json", files={"a" * 400: "x"})
    note = mixdepth.load(str(copy)).note
    assert "cannot be read" in note
    assert len(note) < 400


def test_the_digests_of_a_name_of_the_hub_are_checked_in_its_cache(copy, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--me--mod"
    flip(copy / "model.safetensors")
    shutil.copytree(copy, folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "me/mod was changed after it was written (model.safetensors" in mixdepth.load("me/mod").note


def test_a_file_of_nested_brackets_is_refused_in_a_sentence(copy):
    (copy / "run.json").write_text("[" * 200_000)
    assert "is damaged" in refusal("eval", str(copy), "--windows", "2")


@pytest.mark.parametrize("settings", [{"eos_token_id": "x"}, {"forced_eos_token_id": 10**9}])
def test_generation_settings_with_tokens_that_are_none_are_refused(settings, copy):
    edit(copy / "generation_config.json", **settings)
    assert f"says {next(iter(settings))}=" in refusal("generate", str(copy), "x", *TO_GENERATE)


def test_a_generation_config_that_asks_for_a_dictionary_is_read_all_the_same(copy):
    edit(copy / "generation_config.json", return_dict_in_generate=True)
    assert call("generate", str(copy), "x", *TO_GENERATE).returncode == 0


def test_a_server_says_that_its_model_was_changed(copy, capsys):
    from mixdepth.sampling.server import make_app

    flip(copy / "model.safetensors")
    make_app(str(copy))
    assert "model.safetensors is not what was written" in capsys.readouterr().err


def test_a_plain_model_that_convert_saved_has_digests_too(finished, tmp_path):
    folder = tmp_path / "plain"
    assert call("convert", str(finished / "mod"), "--dense", "--out", str(folder)).returncode == 0
    assert mixdepth.load(str(folder)).note == ""
    flip(folder / "model.safetensors")
    assert "model.safetensors is not what was written" in mixdepth.load(str(folder)).note


def test_every_file_is_hashed_once(copy, monkeypatch):
    hashed = []
    digest = hashlib.file_digest

    def counted(file, name):
        hashed.append(os.path.relpath(file.name, copy))
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    mixdepth.load(str(copy))
    assert "model.safetensors" in hashed
    assert len(hashed) == len(set(hashed))
    hashed.clear()
    (copy / "result.json").unlink()
    config = Run(copy).settings
    mixdepth.train(copy, config)
    assert "checkpoint-60/trainer_state.json" in hashed
    assert len(hashed) == len(set(hashed))


# --- what a folder's config.json and index may say ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**5}, r"config.json says num_hidden_layers=100000, and its weights are 26 tensors"),
        ({"vocab_size": 10**12}, r"describes \d[\d,]+ weights, and its files hold \d\d,\d+"),
        ({"intermediate_size": 10**9}, r"describes \d[\d,]+ weights, and its files hold \d\d,\d+"),
        ({"num_labels": 10**9}, r"config.json says num_labels=1000000000, and its weights are 4\d,\d+ numbers"),
        ({"attn_implementation": "evil/kernel"}, r"attn_implementation='evil/kernel', and no kernel is fetched"),
        ({"_attn_implementation": "evil/kernel@main:f"}, r"_attn_implementation='evil/kernel@main:f', and no kernel"),
        ({"attn_implementation": {"": "evil/kernel"}}, "and no kernel is fetched"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "config.json says that bitsandbytes has quantised the weights, and they are plain numbers",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "config.json says that bitsandbytes has quantised the weights, and they are plain numbers",
        ),
    ],
)
def test_a_config_that_asks_for_what_the_weights_are_not_is_refused(changes, message, copy, tmp_path):
    edit(copy / "config.json", **changes)
    for command in commands(copy, tmp_path):
        assert re.search(message, refusal(*command))


def test_a_config_that_asks_for_tuples_is_read_all_the_same(copy, tmp_path):
    edit(copy / "config.json", return_dict=False)
    for command in commands(copy, tmp_path):
        assert call(*command).returncode == 0


def test_weights_outside_of_the_folder_are_not_read(copy, tmp_path):
    (copy / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = list(load_file(tmp_path / "outside.safetensors"))
    for place in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, place)}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        assert f"names the weights file {place!r}, which is not in the folder" in refusal("eval", str(copy))
    for content in ("[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"):
        (copy / "model.safetensors.index.json").write_text(content)
        assert "model.safetensors.index.json" in refusal("eval", str(copy))


def test_a_tokenizer_without_its_settings_is_named(copy):
    (copy / "tokenizer_config.json").unlink()
    process = call("generate", str(copy), "x", *TO_GENERATE)
    assert process.returncode == 2
    assert "has no token that ends or fills a text" in process.stderr
    assert "has no tokenizer_config.json" in process.stderr


# --- what a run is resumed from ---


@pytest.mark.parametrize("junk", [b"junk", b"\x80\x04\x8c\x02os\x94.", b""])
@pytest.mark.parametrize("file", ["scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_checkpoint_with_junk_is_refused_in_a_sentence_that_names_the_file(file, junk, copy):
    settings = Run(copy).settings
    resume = [*flags({name: getattr(settings, name) for name in (*TINY, "corpus", "steps")}), "--capacity", "0.25"]
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoint-60")
    checkpoint = copy / "checkpoint-40"
    (checkpoint / file).write_bytes(junk)
    seal(checkpoint)
    message = refusal("train", *resume, "--out", str(copy))
    assert f"{str(checkpoint / file)!r} cannot be read" in message
    assert "delete 'checkpoint-40' and give the same command again" in message
    assert len(message) < 500


@pytest.mark.parametrize("content", ["[]", "{}", '{"global_step": 1000000000}', '{"global_step": "40"}'])
def test_a_checkpoint_of_another_step_than_its_name_says_is_refused(content, copy):
    settings = Run(copy).settings
    resume = [*flags({name: getattr(settings, name) for name in (*TINY, "corpus", "steps")}), "--capacity", "0.25"]
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoint-60")
    state = copy / "checkpoint-40" / "trainer_state.json"
    whole = json.loads(state.read_text())
    told = json.loads(content)
    state.write_text(json.dumps({**whole, **told} if told else told))
    seal(copy / "checkpoint-40")
    assert f"{str(state)!r} cannot be read" in refusal("train", *resume, "--out", str(copy))
    assert not (copy / "result.json").exists()


def test_a_checkpoint_beyond_the_plan_is_refused(copy):
    settings = Run(copy).settings
    resume = [*flags({name: getattr(settings, name) for name in (*TINY, "corpus", "steps")}), "--capacity", "0.25"]
    (copy / "result.json").unlink()
    (copy / "checkpoint-60").rename(copy / "checkpoint-1000000000")
    message = refusal("train", *resume, "--out", str(copy))
    assert "'checkpoint-1000000000' is beyond the 60 steps of this run" in message
    assert not (copy / "result.json").exists()


def test_a_scaler_that_the_run_did_not_write_is_not_read(copy, finished):
    settings = Run(copy).settings
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoint-60")
    (copy / "checkpoint-40" / "scaler.pt").write_bytes(b"junk")
    mixdepth.train(copy, settings)
    assert Run(copy).result == Run(finished / "mod").result


# --- names and places ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "the name is too long"),
        ("a\0b", "a name cannot hold the character NUL"),
    ],
)
def test_names_that_no_file_can_have_are_refused_in_a_sentence(name, message, finished, corpus, tmp_path):
    run = str(finished / "mod")
    settings = flags({**TINY, "corpus": corpus, "steps": 3})
    for command in (
        ["train", *settings, "--out", str(tmp_path / name)],
        ["convert", run, "--dense", "--out", str(tmp_path / name)],
        ["page", run, "--text", "x", "--out", str(tmp_path / name)],
        ["eval", str(tmp_path / name)],
        ["isoflop", "fit", str(tmp_path / name)],
    ):
        said = refusal(*command)
        assert message in said, command
        assert "Errno" not in said
        assert len(said) < 600


def test_room_is_asked_for_only_where_room_is_lacking(corpus, tmp_path):
    settings = flags({**TINY, "corpus": corpus, "steps": 3})
    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file" / "run"), "/proc/nope/run"):
        message = refusal("train", *settings, "--out", place)
        assert "cannot be written" in message
        assert "make room" not in message
        assert "choose another folder" in message


def test_a_finished_run_is_not_written_to(finished, tmp_path):
    run = shutil.copytree(finished / "mod", tmp_path / "run")
    (run / ".lock").unlink()
    mixdepth.train(run, Run(run).settings)
    assert not (run / ".lock").exists()


def test_a_resumed_run_has_the_digests_of_an_undisturbed_one(copy, finished):
    for name in ("result.json", "digests.json", "model.safetensors"):
        (copy / name).unlink()
    mixdepth.train(copy, Run(copy).settings)
    for name in ("result.json", "digests.json", "model.safetensors"):
        assert (copy / name).read_bytes() == (finished / "mod" / name).read_bytes()


def test_the_digests_of_adapters_are_of_the_merged_model(finished, converted, tmp_path):
    corpus = write_folder(tmp_path / "texts", documents())
    settings = {"corpus": corpus, "context": 32, "steps": 2, "batch_size": 4, "eval_windows": 4, "calibrate": 0}
    run = mixdepth.tune(str(converted), tmp_path / "tuned", **settings, method="lora", lora_rank=2)
    assert mixdepth.load(str(run.folder)).note == ""
    assert DepthConfig.from_dict(Run(run.folder).about["settings"]["depth"]).capacity == 0.5
