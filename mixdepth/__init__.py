"""Mixture-of-Depths for PyTorch and Hugging Face transformers."""

from mixdepth.compare import Comparison, evaluate_runs
from mixdepth.config import DepthConfig
from mixdepth.data import Corpus, load_corpus
from mixdepth.encoder import MixtureOfDepths
from mixdepth.evaluation import Calibration, Evaluation, LayerRouting, calibrate, evaluate
from mixdepth.experts import ExpertLoad
from mixdepth.flops import FlopCount, count_flops, find_shape
from mixdepth.generation import generate
from mixdepth.hf import UpdateRouters, route, set_capacity, supported_architectures
from mixdepth.loading import load
from mixdepth.routed import Routed, routing_loss
from mixdepth.router import Router, lookahead, update_routers
from mixdepth.routing import Route
from mixdepth.run import Run
from mixdepth.settings import TrainConfig
from mixdepth.training import train

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Comparison",
    "Corpus",
    "DepthConfig",
    "Evaluation",
    "ExpertLoad",
    "FlopCount",
    "LayerRouting",
    "MixtureOfDepths",
    "Route",
    "Routed",
    "Router",
    "Run",
    "TrainConfig",
    "UpdateRouters",
    "calibrate",
    "count_flops",
    "evaluate",
    "evaluate_runs",
    "find_shape",
    "generate",
    "load",
    "load_corpus",
    "lookahead",
    "route",
    "routing_loss",
    "set_capacity",
    "supported_architectures",
    "train",
    "update_routers",
]
