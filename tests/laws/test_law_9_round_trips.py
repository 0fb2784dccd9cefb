"""Law 9: A saved model comes back to the bit."""

import pytest
import torch
from tiny import dense, routed, token_ids
from transformers import AutoModelForCausalLM
from variants import ALL_VARIANTS, every_case


def checkpoint_keys(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@every_case
def test_a_saved_model_comes_back_to_the_bit_under_the_dense_models_key_names(architecture, variant, tmp_path):
    model = routed(architecture, torch.float32, **ALL_VARIANTS[variant])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.set_experts_implementation("eager")
    assert type(loaded) is type(model)
    assert loaded.depth_config == model.depth_config
    for (name, parameter), (name_0, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert name == name_0
        assert torch.equal(parameter, expected)
    ids = token_ids()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    dense_model = dense(architecture)
    with pytest.raises(Exception, match="routed: import mixdepth and load with AutoModelForCausalLM"):
        type(dense_model).from_pretrained(tmp_path)
    dense_model.save_pretrained(tmp_path / "dense")
    names, names_0 = checkpoint_keys(tmp_path), checkpoint_keys(tmp_path / "dense")
    assert names_0 <= names
    assert all(".depth_router." in name for name in names - names_0)
