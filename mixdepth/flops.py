"""What a forward pass costs: matrix products, two FLOPs for each multiply-add.

Counted are all linear maps, attention (every pair of tokens, no discount for the causal half), experts,
routers, predictors and logits; embeddings are look-ups and cost nothing. A training step costs three
forward passes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.pytorch_utils import Conv1D

from mixdepth.hf import RoutedCausalLM, route
from mixdepth.hf.architectures import decoder_layers, expert_block
from mixdepth.hf.layer import RoutedExperts, RoutedLayer
from mixdepth.router import Chooser
from mixdepth.routing import slots

NOT_COUNTED = {
    "diffllama": "its attention takes each product twice",
    "modernbert-decoder": "it has a further layer before its logits",
}
"""Architectures whose products are other than those of their linear layers and attention, and why."""


class LayerFlops(NamedTuple):
    """FLOPs of one decoder layer, by what they are spent on."""

    tokens: int  # that go through what is routed, or through the layer
    router: int  # with its predictor
    attention: int  # projections and scores
    mlp: int  # with experts and their gate

    @property
    def total(self) -> int:
        return self.router + self.attention + self.mlp


class FlopCount(NamedTuple):
    """FLOPs of one forward pass over one sequence."""

    layers: tuple[LayerFlops, ...]
    logits: int

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.logits

    def __str__(self) -> str:
        """A table, one line for each layer."""
        lines = [f"{'layer':>6} {'tokens':>8} {'router':>12} {'attention':>14} {'mlp':>14} {'total':>14}"]
        for index, layer in enumerate(self.layers):
            lines.append(
                f"{index:>6} {layer.tokens:>8,} {layer.router:>12,} {layer.attention:>14,} {layer.mlp:>14,} "
                f"{layer.total:>14,}"
            )
        lines.append(f"{'logits':>6} {'':>8} {'':>12} {'':>14} {'':>14} {self.logits:>14,}")
        lines.append(f"{'all':>6} {'':>8} {'':>12} {'':>14} {'':>14} {self.total:>14,}")
        return "\n".join(lines)


def count_flops(model: Any, num_tokens: int) -> FlopCount:
    """FLOPs of a forward pass over one sequence of `num_tokens`, as training runs it: routed layers at their
    capacity.

    Experts that tokens choose are counted at equal loads, so that no-op experts save their share.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    >>> count_flops(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), 10).total
    135680
    """
    config = model.config.get_text_config(decoder=True)
    model_type = config.model_type.removeprefix("mixdepth_")
    if model_type in NOT_COUNTED:
        raise ValueError(f"the FLOPs of {model_type!r} are not counted: {NOT_COUNTED[model_type]}")
    layers, last_capacity = [], 1.0
    for layer in decoder_layers(model):
        capacity, router = 1.0, 0
        if isinstance(layer, RoutedLayer):
            if layer.depth_router is not None:
                last_capacity = layer.depth_router.capacity
                router = 2 * num_tokens * _weights(layer.depth_router)
            capacity = last_capacity
        layers.append(_layer_flops(layer, config, num_tokens, slots(capacity, num_tokens), router))
    return FlopCount(tuple(layers), 2 * num_tokens * _weights(model.get_output_embeddings()))


def _layer_flops(layer: Any, config: Any, num_tokens: int, chosen: int, router: int) -> LayerFlops:
    target = getattr(layer, "depth_target", "block")
    attending = num_tokens if target == "mlp" else chosen
    feeding = num_tokens if target == "attention" else chosen
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_width, value_width = (getattr(config, name, None) or head_width for name in ("qk_head_dim", "v_head_dim"))
    attention = _weights(_attention(layer))
    mlp = _weights(layer) - attention
    return LayerFlops(
        chosen,
        router,
        2 * attending * attention + 2 * attending**2 * heads * (key_width + value_width),
        2 * feeding * mlp + _expert_flops(layer, feeding),
    )


def _expert_flops(layer: Any, num_tokens: int) -> int:
    """FLOPs of the layer's experts and their gate."""
    stacked = [name for name, parameter in layer.named_parameters() if parameter.ndim == 3]
    if not stacked:
        return 0
    block = expert_block(layer)
    if block is None or not hasattr(block.gate, "top_k") or getattr(block.gate, "weight", None) is None:
        raise ValueError(f"the FLOPs of experts ({stacked[0]} in {type(layer).__name__}) are not counted")
    num_experts: int = block.experts.num_experts
    num_all = block.gate.weight.shape[0]
    pairs: int = num_tokens * block.gate.top_k * num_experts // num_all
    if isinstance(block, RoutedExperts) and block.depth_router.capacity is not None:
        limit = num_experts * slots(block.depth_router.capacity, num_tokens)
        pairs = limit if block.depth_router.experts_choose else min(pairs, limit)
    one_expert: int = sum(p.numel() for p in block.experts.parameters() if p.ndim == 3) // num_experts
    gate: int = block.gate.weight.numel()
    return 2 * num_tokens * gate + 2 * pairs * one_expert


def _attention(layer: Any) -> nn.Module | None:
    """The layer's attention: the child with a query, under whatever name."""
    names = ("self_attn", "attention", "attn", "self_attention")
    found = [child for name, child in layer.named_children() if name in names]
    return found[0] if found else None


def _weights(module: nn.Module | None) -> int:
    """How many weights of linear maps there are, without routers: the multiply-adds for one token."""
    if module is None:
        return 0
    weights = sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, Conv1D)))
    if isinstance(module, Chooser):
        return weights
    return weights - sum(_weights(m) for m in module.modules() if isinstance(m, Chooser))


def report(
    num_tokens: int,
    folder: str | None,
    *,
    settings: dict[str, Any],
    num_layers: int,
    width: int,
    vocab_size: int,
    num_experts: int,
    experts_per_token: int,
) -> None:
    """Print the count of a model that is described and not built: its weights take no memory."""
    numbers = {"tokens": num_tokens, "layers": num_layers, "width": width, "vocab-size": vocab_size}
    for name, value in {**numbers, "experts-per-token": experts_per_token}.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    if folder is not None:
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{folder!r} is not a model's folder: it has no config.json")
        config = AutoConfig.from_pretrained(folder)
    else:
        if width % 32:
            raise ValueError(f"--width must be a multiple of 32, the width of a head, not {width}")
        shape = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": num_layers}
        shape |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 32}
        if num_experts:
            share = 4 * width // experts_per_token  # as many FLOPs as a dense MLP of four times the width
            shape |= {"num_local_experts": num_experts, "num_experts_per_tok": experts_per_token}
            config = MixtralConfig(**shape, intermediate_size=share)
        else:
            config = LlamaConfig(**shape, intermediate_size=4 * width)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        if settings and isinstance(model, RoutedCausalLM):
            raise ValueError(f"{folder!r} is routed already: leave out --{next(iter(settings)).replace('_', '-')}")
        model = route(model, **settings) if settings else model
        count = count_flops(model, num_tokens)
        print(f"{type(model).__name__}, {model.num_parameters() / 1e6:.2f} M parameters, {num_tokens} tokens")
        print(count)
        if isinstance(model, RoutedCausalLM):
            dense_type = model.config.model_type.removeprefix("mixdepth_")
            plain = CONFIG_MAPPING[dense_type].from_dict(model.config.to_dict())
            dense = count_flops(AutoModelForCausalLM.from_config(plain), num_tokens).total
            print(
                f"{count.total / dense:.3f} of the dense model's {dense:,}; a training step costs three times as much"
            )
