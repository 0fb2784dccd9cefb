"""Tiny models that hide nothing: grouped-query attention, a short sliding window, layer 0 routed."""

import copy
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mixdepth
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.modes import choosers

VOCAB = 61
NUM_LAYERS = 4
SLIDING_WINDOW = 7

SETTINGS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": SLIDING_WINDOW,
    "use_sliding_window": True,
    "attention_chunk_size": SLIDING_WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "residual_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
"""Values for whichever of these settings an architecture's config has."""

LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has a key for each query head
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "glm4_moe_lite": LATENT,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "minicpm3": LATENT,
    "ministral": {"head_dim": 8},
    "youtu": LATENT,
}


def tiny_config(architecture: str, **settings: Any) -> Any:
    """The config of a tiny model of this architecture."""
    config_class = CONFIG_MAPPING[architecture]
    names = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    chosen = {name: value for name, value in SETTINGS.items() if name in names}
    return config_class(**{**chosen, **EXCEPTIONS.get(architecture, {}), **settings})


def dense(architecture: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Any:
    """A dense model in evaluation mode, with weights large enough that attention matters."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **settings)
    config._experts_implementation = "eager"  # the fused kernels know no float64
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def routed(
    architecture: str | PreTrainedModel = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any
) -> RoutedCausalLM:
    """A routed model in evaluation mode whose routers spread: about half of all tokens are chosen."""
    if isinstance(architecture, str):
        model = dense(architecture, dtype, seed)
    else:
        model = copy.deepcopy(architecture)
    model = mixdepth.route(model, **{"capacity": 0.4, "layers": (0, 2, 3), **settings})
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight.normal_(std=0.5)
            if router.predictor is not None:
                for parameter in router.predictor.parameters():
                    parameter.normal_()
    model = model.to(dtype)
    if any(module.estimates for module in choosers(model)):  # one training pass estimates the thresholds
        model.train()(token_ids(4, 24, seed=5))
        mixdepth.update_routers(model)
    return model.eval()


def token_ids(batch_size: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    """Random token ids (B, T) without the special ones, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch_size, length), generator=generator)


def decisions(model: RoutedCausalLM, ids: torch.Tensor, **kwargs: Any) -> tuple[mixdepth.Route, ...]:
    """The routes of a causal pass, with every decision clear of its threshold by a margin.

    A score at the threshold may fall to either side by rounding alone; such a test would say nothing.
    """
    out = model(ids, output_routes=True, **kwargs)
    margins = []
    for route, router in zip(out.routes, model.depth_routers, strict=True):
        margins.append((route.guess - router.cutoff)[route.candidates])
    for load, router in zip(out.loads or (), model.depth_expert_routers, strict=True):
        if load is not None and router.experts_choose:
            margins.append((load.logits.softmax(-1) - router.threshold)[load.used].flatten())
    for margin in margins:
        assert margin.abs().min() > 1e-6, "a decision without a margin: choose another seed"
    return out.routes
