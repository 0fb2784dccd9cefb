"""Law 1: At capacity 1 with weight 1, a routed model is the model itself."""

import contextlib

import pytest
import torch
from tiny import NUM_LAYERS, dense, routed, token_ids
from variants import ALL_VARIANTS, assert_close, every_case, left_padded, precision

import mixdepth
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.routes import Route, WholeRoute


def dense_and_routed(architecture, variant, dtype):
    """A dense model, and the same routed at capacity 1 with weight 1. Where no dense model has such experts, it is
    the model in which the experts alone are routed."""
    settings = {**ALL_VARIANTS[variant], "capacity": 1.0, "gate": "one", "layers": None, "every": 1}
    model = dense(architecture, dtype)
    if settings.get("experts") == "expert_choice" or {"num_noop_experts", "expert_capacity"} & settings.keys():
        kept = ("experts", "expert_capacity", "num_noop_experts")
        reference = routed(model, dtype, layers=(), **{name: settings[name] for name in kept if name in settings})
    else:
        reference = model
    model_routed = routed(model, dtype, **settings)
    model_routed.load_state_dict(reference.state_dict(), strict=False)  # no-op experts and thresholds
    return reference, model_routed


def counting(blend, blends):
    return lambda self, x, y: blends.append(1) or blend(self, x, y)


def lookahead_if_routed(model):
    return mixdepth.lookahead(model) if isinstance(model, RoutedCausalLM) else contextlib.nullcontext()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@every_case
def test_full_capacity_at_weight_one_is_the_model_itself_to_the_bit(architecture, variant, dtype, monkeypatch):
    model, model_routed = dense_and_routed(architecture, variant, dtype)
    blends = []
    for kind in (Route, WholeRoute):
        monkeypatch.setattr(kind, "blend", counting(kind.blend, blends))
    ids = token_ids()
    for training in (False, True):
        torch.manual_seed(0)  # PhiMoE draws its experts in training
        expected = model.train(training)(ids).logits
        torch.manual_seed(0)
        blends.clear()
        assert torch.equal(model_routed.train(training)(ids).logits, expected)
        assert len(blends) == NUM_LAYERS  # it took the way of every other capacity
    with mixdepth.lookahead(model_routed.eval()), lookahead_if_routed(model.eval()):
        assert torch.equal(model_routed(ids).logits, model(ids).logits)


@every_case
def test_full_capacity_at_weight_one_is_the_model_itself_behind_padding(architecture, variant):
    dtype, tolerance = precision(architecture)
    model, model_routed = dense_and_routed(architecture, variant, dtype)
    ids, mask = left_padded()
    expected = model(ids, attention_mask=mask).logits[mask == 1]
    assert_close(model_routed(ids, attention_mask=mask).logits[mask == 1], expected, tolerance)


@every_case
def test_unroute_gives_the_plain_model_back(architecture, variant):
    plain = dense(architecture)
    model = routed(plain, torch.float32, **ALL_VARIANTS[variant])
    back = mixdepth.unroute(model)
    assert type(back) is type(plain)
    assert back.config.to_dict() == {**plain.config.to_dict(), "architectures": [type(plain).__name__]}
    assert list(back.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in back.modules()] == [type(module) for module in plain.modules()]
    assert (back._no_split_modules, back._keep_in_fp32_modules_strict) == (
        plain._no_split_modules,
        plain._keep_in_fp32_modules_strict,
    )
    assert (back._keep_in_fp32_modules, back.loss_type) == (plain._keep_in_fp32_modules, plain.loss_type)
    ids = token_ids()
    assert torch.equal(back(ids).logits, plain(ids).logits)
