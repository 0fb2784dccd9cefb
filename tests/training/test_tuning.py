"""Tuning: down in capacity from the pretrained model's own loss, by routers, adapters or all weights."""

import json

import peft
import pytest
import torch
from corpora import call, documents, flags
from safetensors.torch import load_file
from tiny import dense, routed, token_ids
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import mixdepth
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.losses import divergence
from mixdepth.modes import choosers

TUNING = {"context": 32, "batch_size": 4, "log_every": 1, "eval_windows": 8, "save_every": 1000}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, corpus):
    """A small model that was really trained."""
    folder = tmp_path_factory.mktemp("pretrained") / "dense"
    shape = {"layers": 4, "width": 32, "learning_rate": 4e-3}
    mixdepth.train(folder, corpus=corpus, steps=120, depth=None, **shape, **TUNING)
    return str(folder)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, pretrained):
    folder = tmp_path_factory.mktemp("converted") / "mod"
    mixdepth.convert(pretrained, folder, mixdepth.DepthConfig(capacity=0.5, gate="unit", router_input="normed"))
    return str(folder)


def loss_of(name, corpus):
    return mixdepth.evaluate_runs([name], corpus=corpus, context=32).entries[0].evaluation.loss


@pytest.mark.parametrize("method", ["router", "lora", "full"])
def test_tuning_starts_at_the_pretrained_models_loss_and_ends_at_the_target(
    method, pretrained, converted, corpus, tmp_path
):
    run = mixdepth.tune(converted, tmp_path / "tuned", corpus=corpus, steps=32, method=method, **TUNING)
    first, *_, last = [line for line in run.metrics if "loss" in line]
    assert first["layers"]["target"] == [1.0, 1.0]
    assert last["layers"]["target"] == [0.5, 0.5]
    assert first["layers"]["capacity"] == [1.0, 1.0]
    plain = mixdepth.tune(pretrained, tmp_path / "plain", corpus=corpus, steps=1, **TUNING)
    assert first["lm_loss"] == plain.metrics[0]["loss"]  # the same windows, the same weights: to the bit
    tuned = AutoModelForCausalLM.from_pretrained(run.folder)
    assert tuned.depth_config.capacity == 0.5
    before, after = (load_file(f"{name}/model.safetensors") for name in (converted, run.folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("depth_router.projection" in name for name in changed)
    trunk = {name for name in changed if "depth_router" not in name}
    assert bool(trunk) == (method != "router")
    if method == "lora":
        assert all("_proj" in name for name in trunk)
        assert (run.folder / "adapter/adapter_model.safetensors").exists()
    card = (run.folder / "README.md").read_text()
    assert f"| method | {method} |" in card
    assert "validation_loss" in card


def test_an_adapter_holds_the_routers_and_merges_into_the_tuned_model(converted, corpus, tmp_path):
    run = mixdepth.tune(converted, tmp_path / "tuned", corpus=corpus, steps=8, method="lora", **TUNING)
    base = AutoModelForCausalLM.from_pretrained(converted)
    mixdepth.set_capacity(base, 0.5)
    adapted = peft.PeftModel.from_pretrained(base, run.folder / "adapter").eval()
    assert "bring it down with `mixdepth.set_capacity`" in (run.folder / "adapter/README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(run.folder).eval()
    ids = token_ids(2, 24)
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)
    unloaded = adapted.merge_and_unload()
    assert torch.equal(unloaded(ids).logits, merged(ids).logits)


def test_a_tuned_run_resumes_to_the_bit(converted, corpus, tmp_path):
    settings = {**TUNING, "corpus": corpus, "steps": 12, "save_every": 4, "method": "lora", "distill": 0.5}
    settings["capacity_steps"] = 0.9  # it is still falling when the run is resumed
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    process = call("tune", converted, *flags(settings), "--out", str(whole))
    assert process.returncode == 0, process.stderr
    mixdepth.tune(converted, halted, **settings)
    for name in ("result.json", "model.safetensors"):  # as if it had been stopped after its second checkpoint
        (halted / name).unlink()
    for path in halted.glob("checkpoint-12/*"):
        path.unlink() if path.is_file() else None
    process = call("tune", converted, *flags(settings), "--out", str(halted))
    assert process.returncode == 0, process.stderr
    assert "resuming from checkpoint-8" in process.stderr
    assert (halted / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (halted / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_distillation_pulls_towards_the_pretrained_model(pretrained, converted, corpus, tmp_path):
    run = mixdepth.tune(converted, tmp_path / "tuned", corpus=corpus, steps=24, distill=1.0, **TUNING)
    first, *_, last = [line for line in run.metrics if "loss" in line]
    assert first["distill_loss"] == 0  # it still is the pretrained model
    assert last["distill_loss"] > 0
    # the language model's own loss, about 5 nats, is added and taken off again in float32
    assert last["loss"] == pytest.approx(last["distill_loss"] + 0.01 * last["predictor_loss"], abs=2e-6)
    flops = mixdepth.tune(converted, tmp_path / "alone", corpus=corpus, steps=24, **TUNING).result["flops"]
    teacher = mixdepth.count_flops(AutoModelForCausalLM.from_pretrained(pretrained), 32).total
    assert run.result["flops"] == flops + 24 * 4 * teacher


def test_divergence_is_torchs_own():
    logits, predicted = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, -100, -100], [0, -100, 2, 3, 4]])
    used = labels[:, 1:] != -100
    student, teacher = (x[:, :-1][used].log_softmax(-1) for x in (logits.float(), predicted.float()))
    expected = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="sum")
    torch.testing.assert_close(divergence(logits, predicted, labels), expected)
    assert divergence(logits, logits, labels) == 0


