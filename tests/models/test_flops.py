"""Law 8: the FLOP formula equals torch's counter, to the FLOP."""

import pytest
import torch
from tiny import dense, routed, tiny_config, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from variants import EXPERT_VARIANTS, VARIANTS, every_expert_case

import mixdepth
from mixdepth.hf.architectures import HALVES, decoder_layers
from mixdepth.routes import slots

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
        taken = load.taken[..., :num_experts].sum().item()
        if layer.mlp.depth_router.experts_choose:
            planned = num_experts * slots(layer.mlp.depth_router.capacity, load.used.shape[1])
            assert taken == planned
        else:
            num_all = load.taken.shape[-1]
            planned = load.used.sum().item() * 2 * num_experts // num_all
            if layer.mlp.depth_router.capacity is not None:
                planned = min(planned, num_experts * slots(layer.mlp.depth_router.capacity, load.used.shape[1]))
            extra += (taken - planned) * one_expert
    assert count.total + extra == actual


def test_only_staged_mode_skips_attention():
    experts = dense("mixtral")
    staged = routed(experts, experts="token_choice", layers=(1, 3), capacity=0.25)
    integrated = routed(experts, experts="token_choice", layers=(), num_noop_experts=4)
    fewer = routed(experts, experts="expert_choice", layers=(), expert_capacity=0.25)
    full, staged, integrated, fewer = (
        mixdepth.count_flops(m, 32).layers[1] for m in (experts, staged, integrated, fewer)
    )
    assert staged.attention < full.attention / 4 + 1
    assert integrated.attention == fewer.attention == full.attention
    assert max(staged.mlp, integrated.mlp, fewer.mlp) < full.mlp


def test_what_was_never_compared_is_not_counted():
    from transformers import LlamaModel, MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9))
    for model in (mamba, LlamaModel(tiny_config("llama")), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="are not counted: it is no causal language model"):
            mixdepth.count_flops(model, 8)
    for num_tokens in (0, -5, 2.5):
        with pytest.raises(ValueError, match="num_tokens must be a whole number of at least 1, not"):
            mixdepth.count_flops(dense(), num_tokens)


def test_rows_of_a_batch_cost_the_same_each():
    model = routed(dtype=torch.float32)
    with mixdepth.lookahead(model):
        assert 3 * mixdepth.count_flops(model, 31).total == counted(model, token_ids(3, 31))


def test_the_table_has_a_line_for_each_layer_and_the_sum():
    lines = str(mixdepth.count_flops(routed(capacity=0.125), 64)).splitlines()
    assert len(lines) == 1 + 4 + 2
    assert [line.split()[1] for line in lines[1:5]] == ["8", "64", "8", "8"]
    assert lines[-1].split()[-1] == f"{mixdepth.count_flops(routed(capacity=0.125), 64).total:,}"
