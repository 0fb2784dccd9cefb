"""Law 9: a saved model comes back to the bit. That a killed run does too is in runs/test_resume.py."""

import torch
from safetensors import safe_open
from tiny import dense, routed, token_ids
from transformers import AutoModelForCausalLM
from variants import ALL_VARIANTS, every_case


@every_case
def test_a_saved_model_comes_back_to_the_bit(architecture, variant, tmp_path):
    model = routed(architecture, torch.float32, **ALL_VARIANTS[variant])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.set_experts_implementation("eager")
    assert type(loaded) is type(model)
    assert loaded.depth_config == model.depth_config
    expected = dict(model.named_parameters())
    assert [name for name, _ in loaded.named_parameters()] == list(expected)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    ids = token_ids()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@every_case
def test_a_routed_checkpoint_has_the_dense_models_keys_and_those_of_routers(architecture, variant, tmp_path):
    routed(architecture, torch.float32, **ALL_VARIANTS[variant]).save_pretrained(tmp_path / "routed")
    dense(architecture).save_pretrained(tmp_path / "dense")
    keys = checkpoint_keys(tmp_path / "routed")
    dense_keys = checkpoint_keys(tmp_path / "dense")
    assert dense_keys <= keys
    assert all(".depth_router." in key for key in keys - dense_keys)


def checkpoint_keys(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())
