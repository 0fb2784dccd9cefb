"""The private names of transformers and accelerate that routing needs, each with the reason.

They are allowed to change without notice, so they stand in one place, and transformers is pinned to one minor version.
A test in `tests/test_structure.py` finds every other use in the package.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel


class PrivateHooks(PreTrainedModel, GenerationMixin):
    """Answers what transformers asks a model class by private names, for routed models."""

    _supports_flash_attn = False
    """The masks of routed layers are not among those that flash attention can take."""
    _supports_flex_attn = False
    """Flex attention takes a block mask, which has no rows to gather."""
    _can_compile_fullgraph = False
    """Otherwise transformers compiles `generate()` and asks for a static cache."""

    def initialize_chooser(self, module: nn.Module) -> bool:
        """Initialise the module if it is a router, and return whether it is one."""
        raise NotImplementedError

    def check_generation(self, generation_config: Any) -> None:
        """Refuse settings of `generate()` that a routed model cannot follow."""
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        # transformers calls it for each module whose weights were not loaded.
        if not self.initialize_chooser(module):
            super()._init_weights(module)

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The first step of generate() that knows its final settings, and the last before it makes a cache.
        self.check_generation(generation_config)
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)


class NotBuilt:
    """A class that transformers' auto classes find, and that refuses to be made by `from_config`."""

    @classmethod
    def refuse(cls) -> Any:
        """Raise the error that says what to do instead."""
        raise NotImplementedError

    @classmethod
    def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
        # `AutoModel.from_config` calls this name.
        return cls.refuse()


def initialize(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialise one module as the loading of a checkpoint does where its weights are missing.

    The public `init_weights` initialises the whole model.
    """
    model._initialize_weights(module)


def mark_initialized(module: nn.Module) -> None:
    """Keep transformers from initialising the module when it initialises the rest of the model."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def is_loaded(module: nn.Module) -> bool:
    """Return whether the module has tensors of its own, and a checkpoint gave all of them.

    Loading marks each tensor and not the module.
    """
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not tensors:
        return False
    return all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)


def keep_whole(model: PreTrainedModel, class_name: str) -> None:
    """Keep layers of this class on one device: FSDP and device maps compare the names of classes."""
    model._no_split_modules.add(class_name)


def allow_splits(model: PreTrainedModel, class_name: str) -> None:
    """Undo `keep_whole`."""
    model._no_split_modules.discard(class_name)


def keep_in_float32(model: PreTrainedModel, name: str) -> None:
    """Keep modules of this name in float32 when the model is loaded in half precision."""
    model._keep_in_fp32_modules_strict.add(name)


def keep_no_longer(model: PreTrainedModel, name: str, pattern: str) -> None:
    """Undo `keep_in_float32`, and leave modules that match the pattern to quantisation again."""
    model._keep_in_fp32_modules_strict.discard(name)
    model._keep_in_fp32_modules.discard(pattern)


def class_settings(model_class: Any, name: str, pattern: str) -> dict[str, Any]:
    """The private class attributes of a routed model that is made from `model_class`.

    Modules of this name stay in float32, and quantisation leaves out modules that match the pattern.
    """
    in_float16 = model_class._keep_in_fp32_modules or ()
    in_half_precision = model_class._keep_in_fp32_modules_strict or ()
    return {
        "_keep_in_fp32_modules": {*in_float16, pattern},
        "_keep_in_fp32_modules_strict": {*in_half_precision, name},
        # transformers reads these from the source of the class's module, and ours has no experts in it.
        "_can_set_experts_implementation": model_class._can_set_experts_implementation,
        "_can_set_attn_implementation": model_class._can_set_attn_implementation,
    }


def skip_tokens_at_no_expert(experts: Any, is_skipping: bool) -> None:
    """Have the fused kernels of a block of experts leave out tokens whose expert index is the number of experts.

    transformers does so under expert parallelism only, for tokens at experts of another device.
    """
    experts._is_expert_parallel = is_skipping


def attention_implementation(config: Any) -> str:
    """The name of the attention kernels of a model with this config. The public name is for setting it."""
    name: str = config._attn_implementation
    return name


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate has spread the model over devices or offloaded it, which leaves a hook in modules."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def checkpoints_reentrantly(layer: Any) -> bool:
    """Return whether the layer is recomputed by reentrant checkpointing, which loses all but a layer's output."""
    if not getattr(layer, "gradient_checkpointing", False):
        return False
    settings: Callable[..., Any] = layer._gradient_checkpointing_func
    return bool(settings.keywords.get("use_reentrant", True))  # type: ignore[attr-defined]


def has_last_logits(model: Any) -> bool:
    """Return whether the model can compute the logits of its last tokens alone (`logits_to_keep`)."""
    answer: bool = model._supports_logits_to_keep()
    return answer


def read_config_file(config_class: Any, path: Any) -> dict[str, Any]:
    """The entries of a config.json, as a config class reads them before it makes a value of them."""
    entries: dict[str, Any] = config_class._dict_from_json_file(path)
    return entries
