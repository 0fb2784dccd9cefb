"""Bad input: each is answered in one sentence, before anything is changed."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import dense, routed, tiny_config, token_ids
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaForSequenceClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mixdepth
from mixdepth import DepthConfig


def refusals():
    tiny = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 9}
    bert = BertConfig(num_attention_heads=2, **tiny)
    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=9)
    mamba = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=9)
    yield T5ForConditionalGeneration(t5), "T5ForConditionalGeneration is an encoder-decoder"
    yield BertModel(bert), "BertModel .*'bert'.* cannot be routed: an encoder"
    yield MambaForCausalLM(mamba), "MambaForCausalLM .* cannot be routed: its layers carry a state"
    yield LlamaModel(tiny_config("llama")), "not a causal language model: load the model as LlamaForCausalLM"
    yield LlamaForSequenceClassification(tiny_config("llama")), "load the model as LlamaForCausalLM"
    yield routed(), "routed already: change its capacity with mixdepth.set_capacity"
    yield torch.nn.Linear(2, 2), "Linear is not a transformers model: .* mixdepth.Routed"
    yield dense("gpt2", add_cross_attention=True), "attends to an encoder"
    quantised = dense()
    quantised.quantization_method = type("Method", (), {"value": "gptq"})
    yield quantised, "is quantised by 'gptq'"
    flash = dense()
    flash.config._attn_implementation_internal = "flash_attention_2"
    yield flash, "attn_implementation='flash_attention_2' cannot take the masks"


@pytest.mark.parametrize("case", range(10))
def test_a_model_that_cannot_be_routed_is_refused_by_name_and_left_alone(case):
    model, message = list(refusals())[case]
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        mixdepth.route(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    "settings", [{"every": 5}, {"layers": (0, 4)}, {"capacity": (0.5,)}, {"first": 4}, {"capacity": 0}]
)
def test_settings_that_do_not_fit_the_model_leave_it_alone(settings):
    model = dense()
    keys = set(model.state_dict())
    with pytest.raises(ValueError, match=next(iter(settings))):
        mixdepth.route(model, **settings)
    assert set(model.state_dict()) == keys
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.model_type == "llama"


def test_a_config_and_settings_together_are_refused():
    with pytest.raises(ValueError, match="not both: every"):
        mixdepth.route(dense(), DepthConfig(), every=2)


@pytest.fixture
def folder(tmp_path):
    routed(dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_a_routed_folder_does_not_load_without_mixdepth(folder):
    code = f"""
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(folder)!r})
except ValueError as error:
    assert "mixdepth_llama" in str(error)
    import mixdepth
    print(type(AutoModelForCausalLM.from_pretrained({str(folder)!r})).__name__)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "MixdepthLlamaForCausalLM\n"


def test_a_truncated_weights_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"a weights file in '{folder}' is damaged"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_missing_router_key_is_named(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.depth_router.projection.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 routing weights in .* are missing, such as model\.layers\.2\.depth_router"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": "aux_loss"}, "12 routing weights in .* are unexpected"),
        ({"layers": [0]}, "12 routing weights in .* are unexpected"),
        ({"causal": None}, "causal=None has no meaning for a language model"),
        ({"version": 99}, "format version 99, this mixdepth reads up to 3"),
        ({"layers": [0, 2, 77]}, "layers must be below the model's 4 layers, not 77"),
        ({"capacity": 3}, "capacity must be a fraction"),
        ({"surprise": 1}, "unknown routing setting 'surprise'=1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(folder, change, message):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["depth"].update(change)
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_config_without_routing_settings_is_refused(folder):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["depth"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="depth"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_unknown_tensor_argument_is_refused_rather_than_misrouted():
    with pytest.raises(ValueError, match="layer argument 'strange'"):
        routed()(token_ids(), strange=torch.zeros(2, 20))


def test_a_model_that_is_dispatched_over_devices_is_refused():
    from accelerate import cpu_offload

    model = dense()
    cpu_offload(model)
    with pytest.raises(ValueError, match="route it first, then dispatch it"):
        mixdepth.route(model)


def test_a_mask_for_each_head_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 4, 20, 20\) cannot be routed"):
        routed()(token_ids(), attention_mask=torch.ones(2, 4, 20, 20, dtype=torch.bool))


def test_a_cache_from_a_training_pass_of_the_base_model_cannot_be_continued():
    model = routed().train()
    cache = model.model(token_ids()).past_key_values
    with pytest.raises(ValueError, match="made in training"):
        model.eval()(token_ids(), past_key_values=cache)


def test_a_cache_of_another_batch_is_refused():
    model = routed()
    cache = model(token_ids(3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 3 rows, the batch has 2"):
        model(token_ids(2), past_key_values=cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixdepth.route(dense(), 0.125), "must be a DepthConfig or given by name"),
        (lambda: mixdepth.route(dense(), capacty=0.5), "no setting 'capacty'; the settings are scheme, capacity"),
        (lambda: mixdepth.set_capacity(dense(), 0.5), "LlamaForCausalLM is not routed: call mixdepth.route"),
        (lambda: mixdepth.route(dense("opt", layerdrop=0.5)), "layerdrop=0.5"),
    ],
)
def test_a_wrong_call_is_answered_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
