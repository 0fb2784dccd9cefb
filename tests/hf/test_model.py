"""What a user of a routed model sees: outputs, modes, settings, files."""

import copy
import gc
import json
import pickle
import subprocess
import sys

import pytest
import torch
from oracle import Oracle
from tiny import dense, routed, tiny_config, token_ids
from transformers import (
    AutoModelForCausalLM,
)

import mixdepth
from mixdepth import DepthConfig, Route


def test_the_readmes_lines_run(tmp_path):
    ids = token_ids()
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model = mixdepth.route(model, capacity=0.125, every=2)
    out = model(ids, labels=ids)
    out.loss.backward()
    model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.model_type == "mixdepth_llama"
    assert loaded.config.architectures == ["MixdepthLlamaForCausalLM"]
    assert json.loads((tmp_path / "config.json").read_text())["depth"]["capacity"] == 0.125


def test_the_loss_holds_the_weighted_routing_losses_in_training_only():
    ids = token_ids()
    model = routed(predictor_loss_coef=0.5).train()
    out = model(ids, labels=ids)
    assert out.loss == out.lm_loss + 0.5 * out.predictor_loss == out.lm_loss + out.routing_loss
    assert out.aux_loss is None
    model = routed(causal="aux_loss", router_aux_loss_coef=0.25).train()
    out = model(ids, labels=ids)
    assert out.loss == out.lm_loss + 0.25 * out.aux_loss
    assert out.predictor_loss is None
    with mixdepth.lookahead(model.eval()):
        out = model(ids, labels=ids)
        assert out.loss == out.lm_loss
        assert out.aux_loss > 0
    out = model(ids, labels=ids)
    assert out.loss == out.lm_loss
    assert out.aux_loss is None  # without top-k there is nothing to compare with


def test_the_language_model_loss_is_the_mean_over_predicted_tokens():
    """transformers scales the loss of a class whose name it does not know by (T - 1) / T."""
    for architecture in ("llama", "gpt2"):
        model = routed(architecture)
        ids = token_ids()
        out = model(ids, labels=ids)
        expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        torch.testing.assert_close(out.loss.float(), expected)


def test_routes_come_out_one_for_each_routed_layer():
    ids = token_ids()
    model = routed()
    assert model(ids).routes is None
    routes = model(ids, output_routes=True).routes
    assert len(routes) == 3
    assert all(isinstance(route, Route) and route.logits.shape == ids.shape for route in routes)
    (first, *_) = model(ids, return_dict=False, output_routes=True)[-1]
    assert isinstance(first, Route)


def test_a_tuple_comes_out_where_a_tuple_is_asked_for():
    ids = token_ids()
    model = routed()
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert loss.ndim == 0


def test_evaluation_is_causal_unless_look_ahead_is_asked_for_by_name():
    ids = token_ids()
    model = routed()
    causal = model(ids).logits
    with mixdepth.lookahead(model):
        ahead = model(ids).logits
        assert torch.equal(ahead, model.train()(ids).logits)
        model.eval()
        with mixdepth.lookahead(model):
            pass
        assert torch.equal(model(ids).logits, ahead)  # an inner context ends without ending this one
    assert torch.equal(model(ids).logits, causal)
    assert not torch.allclose(causal, ahead)
    with pytest.raises(ValueError, match="has no routers"), mixdepth.lookahead(dense()):
        pass
    with pytest.raises(ValueError, match="given a part of the model"), mixdepth.lookahead(model.model.layers[2]):
        model(ids)


def test_the_base_model_alone_routes_by_its_mode():
    ids = token_ids()
    model = routed()
    assert torch.equal(model.lm_head(model.model(ids).last_hidden_state), model(ids).logits)
    model.train()
    assert torch.equal(model.lm_head(model.model(ids).last_hidden_state), model(ids).logits)


def test_the_capacity_can_be_changed_later_and_is_saved(tmp_path):
    ids = token_ids()
    model = routed(dtype=torch.float32)
    mixdepth.set_capacity(model, [0.1, 0.5, 1.0])
    with mixdepth.lookahead(model):
        assert [route.count[0].item() for route in model(ids, output_routes=True).routes] == [2, 10, 20]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [router.capacity for router in loaded.depth_routers] == [0.1, 0.5, 1.0]
    mixdepth.set_capacity(model, 0.25)
    assert [router.capacity for router in model.depth_routers] == [0.25] * 3
    for wrong in (0, [0.5], "half"):
        with pytest.raises(ValueError, match="capacity"):
            mixdepth.set_capacity(model, wrong)
    assert [router.capacity for router in model.depth_routers] == [0.25] * 3


