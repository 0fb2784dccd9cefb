"""Low-rank adapters by peft, next to routers that are trained whole."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import ROUTER_NAME


def lora_config(model: Any, rank: int = 16, **settings: Any) -> Any:
    """peft's settings for low-rank adapters in all linear maps of all layers: `peft.get_peft_model(model, config)`.

    Routers have no adapters: they are trained and saved whole. `settings` are further ones of peft's `LoraConfig`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("adapters need the package peft: pip install peft") from error
    chosen: dict[str, Any] = {
        "target_modules": _linear_maps(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "task_type": "CAUSAL_LM",
    }
    chosen |= settings
    if isinstance(model, RoutedCausalLM):
        others = chosen.get("modules_to_save") or ()
        if isinstance(others, str):
            others = (others,)
        chosen["modules_to_save"] = [*others, ROUTER_NAME]
    return LoraConfig(**chosen)


def _linear_maps(model: Any) -> str:
    """A pattern for the names of all linear maps in the decoder layers, without those of routers."""
    layers = decoder_layers(model)
    (prefix,) = (name for name, module in model.named_modules() if module is layers)
    modules: dict[str, nn.Module] = {}
    for layer in layers:
        modules.update(layer.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))]
    patterns = [name.replace(".", r"\.") for name in linear if ROUTER_NAME not in name]
    names = "|".join(sorted(patterns))
    return rf"{prefix}\.\d+\.({names})"


def adapted(model: Any, rank: int) -> Any:
    """Wrap the model, in place, into peft's model: its layers get adapters, and its routers get copies to train."""
    config = lora_config(model, rank)
    from peft import get_peft_model

    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapter = get_peft_model(model, config)
    # peft has every copy require gradients, but distributed training waits for ever for one that no loss can reach.
    for name, parameter in model.named_parameters():
        original = name.replace("modules_to_save.default.", "")
        if original != name:
            parameter.requires_grad_(requires_grad[original])
    return adapter
