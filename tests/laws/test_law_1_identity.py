"""Law 1: at capacity 1 with weight 1, a routed model is the model itself."""

import contextlib

import pytest
import torch
from tiny import NUM_LAYERS, dense, routed, token_ids
from variants import ALL_VARIANTS, assert_close, every_case, left_padded, precision

import mixdepth
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.routes import Route, WholeRoute

OF_EXPERTS = ("experts", "expert_capacity", "num_noop_experts")
ATTRIBUTES = ("_no_split_modules", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "loss_type")
"""Attributes of a model class that routing changes."""

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def dense_and_routed(architecture, variant, dtype):
    """A model, and the same model routed at capacity 1 with weight 1.

    The first is dense. But no dense model has no-op experts, full experts or experts that choose: there the first is
    a model in which the experts alone are routed.
    """
    settings = {**ALL_VARIANTS[variant], "capacity": 1.0, "gate": "one", "layers": None, "every": 1}
    model = dense(architecture, dtype)
    reference = model
    if settings.get("experts") == "expert_choice" or "num_noop_experts" in settings or "expert_capacity" in settings:
        of_experts = {name: settings[name] for name in OF_EXPERTS if name in settings}
        reference = routed(model, dtype, layers=(), **of_experts)
    model_routed = routed(model, dtype, **settings)
    model_routed.load_state_dict(reference.state_dict(), strict=False)  # no-op experts and thresholds
    return reference, model_routed


@every_dtype
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


def counting(blend, blends):
    """The method `blend`, which also notes each of its calls in the list."""

    def counted(self, x, y):
        blends.append(self)
        return blend(self, x, y)

    return counted


def lookahead_if_routed(model):
    if isinstance(model, RoutedCausalLM):
        return mixdepth.lookahead(model)
    return contextlib.nullcontext()


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
    for name in ATTRIBUTES:
        assert getattr(back, name) == getattr(plain, name)
    ids = token_ids()
    assert torch.equal(back(ids).logits, plain(ids).logits)
