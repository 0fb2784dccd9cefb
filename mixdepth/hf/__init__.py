"""The seam to transformers: routing for its causal language models."""

from typing import TYPE_CHECKING

from mixdepth.lazy import lazily

if TYPE_CHECKING:
    from mixdepth.hf.cache import RoutedCacheLayer as RoutedCacheLayer
    from mixdepth.hf.install import route as route
    from mixdepth.hf.install import set_capacity as set_capacity
    from mixdepth.hf.install import supported_architectures as supported_architectures
    from mixdepth.hf.install import unroute as unroute
    from mixdepth.hf.model import RoutedCausalLM as RoutedCausalLM
    from mixdepth.hf.model import RoutedCausalLMOutput as RoutedCausalLMOutput
    from mixdepth.hf.router_updates import UpdateRouters as UpdateRouters

PLACES = {
    "RoutedCacheLayer": "mixdepth.hf.cache",
    "RoutedCausalLM": "mixdepth.hf.model",
    "RoutedCausalLMOutput": "mixdepth.hf.model",
    "UpdateRouters": "mixdepth.hf.router_updates",
    "route": "mixdepth.hf.install",
    "set_capacity": "mixdepth.hf.install",
    "supported_architectures": "mixdepth.hf.install",
    "unroute": "mixdepth.hf.install",
}

__all__ = [*PLACES]
__getattr__, __dir__ = lazily(PLACES, globals())