def test_a_budget_of_flops_is_spent_while_the_capacity_falls_over_a_share_of_the_steps(converted, corpus, tmp_path):
    run = mixdepth.tune(converted, tmp_path / "tuned", corpus=corpus, flops=2e9, capacity_steps=0.25, **TUNING)
    spent, steps = run.result["flops"], run.about["steps"]
    one_more = mixdepth.tune(
        converted, tmp_path / "more", corpus=corpus, steps=steps + 1, capacity_steps=0.25, **TUNING
    )
    assert spent <= 2e9 < one_more.result["flops"]
    targets = [line["layers"]["target"][0] for line in run.metrics if "loss" in line]
    assert targets[0] == 1
    assert targets == sorted(targets, reverse=True)
    assert sum(target > 0.5 for target in targets) == round(0.25 * steps)


def test_a_model_that_has_come_down_goes_on_from_there(converted, corpus, tmp_path):
    first = mixdepth.tune(converted, tmp_path / "first", corpus=corpus, steps=4, **TUNING)
    second = mixdepth.tune(first.folder, tmp_path / "second", corpus=corpus, steps=32, capacity=0.25, **TUNING)
    targets = [line["layers"]["target"][0] for line in second.metrics if "loss" in line]
    assert targets[0] == 0.5
    assert targets[-1] == 0.25
    with pytest.raises(ValueError, match="distill needs the pretrained model itself"):
        mixdepth.tune(first.folder, tmp_path / "third", corpus=corpus, steps=4, distill=0.5, **TUNING)
    lists = mixdepth.tune(first.folder, tmp_path / "lists", corpus=corpus, steps=32, capacity=(0.5, 0.25), **TUNING)
    targets = [line["layers"]["target"] for line in lists.metrics if "loss" in line]
    assert targets[0] == [0.5, 0.5]
    assert targets[-1] == [0.5, 0.25]
    with pytest.raises(ValueError, match=r"has come down to capacity 0.25 already"):
        mixdepth.tune(lists.folder, tmp_path / "x", corpus=corpus, steps=4, distill=0.5, capacity=0.25, **TUNING)


def test_an_unfinished_run_of_adapters_can_be_used(converted, corpus, tmp_path, capsys):
    settings = {
        **TUNING,
        "corpus": corpus,
        "steps": 8,
        "save_every": 4,
        "method": "lora",
        "capacity_steps": 0,
        "calibrate": 0,
    }
    run = mixdepth.tune(converted, tmp_path / "tuned", **settings)
    expected = mixdepth.load(str(run.folder)).model(token_ids()).logits
    (run.folder / "result.json").unlink()
    loaded = mixdepth.load(str(run.folder))
    assert loaded.note == f"{run.folder} is not finished: this is checkpoint-8"
    torch.testing.assert_close(loaded.model(token_ids()).logits, expected)
    mixdepth.convert(str(run.folder / "checkpoint-4"), tmp_path / "plain")
    mixdepth.convert(str(run.folder), tmp_path / "plain-8")
    assert "is not finished: this is checkpoint-8" in capsys.readouterr().err


