"""Registers routed model types with AutoConfig, without importing what a routed model needs."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from mixdepth.hf.names import PREFIX, SUPPORTED


class LazyRoutedConfig(PreTrainedConfig):
    """Stands for the config class of `mixdepth_<type>` in AutoConfig until something makes or loads a config."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real_class()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return cls.real_class().from_dict(config_dict, **kwargs)

    @classmethod
    def real_class(cls) -> Any:
        """The config class. Making it replaces this one in AutoConfig."""
        from mixdepth.hf.classes import routed_classes

        config_class, _ = routed_classes(cls.model_type.removeprefix(PREFIX))
        return config_class


def register_model_types() -> None:
    """Tell AutoConfig of every routed model type."""
    for model_type in SUPPORTED:
        name = PREFIX + model_type
        namespace = {"model_type": name, "__module__": __name__}
        lazy_class = type("LazyRoutedConfig", (LazyRoutedConfig,), namespace)
        AutoConfig.register(name, lazy_class, exist_ok=True)
