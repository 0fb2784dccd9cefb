"""Makes routed model types known to transformers' AutoConfig, without importing what a routed model needs."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from mixdepth.hf.names import PREFIX, SUPPORTED


class LazyRoutedConfig(PreTrainedConfig):
    """Stands for `mixdepth_<type>` in AutoConfig until a checkpoint asks for the classes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        from mixdepth.hf.classes import routed_classes

        config_class, _ = routed_classes(cls.model_type.removeprefix(PREFIX))
        return config_class.from_dict(config_dict, **kwargs)


def register() -> None:
    """Tell AutoConfig of every routed model type."""
    for model_type in SUPPORTED:
        name = PREFIX + model_type
        lazy = type("LazyRoutedConfig", (LazyRoutedConfig,), {"model_type": name, "__module__": __name__})
        AutoConfig.register(name, lazy, exist_ok=True)
