"""The architectures of transformers that can be routed, the parts of their layers, and why others cannot be routed."""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from mixdepth.config import DepthConfig, Target
from mixdepth.hf.names import PREFIX, SUPPORTED
from mixdepth.hf.private import attention_implementation, is_dispatched

# fmt: off
HALVES = (
    "arcee", "aria_text", "axk1", "bitnet", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone_moe", "flint", "gemma", "glm", "glm4_moe", "glm4_moe_lite", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "jais2", "laguna", "llama", "mellum", "mimo_v2_flash", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmoe", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "youtu",
)
"""The architectures whose layers are Llama's: x + attention(norm(x)), then x + mlp(norm(x)), under Llama's names.

Their halves can be routed alone (`target`, `gate_on`).
The layers of the others norm twice, scale or add elsewhere, each in its own way.
"""

EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
"""The architectures whose experts can be routed (`experts`)."""

RUN_ALL_LAYERS = (
    "afmoe", "biogpt", "cohere2", "cohere2_moe", "exaone4", "gpt2", "gpt_neox", "gpt_oss", "modernbert-decoder",
    "nemotron", "opt", "persimmon", "stablelm",
)
"""The architectures that run their whole stack even if `config.num_hidden_layers` is lower.

`assistant_early_exit` lowers that number, so it cannot shorten them.
"""

RECURRENT = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)
INDEXED = ("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4")
SHARED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
TUPLE = ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt")
# fmt: on

REFUSED = {
    **dict.fromkeys(RECURRENT, "its layers carry a state from token to token, which a skipped token would break"),
    **dict.fromkeys(INDEXED, "its attention keeps an index of every token next to the cache"),
    **dict.fromkeys(SHARED, "its layers share keys and values, which needs the same tokens in all of them"),
    **dict.fromkeys(TUPLE, "its layers return a tuple"),
    "llama4_text": "its attention counts positions from the cache instead of taking them as an argument",
    "hrm_text": "it runs its layers more than once in a forward pass",
}
"""The reason why an architecture cannot be routed, for some decoders."""

Tokens = TypeVar("Tokens")
"""A number of tokens, or a mask of tokens."""


@dataclass(frozen=True, kw_only=True)
class Half:
    """The names of the submodules of a layer that make one of its halves: x + module(norm(x))."""

    norm: str
    module: str


ATTENTION = Half(norm="input_layernorm", module="self_attn")
MLP = Half(norm="post_attention_layernorm", module="mlp")
"""The halves of the layers of `HALVES`, under Llama's names."""

ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")
"""The names of attention in the layers of all architectures."""


def half_modules(layer: Any, half: Half) -> tuple[Any, Any]:
    """The norm of a half of a layer, and the attention or MLP that follows it."""
    return getattr(layer, half.norm), getattr(layer, half.module)


def target_of(layer: Any) -> Target:
    """The part of a layer that is routed; a layer without routing counts as a whole."""
    target: Target = getattr(layer, "depth_target", "block")
    return target


def target_module(layer: Any, target: Target) -> nn.Module:
    """The module whose output a target blends into the stream: the layer itself, its attention or its MLP."""
    match target:
        case "block":
            name = ""
        case "attention":
            name = ATTENTION.module
        case "mlp":
            name = MLP.module
    module: nn.Module = layer.get_submodule(name)  # the layer itself without a name
    return module


def dense_half(target: Target) -> Half | None:
    """The half of a layer that every token passes."""
    match target:
        case "block":
            return None
        case "attention":
            return MLP
        case "mlp":
            return ATTENTION


def tokens_of_halves(layer: Any, all_tokens: Tokens, chosen: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens that pass the layer's attention, and those that pass its MLP."""
    half = dense_half(target_of(layer))
    attending = all_tokens if half is ATTENTION else chosen
    feeding = all_tokens if half is MLP else chosen
    return attending, feeding


def attention_module(layer: Any) -> nn.Module | None:
    """The layer's attention, under whichever name the architecture has for it."""
    for name, child in layer.named_children():
        if name in ATTENTION_NAMES:
            module: nn.Module = child
            return module
    return None


def expert_block(layer: Any) -> Any:
    """The layer's mixture-of-experts block, if it has one that can be routed."""
    mlp = getattr(layer, MLP.module, None)
    if hasattr(mlp, "gate") and hasattr(mlp, "experts"):
        return mlp
    return None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of decoder layers."""
    # A routed model remembers its name: generate(assistant_early_exit=...) lowers the number of layers for a while.
    name = getattr(model, "depth_stack", None)
    if name is None:
        name = stack_name(model)
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
    if is_dispatched(model):
        raise ValueError(f"{name} is dispatched over devices or offloaded: route it first, then dispatch it")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} attends to an encoder (add_cross_attention=True), which cannot be routed")
    if getattr(config, "is_causal", True) is False:
        raise ValueError(f"{name} attends in both directions (is_causal=False): only causal models can be routed")
    attention = attention_implementation(config)
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={attention!r} cannot take the masks of routed layers: "
            "load the model with 'sdpa' or 'eager'"
        )


def check_settings(model: PreTrainedModel, config: DepthConfig) -> None:
    """Refuse settings that do not go with the model, which itself can be routed."""
    layers = decoder_layers(model)
    config.routed_layers(len(layers))
    model_type = model.config.model_type.removeprefix(PREFIX)
    for name in ("target", "gate_on"):
        value = getattr(config, name)
        if value != "block" and model_type not in HALVES:
            raise ValueError(
                f"{name}={value!r} needs layers whose halves can run alone; those of {model_type!r} "
                f"cannot: leave it out, or use one of {', '.join(HALVES)}"
            )
    if config.experts is None:
        return
    has_experts = any(expert_block(layer) is not None for layer in layers)
    if model_type not in EXPERTS or not has_experts:
        raise ValueError(
            f"experts={config.experts.scheme!r} needs a mixture of experts (one of {', '.join(EXPERTS)}), "
            f"not {model_type!r}"
        )
    if getattr(model.config, "router_jitter_noise", 0):
        raise ValueError(
            f"router_jitter_noise={model.config.router_jitter_noise} cannot be had with experts=...: set it to 0"
        )
