"""Mixture-of-Depths for PyTorch and Hugging Face transformers."""

from mixdepth.config import DepthConfig
from mixdepth.encoder import MixtureOfDepths
from mixdepth.evaluation import Calibration, Evaluation, LayerRouting, calibrate, evaluate
from mixdepth.experts import ExpertLoad
from mixdepth.flops import FlopCount, count_flops
from mixdepth.hf import UpdateRouters, route, set_capacity, supported_architectures
from mixdepth.routed import Routed, routing_loss
from mixdepth.router import Router, lookahead, update_routers
from mixdepth.routing import Route

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "DepthConfig",
    "Evaluation",
    "ExpertLoad",
    "FlopCount",
    "LayerRouting",
    "MixtureOfDepths",
    "Route",
    "Routed",
    "Router",
    "UpdateRouters",
    "calibrate",
    "count_flops",
    "evaluate",
    "lookahead",
    "route",
    "routing_loss",
    "set_capacity",
    "supported_architectures",
    "update_routers",
]
