"""Mixture-of-Depths for PyTorch and Hugging Face transformers."""

from mixdepth.config import DepthConfig
from mixdepth.hf import route, set_capacity, supported_architectures
from mixdepth.routed import Routed, routing_loss
from mixdepth.router import Router, lookahead
from mixdepth.routing import Route

__version__ = "0.1.0"

__all__ = [
    "DepthConfig",
    "Route",
    "Routed",
    "Router",
    "lookahead",
    "route",
    "routing_loss",
    "set_capacity",
    "supported_architectures",
]
