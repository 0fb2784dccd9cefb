"""Which architectures of transformers can be routed, and why the others cannot."""

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedModel,
)

from mixdepth.config import DepthConfig
from mixdepth.hf.names import SUPPORTED

HALVES = (
    *("arcee", "aria_text", "axk1", "bitnet", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone_moe", "flint", "gemma", "glm", "glm4_moe", "glm4_moe_lite", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "laguna", "llama", "mellum", "mimo_v2_flash"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmoe"),
    *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2"),
    "youtu",
)
"""Those whose layers are Llama's: x + attention(norm(x)), then x + mlp(norm(x)), under Llama's names. Their halves
can be routed alone (`target`, `gate_on`); the others norm twice, scale or add elsewhere, each in its own way."""

EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
"""Those whose experts can be routed (`experts`)."""

RUN_ALL_LAYERS = (
    *("afmoe", "biogpt", "cohere2", "cohere2_moe", "exaone4", "gpt2", "gpt_neox", "gpt_oss", "modernbert-decoder"),
    *("nemotron", "opt", "persimmon", "stablelm"),
)
"""Those that run their whole stack whatever `config.num_hidden_layers` says, so that `assistant_early_exit`, which
lowers that number, cannot shorten them."""

_RECURRENT = "its layers carry a state from token to token, which a skipped token would break"
_INDEXED = "its attention keeps an index of every token beside the cache"
_SHARED = "its layers share keys and values, which needs the same tokens in all of them"
_TUPLE = "its layers return a tuple"

REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bamba", "jamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "nemotron_h"), _RECURRENT),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "minimax", "olmo_hybrid"), _RECURRENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "inkling_text", "zaya"), _RECURRENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"), _INDEXED),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _SHARED),
    **dict.fromkeys(("falcon", "gptj", "gpt_neo", "bloom", "codegen", "mpt"), _TUPLE),
    "llama4_text": "its attention counts positions from the cache instead of taking them as an argument",
    "hrm_text": "it runs its layers more than once in a forward pass",
}
"""Why some decoders cannot be routed."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of decoder layers."""
    # A routed model remembers its name: generate(assistant_early_exit=...) changes the number for a while.
    name = getattr(model, "depth_stack", None) or stack_name(model)
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def stack_name(model: PreTrainedModel) -> str:
    """The name of the stack of decoder layers, such as 'model.layers'."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise AssertionError(f"{type(model).__name__} has no stack of {num_layers} layers")


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be routed, by name and with the reason."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{name} is not a transformers model: to route a block of your own use mixdepth.Routed")
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only decoders (causal language models) can be routed")
    if config.model_type not in SUPPORTED:
        reason = REFUSED.get(config.model_type, "an encoder, or a decoder of a kind that no test covers")
        raise ValueError(f"{name} (model type {config.model_type!r}) cannot be routed: {reason}")
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if type(model) is not causal_class:
        raise ValueError(f"{name} is not a causal language model: load the model as {causal_class.__name__}")
    method = getattr(getattr(model, "quantization_method", None), "value", None)
    if method not in (None, "bitsandbytes"):
        raise ValueError(
            f"{name} is quantised by {method!r}, which no test covers: load it with BitsAndBytesConfig, or without "
            "quantization_config"
        )
    if getattr(config, "layerdrop", 0) > 0:
        raise ValueError(f"{name} drops whole layers at random (layerdrop={config.layerdrop}): set it to 0 to route")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(f"{name} is dispatched over devices or offloaded: route it first, then dispatch it")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} attends to an encoder (add_cross_attention=True), which cannot be routed")
    if getattr(config, "is_causal", True) is False:
        raise ValueError(f"{name} attends in both directions (is_causal=False): only causal models can be routed")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot take the masks of routed layers: "
            "load the model with 'sdpa' or 'eager'"
        )


def check_settings(model: PreTrainedModel, config: DepthConfig) -> None:
    """Refuse settings that the model, which can be routed, does not go with."""
    layers = decoder_layers(model)
    config.routed_layers(len(layers))
    model_type = model.config.model_type.removeprefix("mixdepth_")
    for name in ("target", "gate_on"):
        if getattr(config, name) != "block" and model_type not in HALVES:
            raise ValueError(
                f"{name}={getattr(config, name)!r} needs layers whose halves can run alone; those of {model_type!r} "
                f"cannot: leave it out, or use one of {', '.join(HALVES)}"
            )
    if config.experts is None:
        return
    if model_type not in EXPERTS or not any(expert_block(layer) for layer in layers):
        raise ValueError(
            f"experts={config.experts.scheme!r} needs a mixture of experts (one of {', '.join(EXPERTS)}), not {model_type!r}"
        )
    if getattr(model.config, "router_jitter_noise", 0):
        raise ValueError(
            f"router_jitter_noise={model.config.router_jitter_noise} cannot be had with experts=...: set it to 0"
        )


def expert_block(layer: Any) -> Any:
    """The layer's mixture-of-experts block, where it has one that can be routed."""
    mlp = getattr(layer, "mlp", None)
    return mlp if hasattr(mlp, "gate") and hasattr(mlp, "experts") else None