def test_a_finished_run_needs_its_start_no_more(pretrained, corpus, tmp_path):
    mixdepth.convert(pretrained, tmp_path / "mod", mixdepth.DepthConfig(capacity=0.5, gate="unit"))
    run = mixdepth.tune(tmp_path / "mod", tmp_path / "tuned", corpus=corpus, steps=2, **TUNING)
    again = mixdepth.tune(tmp_path / "mod", tmp_path / "tuned", corpus=corpus, steps=2, **TUNING)
    assert again.result == run.result
    (tmp_path / "mod").rename(tmp_path / "moved")
    found = mixdepth.evaluate_runs([pretrained, str(run.folder)])
    assert [entry.evaluation.loss > 0 for entry in found.entries] == [True, True]
    (tmp_path / "moved/conversion.json").unlink()
    with pytest.raises(ValueError, match=r"is routed at capacity 1, and no conversion.json says where it is to come"):
        mixdepth.tune(tmp_path / "moved", tmp_path / "other", corpus=corpus, steps=2, **TUNING)


def test_tuning_ends_with_thresholds_at_the_share_that_was_meant(pretrained, corpus, tmp_path):
    """In a few steps a running threshold does not get there by itself."""
    depth = mixdepth.DepthConfig(capacity=0.25, gate="unit", router_input="normed", causal="threshold")
    mixdepth.convert(pretrained, tmp_path / "mod", depth)
    text = list(mixdepth.load_corpus(corpus, pretrained).train.windows(32).spread(64).batches(16))
    off = {}
    for windows in (0, 64):
        run = mixdepth.tune(
            tmp_path / "mod", tmp_path / f"tuned-{windows}", corpus=corpus, steps=6, calibrate=windows, **TUNING
        )
        found = mixdepth.evaluate(mixdepth.load(str(run.folder)).model, text)
        off[windows] = max(abs(layer.capacity - 0.25) for layer in found.layers.values())
    assert off[64] < 0.001
    assert off[0] > 0.01


def test_a_run_of_a_version_that_knew_fewer_settings_goes_on(corpus, tmp_path):
    settings = {**TUNING, "corpus": corpus, "steps": 2, "layers": 2, "width": 32, "learning_rate": 1e-3}
    run = mixdepth.train(tmp_path / "run", **settings)
    about = json.loads((run.folder / "run.json").read_text())
    for name in ("calibrate", "method", "distill"):
        del about["settings"][name]
    del about["settings"]["depth"]["router_input"]
    about["settings"]["depth"]["version"] = 2
    (run.folder / "run.json").write_text(json.dumps(about))
    assert mixdepth.train(tmp_path / "run", **settings).result == run.result


def test_the_chat_template_comes_along(converted, corpus, tmp_path):
    """Though another model with the same tokens was there first, and its tokenizer is in the cache."""
    import shutil

    from transformers import AutoTokenizer

    mixdepth.tune(converted, tmp_path / "first", corpus=corpus, steps=1, **TUNING)
    shutil.copytree(converted, tmp_path / "chatty")
    (tmp_path / "chatty/chat_template.jinja").write_text("{{ messages }}")
    run = mixdepth.tune(tmp_path / "chatty", tmp_path / "second", corpus=corpus, steps=1, **TUNING)
    assert AutoTokenizer.from_pretrained(run.folder).chat_template == "{{ messages }}"


