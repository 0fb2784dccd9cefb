"""What a forward pass costs: matrix products, two FLOPs for each multiply-add.

Counted are all linear maps, attention (every pair of tokens, no discount for the causal half),
routers, predictors and logits; embeddings are look-ups and cost nothing. A training step costs three
forward passes.
"""

from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.layer import RoutedLayer
from mixdepth.routing import slots


class FlopCount(NamedTuple):
    """FLOPs of one forward pass over one sequence."""

    layers: tuple[int, ...]  # each decoder layer, with its router
    logits: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.logits


def count_flops(model: Any, num_tokens: int) -> FlopCount:
    """FLOPs of a forward pass over one sequence of `num_tokens`, routed layers at their capacity.

    For architectures of dense linear layers; a mixture of experts is refused.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = []
    for layer in decoder_layers(model):
        experts = [name for name, parameter in layer.named_parameters() if parameter.ndim == 3]
        if experts:
            raise ValueError(f"the FLOPs of experts ({experts[0]} in {type(layer).__name__}) are not counted yet")
        processed, router = num_tokens, 0
        if isinstance(layer, RoutedLayer):
            processed = slots(layer.depth_router.capacity, num_tokens)
            router = 2 * num_tokens * _weights(layer.depth_router)
        block = 2 * processed * (_weights(layer) - _weights(getattr(layer, "depth_router", None)))
        layers.append(router + block + 2 * 2 * processed**2 * heads * head_width)
    return FlopCount(tuple(layers), 2 * num_tokens * _weights(model.get_output_embeddings()))


def _weights(module: nn.Module | None) -> int:
    """How many weights of linear maps there are: the multiply-adds for one token."""
    if module is None:
        return 0
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, Conv1D)))
