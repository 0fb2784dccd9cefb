"""Law 8: the FLOP formula equals torch's counter, to the FLOP."""

import pytest
import torch
from test_laws import VARIANTS
from tiny import dense, routed, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mixdepth
from mixdepth.flops import count_flops


def counted(model, ids):
    """torch's own count; with the attention kernel that is made of matrix products, which it can see."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen3", "gpt2", "gpt_neox", "phi3", "starcoder2", "olmo2"]
)
@pytest.mark.parametrize("length", [20, 31])
def test_a_dense_models_count_equals_torchs(architecture, length):
    model = dense(architecture)
    assert count_flops(model, length).total == counted(model, token_ids(1, length))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_routed_models_count_equals_torchs(architecture, variant):
    model = routed(architecture, torch.float32, **VARIANTS[variant])
    with mixdepth.lookahead(model):
        assert count_flops(model, 31).total == counted(model, token_ids(1, 31))


def test_rows_of_a_batch_cost_the_same_each():
    model = routed(dtype=torch.float32)
    with mixdepth.lookahead(model):
        assert 3 * count_flops(model, 31).total == counted(model, token_ids(3, 31))
