"""What the FLOP count says and refuses; that it equals torch's own is law 8."""

import pytest
import torch
from tiny import dense, routed, tiny_config

import mixdepth


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
        with pytest.raises(ValueError, match="are not counted: it is not a causal language model"):
            mixdepth.count_flops(model, 8)
    for num_tokens in (0, -5, 2.5):
        with pytest.raises(ValueError, match="num_tokens must be a whole number of at least 1, not"):
            mixdepth.count_flops(dense(), num_tokens)


def test_the_table_has_a_line_for_each_layer_and_the_sum():
    lines = str(mixdepth.count_flops(routed(capacity=0.125), 64)).splitlines()
    assert len(lines) == 1 + 4 + 2
    assert [line.split()[1] for line in lines[1:5]] == ["8", "64", "8", "8"]
    assert lines[-1].split()[-1] == f"{mixdepth.count_flops(routed(capacity=0.125), 64).total:,}"
