"""Pretrained models are converted to the bit, with layers that are chosen by their cost, and converted back."""

import json
import shutil

import pytest
import torch
from corpora import call, start
from safetensors.torch import load_file, save_file
from tiny import dense, token_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import mixdepth
from mixdepth.cli import main
from mixdepth.conversion.converting import Conversion
from mixdepth.conversion.importance import cheapest
from mixdepth.data.tokenizers import byte_tokenizer

UNIT = mixdepth.DepthConfig(capacity=0.5, gate="unit", router_input="normed")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Make a folder like that of a pretrained model, with four layers and bytes as tokens."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    save(dense(vocab_size=256), folder)
    return str(folder)


def save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def logits(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()(token_ids()).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"causal": "threshold"},
        {"causal": "aux_loss"},
        {"target": "mlp"},
        {"target": "attention"},
        {"scheme": "token_choice"},
        {"scheme": "random", "gate": "one"},
        {"scheme": "early_exit", "layers": (1, 3), "capacity": (0.5, 0.25)},
        {"capacity": (0.5, 0.25)},
        {"gate": "straight"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_a_converted_model_computes_what_it_did_to_the_bit(settings, dtype, tmp_path):
    save(dense(vocab_size=256, dtype=dtype), tmp_path / "dense")
    depth = mixdepth.DepthConfig(**{"capacity": 0.5, "gate": "unit", "router_input": "normed", **settings})
    conversion = mixdepth.convert(str(tmp_path / "dense"), tmp_path / "mod", depth)
    assert conversion == Conversion.read(tmp_path / "mod")
    assert conversion.depth.capacity == depth.capacity
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mod")
    assert model.depth_config.capacity == 1
    assert model.dtype == dtype
    expected = logits(tmp_path / "dense")
    assert torch.equal(model.eval()(token_ids()).logits, expected)
    assert torch.equal(model.train()(token_ids()).logits, expected)
    assert torch.equal(mixdepth.unroute(model).eval()(token_ids()).logits, expected)


def test_the_plain_model_comes_back_from_the_command_line(pretrained, tmp_path, capsys):
    mod, plain = str(tmp_path / "mod"), str(tmp_path / "plain")
    assert main(["convert", pretrained, "--out", mod, "--capacity", "0.25", "--routed-layers", "1,2"]) == 0
    assert "next: mixdepth tune" in capsys.readouterr().out
    assert Conversion.read(mod).depth.routed_layers(4) == {1: 0.25, 2: 0.25}
    assert main(["convert", mod, "--dense", "--out", plain]) == 0
    assert not (tmp_path / "plain/conversion.json").exists()
    assert type(AutoModelForCausalLM.from_pretrained(plain)).__name__ == "LlamaForCausalLM"
    assert torch.equal(logits(plain), logits(pretrained))
    assert AutoTokenizer.from_pretrained(plain).get_vocab() == byte_tokenizer().get_vocab()


def test_the_layers_that_cost_least_are_chosen(pretrained, corpus, tmp_path):
    """Layer 2 does nothing, and layer 3 nearly nothing."""
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    with torch.no_grad():
        for index, scale in ((2, 0.0), (3, 0.01)):
            model.model.layers[index].self_attn.o_proj.weight *= scale
            model.model.layers[index].mlp.down_proj.weight *= scale
    save(model, tmp_path / "idle")
    options = {"choose": "auto", "corpus": corpus, "windows": 2, "context": 64}
    found = mixdepth.convert(str(tmp_path / "idle"), tmp_path / "mod", UNIT, **options)
    assert found.costs[2] == 0
    assert abs(found.costs[3]) < min(abs(found.costs[0]), abs(found.costs[1]))
    assert found.depth.layers == cheapest(found.costs, 2)
    assert found.costs.keys() == {0, 1, 2, 3}
    assert torch.equal(logits(tmp_path / "mod"), logits(tmp_path / "idle"))
    assert found == Conversion.read(tmp_path / "mod")


def test_a_layers_cost_is_that_of_skipping_the_tokens_that_it_moves_least_but_not_the_sink():
    """Computed by hand for an MLP, where no token sees another: its update is left out where it is smallest."""
    model = dense(dtype=torch.float64)
    ids = token_ids(2, 16)
    costs = mixdepth.layer_costs(model, [ids], capacity=0.25, target="mlp")
    assert type(model).__name__ == "LlamaForCausalLM"
    before = model(ids, labels=ids).loss
    layer, seen = model.model.layers[1], {}

    def skip(module, args, update):
        size = update.norm(dim=-1) / seen["x"].norm(dim=-1)
        size[:, 0] = size.amax(1)  # the sink stays
        kept = size >= size.topk(4, dim=1).values[:, -1:]
        return update * kept[..., None]

    layer.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    layer.mlp.register_forward_hook(skip)
    assert costs[1] == pytest.approx((model(ids, labels=ids).loss - before).item(), abs=1e-6)


@pytest.mark.parametrize("target", ["block", "attention"])
def test_a_token_that_a_layer_would_not_move_costs_nothing_to_skip(target):
    """A layer that moves no token can skip any of them. Skipping tokens of another layer costs something."""
    model = dense(dtype=torch.float64)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.mul_(target == "attention")
    costs = mixdepth.layer_costs(model, [token_ids(2, 16)], capacity=0.25, target=target)
    assert costs[2] == 0
    assert all(costs[index] for index in (0, 1, 3))


def test_fitted_routers_leave_the_model_as_it_was(pretrained, corpus, tmp_path):
    arguments = ["--out", str(tmp_path / "mod"), "--fit", "--choose", "auto", "--corpus", corpus, "--windows", "8"]
    assert main(["convert", pretrained, *arguments, "--context", "64"]) == 0
    assert Conversion.read(tmp_path / "mod").depth.gate == "straight"
    assert torch.equal(logits(tmp_path / "mod"), logits(pretrained))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mod")
    assert all(router.projection.weight.abs().sum() > 0 for router in model.depth_routers)


@pytest.mark.parametrize("router_input", ["normed", "stream"])
@pytest.mark.parametrize("target", ["block", "mlp", "attention"])
def test_routers_are_fitted_to_how_far_a_layer_moves_its_tokens(target, router_input):
    """The fit is computed by hand over all tokens at once, with the first token of each row at the top."""
    ids, settings = token_ids(4, 32), {"target": target, "router_input": router_input}
    model = mixdepth.route(dense(dtype=torch.float64), capacity=1.0, layers=(1, 2), gate="straight", **settings)
    before = model.eval()(ids).logits
    mixdepth.fit_routers(model, [ids[:3], ids[3:]])
    assert torch.equal(model(ids).logits, before)
    assert "score" not in vars(model.depth_routers[0])
    seen, part = {}, {"block": "", "mlp": "mlp", "attention": "self_attn"}[target]
    layer = model.model.layers[2]
    reads = layer.post_attention_layernorm if target == "mlp" else layer.input_layernorm
    layer.register_forward_pre_hook(lambda module, args: seen.update(before=args[0]))
    reads.register_forward_pre_hook(lambda module, args: seen.update(read=args[0]))
    layer.get_submodule(part).register_forward_hook(
        lambda module, args, out: seen.update(after=out[0] if isinstance(out, tuple) else out)
    )
    model(ids)
    moved = seen["after"] - seen["before"] if target == "block" else seen["after"]
    wanted = (moved.norm(dim=-1) / seen["before"].norm(dim=-1)).log()
    wanted[:, 0] = wanted.max(1).values
    x, y = seen["read"].detach(), wanted.detach().flatten()
    if router_input == "normed":
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    weight = torch.tensor([16.0, *[1.0] * 31], dtype=x.dtype).repeat(4)  # the first counts as half of the row
    x = x.flatten(0, 1) - (weight @ x.flatten(0, 1)) / weight.sum()
    y = y - weight @ y / weight.sum()
    y = y / (weight @ y.square() / weight.sum()).sqrt()
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    ridge = 0.01 * (weight @ x.square()).mean()
    rows = torch.cat([x * weight.sqrt()[:, None], ridge.sqrt() * eye])
    expected = torch.linalg.lstsq(rows, torch.cat([y * weight.sqrt(), eye[0] * 0])).solution
    torch.testing.assert_close(model.depth_routers[1].projection.weight[0], expected.float())


def test_routers_are_fitted_before_the_capacity_falls():
    model = mixdepth.route(dense(), capacity=0.5, gate="straight")
    with pytest.raises(ValueError, match="before a model comes down in capacity: set its capacity to 1"):
        mixdepth.fit_routers(model, [token_ids()])
    mixdepth.set_capacity(model, 1.0)
    with pytest.raises(ValueError, match="0 tokens are too few to fit the 32 weights of a router: give at least 64"):
        mixdepth.fit_routers(model, [])
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a routed language model"):
        mixdepth.fit_routers(dense(), [token_ids()])
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the values of layer 1 on this text are not finite"):
        mixdepth.fit_routers(model, [token_ids(4, 32)])


def test_fitted_routers_want_the_first_token_of_a_row_though_it_moves_least():
    """The first token differs from all others, like the sink of a pretrained model."""
    ids = token_ids(8, 32).clamp(min=1)
    ids[:, 0] = 0
    model = mixdepth.route(dense(), capacity=1.0, gate="straight", router_input="normed", causal="threshold").eval()
    mixdepth.fit_routers(model, [ids])
    for route in model(ids, output_routes=True).routes:
        ranks = (route.logits > route.logits[:, :1]).sum(1)
        assert ranks.float().mean() < 3  # of 32; by its moves alone it would be among the last


def test_the_cheapest_are_in_order():
    assert cheapest({0: 3.0, 1: 1.0, 2: 2.0, 3: 0.5}, 3) == (1, 2, 3)


def test_a_card_tells_how_the_model_is_routed_and_how_to_load_it(pretrained, tmp_path):
    mixdepth.convert(pretrained, tmp_path / "mod", UNIT)
    card = (tmp_path / "mod/README.md").read_text()
    assert "library_name: transformers" in card
    assert "mixture-of-depths" in card
    assert "| routed layers | 1, 3 |" in card
    assert "| comes down to capacity | 0.5 |" in card
    assert "import mixdepth" in card
    assert str(tmp_path) not in card
    mixdepth.convert(pretrained, tmp_path / "plain")
    assert "mixdepth" not in (tmp_path / "plain/README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({"gate": "raw"}, {}, "gate='raw' changes what a pretrained model computes before it is tuned"),
        ({"scheme": "soft", "capacity": 1.0}, {}, "scheme='soft' processes every token and makes nothing cheaper"),
        (
            {"layers": (1,)},
            {"choose": "auto", "corpus": "nowhere"},
            r"layers=\[1\] has no meaning next to choose='auto'",
        ),
        (
            {"capacity": (0.5, 0.25)},
            {"choose": "auto", "corpus": "nowhere"},
            "needs one capacity for all layers, not a list",
        ),
        ({"capacity": (0.5, 0.25, 0.1)}, {}, "capacity lists 3 values for 2 routed layers"),
        ({"scheme": "early_exit"}, {}, "capacity must fall from one exit to the next"),
        ({}, {"choose": "auto", "context": 4096}, "context=4096 is beyond the 128 positions of"),
        ({"layers": (7,)}, {}, "layers must be below the model's 4 layers, not 7"),
        ({}, {"fit": True, "corpus": "nowhere"}, "gate='unit' is not 1 for every score: fitted routers need gate="),
        (
            {"scheme": "random", "gate": "one"},
            {"fit": True, "corpus": "nowhere"},
            "routers are fitted for scheme='expert_choice', not for 'random'",
        ),
        (
            {"causal": "aux_loss", "gate": "straight"},
            {"fit": True, "corpus": "nowhere"},
            "causal='aux_loss' compares scores with 0, and fitted scores do not lie around 0",
        ),
        ({"capacity": 1.0}, {}, "capacity=1 leaves nothing to come down to"),
        (
            {"gate": "straight"},
            {"fit": True, "windows": 1, "context": 8, "corpus": "nowhere"},
            "windows=1 are too few to fit routers of this width: give at least",
        ),
        ({}, {"choose": "best"}, "choose must be auto, or be left out, not 'best'"),
        ({}, {"choose": "auto", "windows": 0}, "windows must be a whole number of at least 1, not 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(settings, options, sentence, pretrained, tmp_path):
    depth = mixdepth.DepthConfig(**{"gate": "unit", **settings})
    with pytest.raises(ValueError, match=sentence):
        mixdepth.convert(pretrained, tmp_path / "mod", depth, **options)
    assert not (tmp_path / "mod").exists()


def test_nothing_is_overwritten_and_no_half_folder_is_left(pretrained, tmp_path):
    (tmp_path / "mod").mkdir()
    (tmp_path / "mod/mine.txt").write_text("mine")
    process = call("convert", pretrained, "--out", str(tmp_path / "mod"))
    assert process.returncode == 2
    assert "exists already: choose another --out" in process.stderr
    assert (tmp_path / "mod/mine.txt").read_text() == "mine"
    process = call("convert", str(tmp_path / "none"), "--out", str(tmp_path / "other"))
    assert process.returncode == 2
    assert "none' and no model's folder of this name" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mod"]


def test_a_damaged_conversion_is_named(pretrained, tmp_path):
    mixdepth.convert(pretrained, tmp_path / "mod", UNIT)
    (tmp_path / "mod/conversion.json").write_text(json.dumps({"original": "x"}))
    with pytest.raises(ValueError, match=r"conversion.json' is damaged .*: convert the model again"):
        mixdepth.tune(tmp_path / "mod", tmp_path / "tuned", steps=1)


def test_a_routed_model_is_not_routed_again(pretrained, tmp_path):
    mixdepth.convert(pretrained, tmp_path / "mod", UNIT)
    for choose in (None, "auto"):
        with pytest.raises(ValueError, match="mod' is routed already: take its routers out first, with --dense"):
            mixdepth.convert(str(tmp_path / "mod"), tmp_path / "again", UNIT, choose=choose)


def test_a_full_disk_leaves_nothing_behind(pretrained, tmp_path):
    """A folder of the user with a similar name is not touched either."""
    (tmp_path / "models/mod.part").mkdir(parents=True)
    arguments = ["convert", pretrained, "--out", str(tmp_path / "models/mod")]
    process = start(*arguments, log=tmp_path / "log", file_size=20_000)
    process.join()
    assert process.exitcode == 2
    said = (tmp_path / "log").read_text()
    assert "cannot be written" in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mod.part"]


def test_measuring_leaves_the_model_as_it_was_even_if_interrupted(monkeypatch):
    model = dense()
    monkeypatch.setattr("mixdepth.conversion.importance._loss", interrupt_in_routed)
    with pytest.raises(KeyboardInterrupt):
        mixdepth.layer_costs(model, [token_ids()])
    assert type(model).__name__ == "LlamaForCausalLM"


def interrupt_in_routed(model, batch):
    if type(model).__name__.startswith("Mixdepth"):
        raise KeyboardInterrupt
    return model(batch, labels=batch).loss


def test_windows_weigh_alike_however_they_are_batched():
    ids = token_ids(5, 16)
    at_once = mixdepth.layer_costs(dense(dtype=torch.float64), [ids])
    in_parts = mixdepth.layer_costs(dense(dtype=torch.float64), [ids[:4], ids[4:]])
    assert in_parts == pytest.approx(at_once, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 8}, "'model.layers.4.input_layernorm.weight' is missing"),
        ({"intermediate_size": 32}, "has another shape"),
        ({"num_attention_heads": 3}, "cannot be loaded (StrictDataclass"),
        ({"dtype": "float99"}, "cannot be loaded (AttributeError: "),
        ({"model_type": "foo"}, "cannot be loaded (The checkpoint you are trying to load has model type `foo`"),
        ({"model_type": "foo", "auto_map": {"AutoConfig": "theirs.C"}}, "it brings code of its own, which is not run"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(change, sentence, pretrained, tmp_path):
    """A model with some random weights is not a pretrained model, and code of others is never run."""
    shutil.copytree(pretrained, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**config, **change}))
    mark = tmp_path / "was_run"
    (tmp_path / "theirs/theirs.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    process = call("convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "mod"))
    assert process.returncode == 2
    assert sentence in process.stderr
    assert "Traceback" not in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1
    assert not mark.exists()


