"""Makes the class of a routed model from the class of the dense one, and registers it with the auto classes."""

import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mixdepth.hf import private
from mixdepth.hf.model import OUTPUT_NAMES, RoutedCausalLM
from mixdepth.hf.names import KEPT, PREFIX, ROUTER_NAME

GUARD = "for_dense_classes"
"""An entry of config.json that keeps a routed folder from being loaded as a dense model.

A dense class that the user asks for by name finds another model type than its own in the file.
It then looks for an entry that has its own type, and takes this one.
`use_cache` in it is a sentence, which the class refuses and quotes.
All other readers take the file's own entries, which are of the usual kinds.
"""
GUARD_SENTENCE = "routed: import mixdepth and load with AutoModelForCausalLM"
OLD_USE_CACHE = "routed_use_cache"
"""The entry that had the value of `use_cache` in early versions, where `use_cache` itself was the sentence."""

OTHER_AUTO_CLASSES = (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
"""The auto classes that refuse routed models, each with the sentence that says what to load instead."""


class RoutedConfig:
    """Mixin before a config class of transformers."""

    model_type: str
    depth: dict[str, Any] | None

    def to_json_string(self, use_diff: bool = True) -> str:
        settings = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        dense_type = self.model_type.removeprefix(PREFIX)
        settings[GUARD] = {"model_type": dense_type, "use_cache": GUARD_SENTENCE}
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        settings = dict(config_dict)
        settings.pop(GUARD, None)
        if OLD_USE_CACHE in settings:
            settings["use_cache"] = settings.pop(OLD_USE_CACHE)
        return super().from_dict(settings, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Any:
        return cls.from_dict(private.read_config_file(cls, json_file))

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_config, (self.model_type,), self.__dict__


class OtherModel(private.NotBuilt):
    """Takes the place of a model class in `OTHER_AUTO_CLASSES` for routed model types, and refuses to be made."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.refuse()

    @classmethod
    def refuse(cls) -> Any:
        raise ValueError(
            "a routed model is a causal language model: load it with AutoModelForCausalLM, and take its base_model "
            "for hidden states without a head"
        )


@functools.cache
def routed_classes(model_type: str) -> tuple[Any, Any]:
    """The config and model classes of `mixdepth_<model_type>`, registered with transformers."""
    config_base = CONFIG_MAPPING[model_type]
    model_base = MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    config_class = _config_class(PREFIX + model_type, config_base)
    model_class = _model_class(config_class, model_base)
    # 1. The auto classes find them.
    AutoConfig.register(PREFIX + model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    for auto_class in OTHER_AUTO_CLASSES:
        auto_class.register(config_class, OtherModel, exist_ok=True)
    # 2. Key names in checkpoints stay those of the dense model, where they differ from its module names.
    _register_key_names(model_type, PREFIX + model_type)
    _register_key_names(model_base.__name__, model_class.__name__)
    return config_class, model_class


def _config_class(model_type: str, base: Any) -> type[Any]:
    ignored = list(getattr(base, "keys_to_ignore_at_inference", ()))
    ignored += [name for name in OUTPUT_NAMES if name not in ("loss", "logits")]
    namespace = {
        "__module__": __name__,
        "__annotations__": {"depth": dict[str, Any] | None},
        "model_type": model_type,
        "depth": None,
        "keys_to_ignore_at_inference": ignored,
    }
    return type(f"Mixdepth{base.__name__}", (RoutedConfig, base), namespace)


def _model_class(config_class: type[Any], base: Any) -> type[Any]:
    # transformers picks the loss by the class name, which must contain ForCausalLM.
    name = base.__name__.replace("LMHeadModel", "ForCausalLM")
    forward = _with_signature_of(base.forward, RoutedCausalLM.routed_forward, output_routes=False)
    prepare_inputs = _with_signature_of(base.prepare_inputs_for_generation, RoutedCausalLM.routed_inputs)
    namespace = {
        "__module__": __name__,
        "__reduce__": _reduce_model,
        "config_class": config_class,
        "forward": forward,
        "prepare_inputs_for_generation": prepare_inputs,
        "argument_names": tuple(inspect.signature(base.forward).parameters)[1:],
    }
    namespace |= private.class_settings(base, ROUTER_NAME, KEPT)
    return type(f"Mixdepth{name}", (RoutedCausalLM, base), namespace)


def _register_key_names(of_dense: str, of_routed: str) -> None:
    mapping = get_checkpoint_conversion_mapping(of_dense)
    if mapping is not None:
        register_checkpoint_conversion_mapping(of_routed, mapping, overwrite=True)


def _with_signature_of(original: Callable[..., Any], function: Callable[..., Any], **extra: Any) -> Callable[..., Any]:
    """Give `function` the signature of `original`, which transformers inspects, and `extra` keywords."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    signature = inspect.signature(original)
    *named, rest = signature.parameters.values()
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in extra.items()]
    wrapper.__signature__ = signature.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    return wrapper


# Copies and pickles name functions instead of classes, and each process makes its classes when it needs them.


def _reduce_model(model: Any) -> tuple[Any, ...]:
    return _new_model, (model.config.model_type,), model.__dict__


def _new_config(model_type: str) -> Any:
    """An empty config of a routed model type."""
    config_class, _ = routed_classes(model_type.removeprefix(PREFIX))
    return config_class.__new__(config_class)


def _new_model(model_type: str) -> Any:
    """An empty model of a routed model type."""
    _, model_class = routed_classes(model_type.removeprefix(PREFIX))
    return model_class.__new__(model_class)
