"""Law 8: the cache holds exactly what was processed, and the FLOP formula equals torch's counter, to the FLOP."""

import pytest
import torch
from tiny import NUM_LAYERS, decisions, dense, routed, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import EXPERT_VARIANTS, VARIANTS, every_case, every_expert_case, left_padded, shared

import mixdepth
from mixdepth.hf.architectures import HALVES, decoder_layers
from mixdepth.routes import slots


@every_case
def test_the_cache_holds_exactly_what_was_processed(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    routes = decisions(model, ids, attention_mask=mask)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    routes = dict(zip(model.depth_config.routed_layers(NUM_LAYERS), routes, strict=True))
    for index, layer in enumerate(cache.layers):
        last = max((i for i in routes if i <= index), default=None)
        is_routed = index in routes or (last is not None and model.depth_config.scheme == "early_exit")
        if not is_routed or model.depth_config.target == "mlp":
            assert layer.get_seq_length() == ids.shape[1]
            assert not hasattr(layer, "lengths")
            continue
        route = routes[last]
        assert layer.lengths == route.count.tolist()
        for row, length in enumerate(layer.lengths):
            assert length == 0 or layer.columns[row, :length].tolist() == route.mask[row].nonzero()[:, 0].tolist()


REFUSED = {
    *("afmoe", "aria_text", "diffllama", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("hunyuan_v1_moe", "jetmoe", "modernbert-decoder", "phimoe"),
}


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
    for architecture in ("llama", "mistral", "qwen3", "gpt2", "gpt_neox", "deepseek_v3"):
        for name, settings in VARIANTS.items():
            if architecture in HALVES or not {"target", "gate_on"} & settings.keys():
                marks = () if architecture == "llama" or name == "default" else pytest.mark.slow
                yield pytest.param(architecture, name, id=f"{architecture}-{name}", marks=marks)


@pytest.mark.parametrize(("architecture", "variant"), list(routed_cases()))
def test_a_routed_models_count_equals_torchs(architecture, variant):
    settings = VARIANTS[variant]
    model = routed(architecture, torch.float32, **settings)
    with mixdepth.lookahead(model):
        assert mixdepth.count_flops(model, 31).total == counted(model, token_ids(1, 31))


@every_expert_case
def test_the_count_of_experts_equals_torchs_at_the_load_that_they_had(architecture, variant):
    model = routed(architecture, torch.float32, **EXPERT_VARIANTS[variant])
    ids = token_ids(1, 31)
    with mixdepth.lookahead(model):
        actual = counted(model, ids)
        loads = model(ids, output_routes=True).loads
    count = mixdepth.count_flops(model, 31)
    extra = 0
    for layer, load in zip(decoder_layers(model), loads, strict=True):
        num_experts = layer.mlp.experts.num_experts
        one_expert = 2 * sum(p[0].numel() for p in layer.mlp.experts.parameters())
        taken = load.processed[..., :num_experts].sum().item()
        if layer.mlp.depth_router.experts_choose:
            planned = num_experts * slots(layer.mlp.depth_router.capacity, load.used.shape[1])
            assert taken == planned
        else:
            num_all = load.processed.shape[-1]
            planned = load.used.sum().item() * 2 * num_experts // num_all
            if layer.mlp.depth_router.capacity is not None:
                planned = min(planned, num_experts * slots(layer.mlp.depth_router.capacity, load.used.shape[1]))
            extra += (taken - planned) * one_expert
    assert count.total + extra == actual


def test_rows_of_a_batch_cost_the_same_each():
    model = routed(dtype=torch.float32)
    with mixdepth.lookahead(model):
        assert 3 * mixdepth.count_flops(model, 31).total == counted(model, token_ids(3, 31))