def test_every_setting_is_saved_and_restored(tmp_path):
    config = DepthConfig(
        capacity=(0.3, 0.5),
        layers=(0, 2),
        gate="unit",
        init_std=0.5,
        causal="aux_loss",
        predictor_width=0.0,
        predictor_loss_coef=0.02,
        router_aux_loss_coef=0.03,
    )
    mixdepth.route(dense(), config).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).depth_config == config


def test_a_dense_checkpoint_is_routed_after_loading_with_its_weights(tmp_path):
    model = dense()
    model.save_pretrained(tmp_path)
    model_routed = mixdepth.route(
        AutoModelForCausalLM.from_pretrained(tmp_path), capacity=1.0, gate="unit", init_std=0.0
    )
    ids = token_ids()
    assert torch.equal(model_routed.eval()(ids).logits, model(ids).logits)  # it starts as the dense model


def test_the_users_config_stays_dense():
    config = tiny_config("llama")
    model = mixdepth.route(AutoModelForCausalLM.from_config(config))
    assert config.model_type == "llama"
    assert not isinstance(AutoModelForCausalLM.from_config(config), mixdepth.hf.RoutedCausalLM)
    assert isinstance(AutoModelForCausalLM.from_config(model.config), mixdepth.hf.RoutedCausalLM)
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "config"))