def test_distillation_does_not_depend_on_micro_batches(converted, corpus, tmp_path):
    settings = {**TUNING, "corpus": corpus, "steps": 3, "distill": 0.5}
    whole = mixdepth.tune(converted, tmp_path / "whole", **settings)
    parts = mixdepth.tune(converted, tmp_path / "parts", micro_batch_size=1, **settings)
    for step, (one, other) in enumerate(zip(whole.metrics, parts.metrics, strict=True)):
        for name in {"loss", "lm_loss", "distill_loss", "grad_norm"} & one.keys():
            # Routers that start at 0 give tokens nearly equal scores: after a step others may be chosen.
            assert other[name] == pytest.approx(one[name], rel=2e-2 if step else 1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": "head"}, "method must be one of full, lora, router, not 'head'"),
        ({"distill": 2}, "distill must be a share of at most 1, not 2"),
        ({"layers": 3}, "a pretrained model has its own layers: leave out layers=3"),
        ({"tokenizer": "bpe:300"}, "a pretrained model has its own tokenizer"),
        ({"depth": None}, "a model brings its routing along"),
        ({"lora_rank": 0}, "lora_rank must be a whole number of at least 1, not 0"),
        ({"capacity_steps": 1.5}, "capacity_steps must be a whole number, or a share below 1, not 1.5"),
        ({"engine": "fsdp", "method": "lora"}, "method='lora' cannot be sharded"),
        ({"context": 4096}, "context=4096 is beyond the 32 positions of .*: choose a shorter one"),
        ({"capacity": 2.0}, r"capacity must be a fraction in \(0, 1\], not 2.0"),
    ],
)
def test_what_cannot_be_is_refused(settings, sentence, converted, corpus, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        mixdepth.tune(converted, tmp_path / "tuned", corpus=corpus, steps=2, **{**TUNING, **settings})


def test_what_a_plain_or_fresh_model_cannot_have_is_refused(pretrained, corpus, tmp_path):
    for settings, sentence in (
        ({"method": "router"}, "method='router' trains routers, and a dense model has none"),
        ({"capacity": 0.5}, "capacity=0.5 has no meaning for .* which is not routed: convert it first"),
    ):
        with pytest.raises(ValueError, match=sentence):
            mixdepth.tune(pretrained, tmp_path / "tuned", corpus=corpus, steps=2, **TUNING, **settings)
    with pytest.raises(ValueError, match="method='lora' needs a pretrained model: give one by model"):
        mixdepth.train(tmp_path / "tuned", corpus=corpus, steps=2, method="lora")
    with pytest.raises(ValueError, match=r"there is no run .*none' and no model's folder"):
        mixdepth.tune(tmp_path / "none", tmp_path / "tuned", corpus=corpus, steps=2)
    with pytest.raises(ValueError, match="gate='raw' changes what a pretrained model computes"):
        mixdepth.train(tmp_path / "tuned", corpus=corpus, steps=2, model=pretrained, **TUNING)


def test_a_plain_model_is_tuned_by_adapters_too(pretrained, corpus, tmp_path):
    run = mixdepth.tune(pretrained, tmp_path / "tuned", corpus=corpus, steps=4, method="lora", **TUNING)
    assert type(AutoModelForCausalLM.from_pretrained(run.folder)).__name__ == "LlamaForCausalLM"


# --- peft and trl, as their users call them ---


def adapted(model, **settings):
    wrapped = peft.get_peft_model(model, mixdepth.lora_config(model, rank=4, **settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_peft_trains_saves_and_merges_a_routed_model(architecture, tmp_path):
    model = routed(architecture, causal="threshold", gate="unit")
    wrapped = adapted(model)
    assert len(choosers(wrapped)) == len(model.depth_routers) == 3  # peft's copies, and not the originals too
    before = [router.projection.weight.clone() for router in choosers(wrapped)]
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    ids = token_ids(2, 24)
    wrapped.train()
    wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    mixdepth.update_routers(wrapped)
    assert all(not torch.equal(a, r.projection.weight) for a, r in zip(before, choosers(wrapped), strict=True))
    wrapped.eval()
    expected = wrapped(input_ids=ids).logits
    wrapped.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(routed(architecture, causal="threshold", gate="unit"), tmp_path).eval()
    assert torch.equal(fresh(input_ids=ids).logits, expected)
    merged = fresh.merge_and_unload()
    assert type(merged) is type(model)
    assert len(merged.depth_routers) == 3
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-10)


def test_capacity_and_look_ahead_reach_the_routers_that_peft_trains():
    model = routed(gate="unit")
    wrapped = adapted(model)
    mixdepth.set_capacity(model, 0.25)
    assert [router.capacity for router in choosers(wrapped)] == [0.25] * 3
    ids = token_ids(2, 24)
    with mixdepth.lookahead(wrapped):
        routes = wrapped(input_ids=ids, output_routes=True).routes
    assert all(route.count.tolist() == [6, 6] for route in routes)
    mixdepth.set_capacity(wrapped, 0.25)
    found = mixdepth.evaluate(wrapped, [ids])
    assert found.layers.keys() == {0, 2, 3}
    assert found.loss != found.lookahead_loss
    with wrapped.disable_adapter():
        assert [router.capacity for router in choosers(wrapped)] == [0.25] * 3


def test_an_adapter_within_a_router_is_refused():
    model = routed(gate="unit")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="leave depth_router out of target_modules and name it in modules_to_save"):
        wrapped(input_ids=token_ids())


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
def test_trls_trainer_tunes_a_routed_model(with_adapter, tmp_path):
    from datasets import Dataset

    tokenizer = byte_tokenizer()
    model = mixdepth.route(dense(vocab_size=256), capacity=0.5, gate="unit", router_input="normed", init_std=0.0)
    rows = Dataset.from_dict({"text": [text[:60] for text in documents(16)]})
    args = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=64,
        report_to="none",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
    )
    before = [router.projection.weight.clone() for router in model.depth_routers]
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=mixdepth.lora_config(model, rank=4) if with_adapter else None,
        callbacks=[mixdepth.UpdateRouters()],
    )
    trainer.train()
    assert trainer.state.global_step == 4
    after = [router.projection.weight for router in choosers(trainer.model)]
    assert len(after) == 2
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in trainer.state.log_history if "loss" in line)
