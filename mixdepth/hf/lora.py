"""Low-rank adapters by peft, beside routers that are trained whole."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import ROUTER_NAME


def lora_config(model: Any, rank: int = 16, **settings: Any) -> Any:
    """peft's settings for low-rank adapters in all linear maps of all layers, with the routers trained and saved
    beside them: `peft.get_peft_model(model, mixdepth.lora_config(model))`."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("adapters need the package peft: pip install peft") from error
    layers = decoder_layers(model)
    (prefix,) = (name for name, module in model.named_modules() if module is layers)
    modules = {name: module for layer in layers for name, module in layer.named_modules()}
    linear = [name for name, m in modules.items() if isinstance(m, (nn.Linear, Conv1D)) and ROUTER_NAME not in name]
    names = "|".join(sorted(name.replace(".", r"\.") for name in linear))
    targets = rf"{prefix}\.\d+\.({names})"
    settings = {"target_modules": targets, "r": rank, "lora_alpha": 2 * rank, "task_type": "CAUSAL_LM", **settings}
    if isinstance(model, RoutedCausalLM):
        others = settings.get("modules_to_save") or ()
        settings["modules_to_save"] = [*([others] if isinstance(others, str) else others), ROUTER_NAME]
    return LoraConfig(**settings)


def adapted(model: Any, rank: int) -> Any:
    """peft's model around this one, which is changed in place: adapters in its layers, copies of its routers."""
    config = lora_config(model, rank)
    from peft import get_peft_model

    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapter = get_peft_model(model, config)
    for name, parameter in model.named_parameters():  # what no loss can reach must not wait for a gradient
        original = name.replace("modules_to_save.default.", "")
        if original != name:
            parameter.requires_grad_(learns[original])
    return adapter
