"""What a forward pass costs: matrix products, at two FLOPs for each multiply-add.

All linear maps count, attention (every pair of tokens, no discount for the causal half), experts, routers, predictors
and logits. Embeddings are look-ups and cost nothing. A training step costs three forward passes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from mixdepth.hf.architectures import attention_module, decoder_layers, expert_block, tokens_of_halves
from mixdepth.hf.install import route
from mixdepth.hf.layer import RoutedExperts, RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import PREFIX, SUPPORTED
from mixdepth.models.shape import model_config
from mixdepth.modes import active
from mixdepth.router import Chooser
from mixdepth.routes import slots

NOT_COUNTED = {
    "diffllama": "its attention takes each product twice",
    "modernbert-decoder": "it has a further layer before its logits",
}
"""Architectures with products besides those of their linear layers and attention, and the reason for each."""

TABLE_WIDTHS = (6, 8, 12, 14, 14, 14)
"""The widths of the columns of the table."""


class LayerFlops(NamedTuple):
    """FLOPs of one decoder layer, by what they are spent on."""

    tokens: int
    """How many tokens go through what is routed, or through the layer."""
    router: int
    """FLOPs of the router with its predictor."""
    attention: int
    """FLOPs of projections and scores."""
    mlp: int
    """FLOPs of the MLP, or of experts and their gate."""

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
        return flops_table(self)


def flops_table(count: FlopCount) -> str:
    """Return the count as a table with one line for each layer."""
    rows = [["layer", "tokens", "router", "attention", "mlp", "total"]]
    for index, layer in enumerate(count.layers):
        numbers = (layer.tokens, layer.router, layer.attention, layer.mlp, layer.total)
        rows.append([str(index), *(f"{number:,}" for number in numbers)])
    rows.append(["logits", "", "", "", "", f"{count.logits:,}"])
    rows.append(["all", "", "", "", "", f"{count.total:,}"])
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, TABLE_WIDTHS, strict=True)]
        lines.append(" ".join(cells))
    return "\n".join(lines)


def count_flops(model: Any, num_tokens: int, taken: Mapping[int, int] | None = None) -> FlopCount:
    """Count the FLOPs of a forward pass over one sequence of `num_tokens`, as training runs it.

    Routed layers count at their capacity; or at the number of tokens in `taken`, by the index of each layer with a
    router. Experts that tokens choose count at equal loads, so that no-op experts save their share.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    >>> count_flops(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), 10).total
    135680
    """
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"num_tokens must be a whole number of at least 1, not {num_tokens!r}")
    check_counted(model)
    config = model.config.get_text_config(decoder=True)
    layers = []
    last_chosen = num_tokens  # after an exit, layers without a router process what the exit kept
    for index, layer in enumerate(decoder_layers(model)):
        chosen = num_tokens
        router = 0
        if isinstance(layer, RoutedLayer):
            chooser = active(layer.depth_router)
            if chooser is not None:
                last_chosen = slots(chooser.capacity, num_tokens) if taken is None else taken[index]
                router = num_tokens * token_flops(chooser)
            chosen = last_chosen
        attending, feeding = tokens_of_halves(layer, num_tokens, chosen)
        attention, mlp = layer_flops(layer, config, attending, attending**2, feeding)
        layers.append(LayerFlops(tokens=chosen, router=router, attention=attention, mlp=mlp))
    return FlopCount(layers=tuple(layers), logits=num_tokens * token_flops(model.get_output_embeddings()))


def check_counted(model: Any) -> None:
    """Refuse a model for which FLOPs are not counted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", type(model).__name__).removeprefix(PREFIX)
    if model_type not in SUPPORTED or model_type in NOT_COUNTED or model.get_output_embeddings() is None:
        reason = NOT_COUNTED.get(model_type, "it is not a causal language model of a kind that can be routed")
        raise ValueError(f"the FLOPs of {type(model).__name__} ({model_type!r}) are not counted: {reason}")


def layer_flops(layer: Any, config: Any, attending: int, pairs: int, feeding: int) -> tuple[int, int]:
    """Return the FLOPs of a layer's attention and of its MLP.

    `attending` tokens go through attention, which has `pairs` pairs of a query and a key, and `feeding` tokens go
    through the MLP.
    """
    # 1. Attention: the projections of each token, and the scores and values of each pair.
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_width = getattr(config, "qk_head_dim", None) or head_width
    value_width = getattr(config, "v_head_dim", None) or head_width
    projections = token_flops(attention_module(layer))
    attention = attending * projections + 2 * pairs * heads * (key_width + value_width)

    # 2. The MLP: all other linear maps of the layer, and its experts.
    mlp = token_flops(layer) - projections
    return attention, feeding * mlp + _expert_flops(layer, feeding)


