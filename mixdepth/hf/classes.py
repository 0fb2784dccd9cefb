"""The class of a routed model: it is made from a dense model's class, and transformers' auto classes find it."""

import functools
import inspect
import json
import os
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

from mixdepth.hf.model import OUTPUT_NAMES, RoutedCausalLM, _like
from mixdepth.hf.names import KEPT, PREFIX, ROUTER_NAME

GUARD = "for_dense_classes"
"""An entry of config.json that keeps a routed folder from being loaded as a dense model.

A dense class that is asked for by name finds another model type than its own in the file, looks for an entry that has
its own, and takes this one. `use_cache` in it is a sentence, which the class refuses and quotes. All other readers take
the file's own entries, which are of the usual kinds.
"""


GUARD_SENTENCE = "routed: import mixdepth and load with AutoModelForCausalLM"


OLD_USE_CACHE = "routed_use_cache"
"""In files of earlier versions the sentence stood for `use_cache` itself, and the value under this name."""


class RoutedConfig:
    """Mixin before a config class of transformers."""

    model_type: str
    depth: dict[str, Any] | None

    def to_json_string(self, use_diff: bool = True) -> str:
        settings = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        settings[GUARD] = {"model_type": self.model_type.removeprefix(PREFIX), "use_cache": GUARD_SENTENCE}
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
        return cls.from_dict(cls._dict_from_json_file(json_file))  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_object, (self.model_type, 0), self.__dict__


OTHER_AUTO_CLASSES = (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


class OtherModel:
    """Stands for routed model types in `OTHER_AUTO_CLASSES`, and refuses to be made."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    @classmethod
    def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    @staticmethod
    def _refusal() -> ValueError:
        return ValueError(
            "a routed model is a causal language model: load it with AutoModelForCausalLM, and take its base_model "
            "for hidden states without a head"
        )


@functools.cache
def routed_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """The config and model classes of `mixdepth_<model_type>`, made known to transformers."""
    config_base = CONFIG_MAPPING[model_type]
    model_base = MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    ours = [name for name in OUTPUT_NAMES if name not in ("loss", "logits")]
    config_class = type(
        f"Mixdepth{config_base.__name__}",
        (RoutedConfig, config_base),
        {
            "__module__": __name__,
            "__annotations__": {"depth": dict[str, Any] | None},
            "model_type": PREFIX + model_type,
            "depth": None,
            "keys_to_ignore_at_inference": [*getattr(config_base, "keys_to_ignore_at_inference", ()), *ours],
        },
    )
    prepare_inputs = model_base.prepare_inputs_for_generation
    model_class = type(
        # transformers picks the loss by the class name, which must say ForCausalLM
        f"Mixdepth{model_base.__name__.replace('LMHeadModel', 'ForCausalLM')}",
        (RoutedCausalLM, model_base),
        {
            "__module__": __name__,
            "config_class": config_class,
            "forward": _like(model_base.forward, RoutedCausalLM.routed_forward, output_routes=False),
            "prepare_inputs_for_generation": _like(prepare_inputs, RoutedCausalLM.routed_inputs),
            # transformers reads these off the source of a class's module, and ours has no experts in it
            "_can_set_experts_implementation": model_base._can_set_experts_implementation,
            "_can_set_attn_implementation": model_base._can_set_attn_implementation,
            "__reduce__": _reduce_model,
            "argument_names": tuple(inspect.signature(model_base.forward).parameters)[1:],
            "_keep_in_fp32_modules": {*(model_base._keep_in_fp32_modules or ()), KEPT},
            "_keep_in_fp32_modules_strict": {*(model_base._keep_in_fp32_modules_strict or ()), ROUTER_NAME},
        },
    )
    AutoConfig.register(PREFIX + model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    for auto_class in OTHER_AUTO_CLASSES:
        auto_class.register(config_class, OtherModel, exist_ok=True)
    # Key names in checkpoints stay those of the dense model, where they differ from its module names.
    for theirs, name in ((model_type, PREFIX + model_type), (model_base.__name__, model_class.__name__)):
        mapping = get_checkpoint_conversion_mapping(theirs)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    return config_class, model_class


def _reduce_model(model: Any) -> tuple[Any, ...]:
    return _new_object, (model.config.model_type, 1), model.__dict__


def _new_object(model_type: str, which: int) -> Any:
    """An empty config (0) or model (1), for copies and pickles: its class is made where it is needed."""
    made: Any = routed_classes(model_type.removeprefix(PREFIX))[which]
    return made.__new__(made)
