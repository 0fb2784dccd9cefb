"""What is saved and loaded computes the same to the bit, whatever the way of saving, loading and casting."""

import pytest
import torch
from promised import DENSE, RULES, every_model, logits_of, over, promised
from transformers import AutoModelForCausalLM


@every_model
def test_a_model_is_loaded_by_its_own_class_and_by_the_auto_class(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    expected = logits_of(model)
    for kind in (type(model), AutoModelForCausalLM):
        assert torch.equal(logits_of(kind.from_pretrained(tmp_path)), expected)
        assert torch.equal(logits_of(kind.from_pretrained(str(tmp_path))), expected)


@every_model
def test_the_folder_may_be_given_by_its_keyword(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    for kind in (type(model), AutoModelForCausalLM):
        loaded = kind.from_pretrained(pretrained_model_name_or_path=tmp_path)
        assert torch.equal(logits_of(loaded), logits_of(model))


@every_model
def test_loading_tells_that_no_weight_was_missing_or_left_over(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))


@every_model
def test_a_model_is_saved_in_several_shards(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(type(model).from_pretrained(tmp_path)), logits_of(model))


@every_model
def test_weights_are_saved_under_the_name_of_a_variant(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path, variant="second")
    assert (tmp_path / "model.second.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    loaded = type(model).from_pretrained(tmp_path, variant="second")
    assert torch.equal(logits_of(loaded), logits_of(model))


@every_model
def test_a_model_is_loaded_from_a_subfolder(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path / "deeper/still")
    for kind in (type(model), AutoModelForCausalLM):
        loaded = kind.from_pretrained(tmp_path, subfolder="deeper/still")
        assert torch.equal(logits_of(loaded), logits_of(model))


@every_model
def test_weights_that_the_user_hands_over_are_saved_in_place_of_the_models_own(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    expected = logits_of(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path, state_dict=weights)
    assert torch.equal(logits_of(type(model).from_pretrained(tmp_path)), expected)


@every_model
def test_a_model_is_made_from_a_config_and_weights_without_a_folder(architecture, variant):
    model = promised(architecture, variant)
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(logits_of(loaded), logits_of(model))


@every_model
def test_weights_are_taken_over_in_place_of_those_of_a_new_model(architecture, variant):
    model = promised(architecture, variant)
    for assign in (False, True):
        other = AutoModelForCausalLM.from_config(model.config)
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(logits_of(other), logits_of(model))


@every_model
def test_saving_what_was_loaded_writes_the_same_files(architecture, variant, tmp_path):
    promised(architecture, variant).save_pretrained(tmp_path / "first")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
both_halves = pytest.mark.parametrize("half", HALVES)


def cast(model, dtype):
    """Cast the model, but not what no file holds: rotary tables, say, which are made again in float32 at every load."""
    stored = model.state_dict()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in stored}
    model.to(dtype)
    for name, buffer in kept.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer)
    return model


@both_halves
@every_model
def test_a_model_that_was_cast_is_loaded_as_it_was_saved(architecture, variant, half, tmp_path):
    model = cast(promised(architecture, variant), HALVES[half])
    model.save_pretrained(tmp_path)
    expected = logits_of(model)
    for dtype in ("auto", half, HALVES[half]):
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
        assert loaded.dtype == HALVES[half]
        assert torch.equal(logits_of(loaded), expected)


@both_halves
@every_model
def test_the_dtype_of_every_tensor_survives_saving_and_loading(architecture, variant, half, tmp_path):
    model = promised(architecture, variant).to(HALVES[half])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype="auto").state_dict()
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name].nan_to_num(), tensor.nan_to_num()), name


@both_halves
@every_model
def test_loading_in_half_precision_is_loading_and_casting(architecture, variant, half, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=HALVES[half])
    assert loaded.dtype == HALVES[half]
    assert torch.equal(logits_of(loaded), logits_of(cast(model, HALVES[half])))


@both_halves
@every_model
def test_a_model_in_half_precision_is_loaded_in_float32_as_if_cast_back(architecture, variant, half, tmp_path):
    model = cast(promised(architecture, variant), HALVES[half])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits_of(loaded), logits_of(cast(model, torch.float32)))


@over([("llama", variant) for variant in (DENSE, *RULES)] + [("mixtral", "experts-expert_choice")])
def test_the_methods_that_cast_give_what_is_saved_and_loaded(architecture, variant, tmp_path):
    """As a user writes it, on a model whose rotary tables are exact in half precision."""
    for name in ("bfloat16", "half"):
        model = promised(architecture, variant)
        for buffer_name, buffer in model.named_buffers():
            if "inv_freq" in buffer_name:
                buffer.fill_(0.5)
        model = getattr(model, name)()
        model.save_pretrained(tmp_path / name)
        loaded = type(model).from_pretrained(tmp_path / name, dtype="auto")
        for buffer_name, buffer in loaded.named_buffers():
            if "inv_freq" in buffer_name:
                buffer.fill_(0.5)
        assert torch.equal(logits_of(loaded), logits_of(model))