def _expert_flops(layer: Any, num_tokens: int) -> int:
    """Return the FLOPs of the layer's experts and their gate, for this many tokens."""
    # 1. Experts are weights with three dimensions, of which the first is the expert.
    stacked = [name for name, parameter in layer.named_parameters() if parameter.ndim == 3]
    if not stacked:
        return 0
    block = expert_block(layer)
    if block is None or not hasattr(block.gate, "top_k") or getattr(block.gate, "weight", None) is None:
        raise ValueError(f"the FLOPs of experts ({stacked[0]} in {type(layer).__name__}) are not counted")

    # 2. How many pairs of a token and an expert there are: those at no-op experts cost nothing.
    num_experts: int = block.experts.num_experts
    num_all = block.gate.weight.shape[0]
    pairs: int = num_tokens * block.gate.top_k * num_experts // num_all
    if isinstance(block, RoutedExperts):
        chooser = active(block.depth_router)
        if chooser is not None and chooser.capacity is not None:
            most_pairs = num_experts * slots(chooser.capacity, num_tokens)
            pairs = most_pairs if chooser.experts_choose else min(pairs, most_pairs)

    # 3. What one pair costs, and the gate.
    weights = [parameter.numel() for parameter in block.experts.parameters() if parameter.ndim == 3]
    one_expert: int = sum(weights) // num_experts
    gate: int = block.gate.weight.numel()
    return 2 * num_tokens * gate + 2 * pairs * one_expert


def token_flops(module: nn.Module | None) -> int:
    """Return the FLOPs of the module's linear maps for one token, without routers: two for each weight."""
    return 2 * _weights(module)


def _weights(module: nn.Module | None) -> int:
    """Count the weights of all linear maps in a module, without those of routers in it."""
    if module is None:
        return 0
    number = 0
    for part in module.modules():
        if isinstance(part, Conv1D):
            number += part.weight.numel()
        elif isinstance(part, nn.Linear):
            number += part.in_features * part.out_features  # a quantised weight is packed, so its size does not say
        elif isinstance(part, Chooser) and part is not module:
            number -= _weights(part)
    return number


def flops_report(
    num_tokens: int, folder: str | None, shape: dict[str, int | None], settings: dict[str, Any], flags: Sequence[str]
) -> str:
    """Return the FLOPs of a model that is described and not built, as text: its weights take no memory.

    The model is that of a folder, or without one a Llama of the given shape (a Mixtral if it has experts).
    `settings` route it; `flags` are the names under which the user gave them.
    """
    config = _described_config(folder, shape)
    with torch.device("meta"):
        # 1. Build the model, and route it where settings ask for that.
        model: Any = AutoModelForCausalLM.from_config(config)
        if settings and isinstance(model, RoutedCausalLM):
            raise ValueError(f"{folder!r} is routed already: leave out {' and '.join(flags)}")
        if settings:
            model = route(model, **settings)
        # 2. Count its FLOPs, layer by layer.
        count = count_flops(model, num_tokens)
        size = f"{model.num_parameters() / 1e6:.2f} M parameters"
        lines = [f"{type(model).__name__}, {size}, {num_tokens} tokens", flops_table(count)]
        # 3. Compare a routed model with the dense model of the same shape.
        if isinstance(model, RoutedCausalLM):
            dense_type = model.config.model_type.removeprefix(PREFIX)
            dense_config = CONFIG_MAPPING[dense_type].from_dict(model.config.to_dict())
            dense = count_flops(AutoModelForCausalLM.from_config(dense_config), num_tokens).total
            lines.append(
                f"{count.total / dense:.3f} of the dense model's {dense:,}; a training step costs three times as much"
            )
    return "\n".join(lines)


def _described_config(folder: str | None, shape: dict[str, int | None]) -> Any:
    """Return the configuration in a folder, or that of a fresh model of this shape."""
    given = {name: value for name, value in shape.items() if value is not None}
    if folder is None:
        return model_config(**given)
    if given:
        raise ValueError(f"{next(iter(given))} has no meaning next to a folder, which has its own shape: leave it out")
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder!r} is not a model's folder: it has no config.json")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)