def test_generation_settings_that_cannot_be_saved_do_not_cost_the_model(pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.5, "eos_token_id": 0}'
    )
    process = call("convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "mod"))
    assert process.returncode == 0, process.stderr
    assert "contradict each other: only its special tokens are kept" in process.stderr
    assert json.loads((tmp_path / "mod/generation_config.json").read_text())["eos_token_id"] == 0


def test_a_card_tells_the_first_original_and_its_licence(pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "theirs")
    (tmp_path / "theirs/README.md").write_text("---\nlicense: mit\nbase_model:\n- another/first\n---\n# theirs\n")
    mixdepth.convert(tmp_path / "theirs", tmp_path / "mod", UNIT)
    mixdepth.convert(str(tmp_path / "mod"), tmp_path / "plain")
    for name in ("mod", "plain"):
        card = (tmp_path / name / "README.md").read_text()
        assert "license: mit" in card
        assert "base_model: another/first" in card
    (tmp_path / "theirs/README.md").write_text("---\n: [\n---\nno card at all")
    mixdepth.convert(tmp_path / "theirs", tmp_path / "other", UNIT)
    assert "made from theirs" in (tmp_path / "other/README.md").read_text()


def test_a_loss_that_is_no_number_measures_nothing(pretrained, tmp_path):
    model = dense()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the loss of the model on this text is not a number"):
        mixdepth.layer_costs(model, [token_ids()])


def test_a_folder_from_before_there_were_thresholds_is_loaded(tmp_path):
    model = mixdepth.route(dense(vocab_size=256), capacity=0.5)
    model.save_pretrained(tmp_path / "old")
    byte_tokenizer().save_pretrained(tmp_path / "old")
    file = tmp_path / "old/model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(".threshold")}
    save_file(kept, file, metadata={"format": "pt"})
    loaded = mixdepth.load(str(tmp_path / "old")).model
    assert all(router.threshold == 0 for router in loaded.depth_routers)
    assert torch.equal(loaded(token_ids()).logits, model.eval()(token_ids()).logits)