def test_routers_stay_in_float32_in_a_bfloat16_model(tmp_path):
    model = mixdepth.route(dense(dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for m in (model, loaded):
        assert m.lm_head.weight.dtype == torch.bfloat16
        assert {p.dtype for router in m.depth_routers for p in router.parameters()} == {torch.float32}
        assert m.train()(token_ids(), output_routes=True).routes[0].logits.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        routes = routed(dtype=torch.float32).train()(token_ids(), output_routes=True).routes
    assert routes[0].logits.dtype == torch.float32


def test_bfloat16_flips_few_decisions_between_one_pass_and_steps():
    """Rounding may put a score on either side of its threshold: 3 of 2,400 here, as docs/limits.md says."""
    flips = []
    for seed in range(5):
        model = routed(dtype=torch.bfloat16, seed=seed)
        ids = token_ids(4, 40, seed=seed)
        whole = torch.stack([route.mask for route in model(ids, output_routes=True).routes])
        cache, steps = None, []
        for column in range(40):
            out = model(ids[:, column : column + 1], past_key_values=cache, use_cache=True, output_routes=True)
            cache = out.past_key_values
            steps.append(torch.stack([route.mask for route in out.routes]))
        flips.append(torch.cat(steps, 2) != whole)
    assert torch.stack(flips).double().mean() < 0.01


def test_expert_logits_and_their_loss_keep_their_names_in_a_routed_mixture():
    ids = token_ids()
    model = routed("mixtral").train()
    out = model(ids, labels=ids, output_router_logits=True)
    assert len(out.router_logits) == 4
    coef = model.config.router_aux_loss_coef
    torch.testing.assert_close(out.loss, out.lm_loss + coef * out.aux_loss + out.routing_loss)
    out = routed("mixtral", causal="aux_loss").train()(ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(out.loss, out.lm_loss + coef * out.balance_loss + 0.01 * out.aux_loss)
    out = routed("jetmoe").train()(ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(out.loss, out.lm_loss + 0.01 * out.balance_loss + out.routing_loss)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        model(ids, attention_mask=torch.ones_like(ids), output_router_logits=True)
    with pytest.raises(ValueError, match="needs every layer to run"):
        model.eval()(ids, output_router_logits=True)
    model.config.output_router_logits = True  # in training; sampling and evaluation do without
    model.generate(ids, attention_mask=torch.ones_like(ids).tril(15).flip(1), max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_trainer_reports_the_loss_that_the_model_reports(architecture, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = routed(architecture, torch.float32)
    ids = token_ids(4, 16)
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True)
    metrics = Trainer(model, arguments, eval_dataset=rows).evaluate()
    assert metrics["eval_loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    predictions = Trainer(model, arguments).predict(rows).predictions
    assert predictions.shape == (4, 16, 61)  # logits alone


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_trainer_resumes_from_its_checkpoint(architecture, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in token_ids(12, 16).tolist()]

    def train(folder, resume=None, **settings):
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **settings,
        )
        model = routed(architecture, torch.float32)
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model.state_dict()

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_other_readers_of_a_routed_config_are_not_in_the_way(tmp_path):
    """The Trainer and tokenizers read it by the base class; what the user wrote in it comes back."""
    from transformers import AutoConfig, PreTrainedConfig

    model = routed(dtype=torch.float32)
    model.config.id2label = {0: "x"}
    model.save_pretrained(tmp_path)
    assert PreTrainedConfig.from_pretrained(tmp_path).architectures == ["MixdepthLlamaForCausalLM"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == {0: "x"}
    assert config.use_cache is True
    routed(dtype=torch.float32).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("gate", ["raw", "one"])
@pytest.mark.parametrize("causal", ["predictor", "aux_loss"])
def test_every_trained_parameter_gets_a_gradient(gate, causal):
    """Distributed training waits for all of them."""
    model = routed(dtype=torch.float32, gate=gate, causal=causal).train()
    model(token_ids(), labels=token_ids()).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_a_training_pass_without_labels_says_where_the_routing_loss_is(caplog):
    model = routed(dtype=torch.float32, predictor_loss_coef=0.5).train()
    out = model(token_ids())
    assert out.loss is None
    assert out.routing_loss == 0.5 * out.predictor_loss


def test_router_logits_of_a_model_without_experts_are_the_routers():
    ids = token_ids()
    out = routed()(ids, attention_mask=torch.ones_like(ids), output_router_logits=True, output_routes=True)
    assert [torch.equal(a, b.logits) for a, b in zip(out.router_logits, out.routes, strict=True)] == [True] * 3


def test_attention_weights_come_only_where_every_layer_runs():
    model = routed("gpt2", torch.float32)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="output_attentions needs every layer to run"):
        model(token_ids(), output_attentions=True)
    with mixdepth.lookahead(model):
        assert [a.shape[-1] for a in model(token_ids(), output_attentions=True).attentions] == [8, 20, 8, 8]


def test_custom_masks_hold_in_routed_layers():
    """A prefix that sees itself in both directions; additive masks mark padding in their own ways."""
    model = routed()
    ids = token_ids()
    allowed = torch.ones(20, 20).tril().bool()
    allowed[:6, :6] = True
    allowed = allowed.expand(2, 1, -1, -1).clone()
    allowed[0, :, :, :3] = allowed[0, :, :3] = False
    assert_same = lambda a, b: (a - b)[:, 6:].abs().max() <= 1e-10  # noqa: E731
    expected = Oracle(model)(ids, attention_mask=allowed).logits
    assert assert_same(model(ids, attention_mask=allowed, use_cache=False).logits, expected)
    for low in (-1e4, -1e9, torch.finfo(torch.float64).min):
        additive = torch.zeros(2, 1, 20, 20, dtype=torch.float64).masked_fill(~allowed, low)
        out = model(ids, attention_mask=additive, use_cache=False, output_routes=True)
        assert not out.routes[0].real[0, :3].any()
        assert assert_same(out.logits, expected)


def test_one_frozen_layer_in_evaluation_mode_does_not_change_the_mode_of_the_model():
    model = routed().train()
    model.model.layers[0].eval()
    ids = token_ids()
    assert model(ids, labels=ids).predictor_loss is not None


def test_a_forward_pass_without_a_backward_pass_leaves_nothing_behind():
    model = routed().train()
    model.gradient_checkpointing_enable()
    ids = token_ids()
    counts = []
    for _ in range(3):
        model(ids, labels=ids)
        gc.collect()
        counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[0] == counts[-1]


def test_a_routed_model_pickles_into_another_process(tmp_path):
    model = routed(dtype=torch.float32)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, model.config)))
    code = f"""
import pickle, torch
model, config = pickle.load(open({str(tmp_path / "model.pickle")!r}, "rb"))
assert type(model).__name__ == "MixdepthLlamaForCausalLM" and config.model_type == "mixdepth_llama"
print(model(torch.tensor({token_ids().tolist()})).logits.sum().item())
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) == pytest.approx(model(token_ids()).logits.sum().item(), rel=1e-4)


def test_a_copy_of_a_routed_model_is_its_own():
    model = routed()
    twin = copy.deepcopy(model)
    mixdepth.set_capacity(twin, 1.0)
    assert model.depth_routers[0].capacity == 0.4
    assert model.config.depth["capacity"] == 0.4
