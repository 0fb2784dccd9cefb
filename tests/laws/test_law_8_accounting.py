"""Law 8: the cache holds exactly what was processed, and the FLOP formula equals torch's counter, to the FLOP."""

import pytest
import torch
from tiny import NUM_LAYERS, decisions, dense, routed, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import EXPERT_VARIANTS, VARIANTS, every_case, every_expert_case, left_padded, shared

import mixdepth
from mixdepth.hf.architectures import decoder_layers
from mixdepth.routes import slots

REFUSED = (
    "afmoe",
    "aria_text",
    "diffllama",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "jetmoe",
    "modernbert-decoder",
    "phimoe",
)
"""Architectures whose FLOPs are not counted."""
WITHOUT_HALVES = ("gpt2", "gpt_neox")
WITH_HALVES = ("llama", "mistral", "qwen3", "deepseek_v3")


@every_case
def test_the_cache_holds_exactly_what_was_processed(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    decided = decisions(model, ids, attention_mask=mask)
    routes = dict(zip(model.depth_config.routed_layers(NUM_LAYERS), decided, strict=True))
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        route = routes.get(index)
        if model.depth_config.scheme == "early_exit":  # the choice of the last exit holds for the layers behind it
            exits = [i for i in routes if i <= index]
            route = routes[max(exits)] if exits else None
        if route is None or model.depth_config.target == "mlp":
            assert layer.get_seq_length() == ids.shape[1]
            assert not hasattr(layer, "lengths")
        else:
            assert_holds(layer, route)


def assert_holds(layer, route):
    """The cache layer holds the chosen tokens of the route, under their columns."""
    assert layer.lengths == route.count.tolist()
    for row, length in enumerate(layer.lengths):
        if length > 0:
            assert layer.columns[row, :length].tolist() == route.mask[row].nonzero()[:, 0].tolist()


def counted(model, ids):
    """torch's own count; with the attention kernel that is made of matrix products, which it can see."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("architecture", mixdepth.supported_architectures())
def test_a_dense_models_count_equals_torchs_or_is_refused(architecture):
    model = dense(architecture)
    if architecture in REFUSED:
        with pytest.raises(ValueError, match="are not counted"):
            mixdepth.count_flops(model, 31)
    else:
        assert mixdepth.count_flops(model, 31).total == counted(model, token_ids(1, 31))


def routed_cases():
    for architecture in WITH_HALVES + WITHOUT_HALVES:
        for name, settings in VARIANTS.items():
            if architecture in WITHOUT_HALVES and ("target" in settings or "gate_on" in settings):
                continue
            marks = ()
            if architecture != "llama" and name != "default":
                marks = pytest.mark.slow
            yield pytest.param(architecture, name, id=f"{architecture}-{name}", marks=marks)


@pytest.mark.parametrize(("architecture", "variant"), list(routed_cases()))
def test_a_routed_models_count_equals_torchs(architecture, variant):
    settings = VARIANTS[variant]
    model = routed(architecture, torch.float32, **settings)
    with mixdepth.lookahead(model):
        assert mixdepth.count_flops(model, 31).total == counted(model, token_ids(1, 31))


@every_expert_case
def test_the_count_of_experts_equals_torchs_at_the_load_that_they_had(architecture, variant):
    """The formula plans a load; what the experts took beyond it is added."""
    model = routed(architecture, torch.float32, **EXPERT_VARIANTS[variant])
    ids = token_ids(1, 31)
    with mixdepth.lookahead(model):
        actual = counted(model, ids)
        loads = model(ids, output_routes=True).loads
    extra = 0
    for layer, load in zip(decoder_layers(model), loads, strict=True):
        num_experts = layer.mlp.experts.num_experts
        one_expert = 2 * sum(p[0].numel() for p in layer.mlp.experts.parameters())  # FLOPs of one token
        num_taken = load.processed[..., :num_experts].sum().item()
        extra += (num_taken - planned_load(layer.mlp.depth_router, load, num_experts)) * one_expert
    assert mixdepth.count_flops(model, 31).total + extra == actual


@every_expert_case
def test_experts_that_choose_take_what_was_planned(architecture, variant):
    if EXPERT_VARIANTS[variant]["experts"] != "expert_choice":
        return
    model = routed(architecture, torch.float32, **EXPERT_VARIANTS[variant])
    with mixdepth.lookahead(model):
        loads = model(token_ids(1, 31), output_routes=True).loads
    for layer, load in zip(decoder_layers(model), loads, strict=True):
        num_experts = layer.mlp.experts.num_experts
        planned = planned_load(layer.mlp.depth_router, load, num_experts)
        assert load.processed[..., :num_experts].sum().item() == planned


def planned_load(router, load, num_experts):
    """How many pairs of a token and an expert the formula counts."""
    if router.experts_choose:
        return num_experts * slots(router.capacity, load.used.shape[1])
    num_all = load.processed.shape[-1]  # with the no-op experts
    planned = load.used.sum().item() * 2 * num_experts // num_all
    if router.capacity is None:
        return planned
    return min(planned, num_experts * slots(router.capacity, load.used.shape[1]))


def test_rows_of_a_batch_cost_the_same_each():
    model = routed(dtype=torch.float32)
    with mixdepth.lookahead(model):
        assert 3 * mixdepth.count_flops(model, 31).total == counted(model, token_ids(3, 31))
