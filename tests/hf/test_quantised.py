"""Quantised models (bitsandbytes, on the CPU) are routed as they are, and their routers stay in full precision."""

import pytest
import torch
from tiny import dense, routed, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import mixdepth
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.router import RouterLinear

BITS = {
    "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "8bit": BitsAndBytesConfig(load_in_8bit=True),
}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""The kernels take blocks of 64 weights."""
every_width = pytest.mark.parametrize("bits", BITS)


@pytest.fixture
def folder(tmp_path):
    dense(vocab_size=256, **WIDE).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def is_full_precision(model):
    linear = [module for router in model.depth_routers for module in router.modules() if isinstance(module, nn.Linear)]
    return linear and all(type(m) is RouterLinear and m.weight.dtype == torch.float32 for m in linear)


@every_width
def test_a_quantised_model_is_routed_without_a_change_and_comes_back(bits, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits])
    ids = token_ids()
    expected = model(ids).logits
    flops = mixdepth.count_flops(model, 20).total
    assert flops == mixdepth.count_flops(dense(vocab_size=256, **WIDE), 20).total  # packed weights do the same work
    model = mixdepth.route(model, capacity=1.0, gate="unit", init_std=0.0, router_input="normed")
    assert is_full_precision(model)
    assert torch.equal(model(ids).logits, expected)
    plain = mixdepth.unroute(model)
    assert torch.equal(plain(ids).logits, expected)


def test_a_quantised_folder_is_not_converted(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS["8bit"]).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    sentence = "is quantised: start from the original, and quantise the result as it is loaded"
    with pytest.raises(ValueError, match=sentence):
        mixdepth.convert(str(tmp_path / "small"), tmp_path / "mod", mixdepth.DepthConfig(gate="unit"))
    assert not (tmp_path / "mod").exists()


@every_width
def test_a_quantised_routed_model_samples_and_trains_its_routers(bits, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits])
    model = mixdepth.route(model, capacity=0.5, gate="unit", router_input="normed", layers=(1, 2))
    ids = token_ids()
    out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    again = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(out, again)
    model.train()(ids, labels=ids).loss.backward()
    assert all(router.projection.weight.grad.abs().sum() > 0 for router in model.depth_routers)


@every_width
def test_a_routed_folder_is_quantised_as_it_is_loaded_but_for_its_routers(bits, tmp_path):
    model = routed(dense(**WIDE), torch.float32, gate="unit")
    model.save_pretrained(tmp_path / "mod")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mod", quantization_config=BITS[bits])
    assert loaded.is_quantized
    assert is_full_precision(loaded)
    for router, expected in zip(loaded.depth_routers, model.depth_routers, strict=True):
        assert torch.equal(router.projection.weight, expected.projection.weight)
    loaded.save_pretrained(tmp_path / "quantised")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    assert is_full_precision(again)
    ids = token_ids()
    assert torch.equal(again(ids).logits, loaded(ids).logits)
