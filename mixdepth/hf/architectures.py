"""Which architectures of transformers can be routed, and why the others cannot."""

import torch.nn as nn
from transformers import PreTrainedModel

SUPPORTED = ("llama",)
"""Model types that pass the laws in tests/test_laws.py, which runs over exactly this list."""

REFUSED: dict[str, str] = {}
"""Model types with a decoder layer of the common kind that still cannot be routed, with the reason."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of decoder layers."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    return stacks[0]


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, by name and with the reason, a model that cannot be routed."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{name} is not a transformers model: for a block of your own use mixdepth.Routed")
    model_type = model.config.model_type
