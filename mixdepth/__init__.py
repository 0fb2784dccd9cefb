"""Mixture-of-Depths for PyTorch and Hugging Face transformers."""

# ruff: noqa: E402
import logging

# Where bitsandbytes is installed, transformers imports it, and on a CPU it warns of a kernel that nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from mixdepth.adapters import lora_config
from mixdepth.bench import Speeds, measure_speed
from mixdepth.compare import Comparison, evaluate_runs
from mixdepth.config import DepthConfig
from mixdepth.conversion import Conversion, convert
from mixdepth.data import Corpus, load_corpus
from mixdepth.encoder import MixtureOfDepths
from mixdepth.evaluation import Calibration, Evaluation, LayerRouting, calibrate, evaluate
from mixdepth.experts import ExpertLoad
from mixdepth.flops import FlopCount, count_flops, find_shape
from mixdepth.generation import generate
from mixdepth.hf import UpdateRouters, route, set_capacity, supported_architectures, unroute
from mixdepth.importance import fit_routers, layer_costs
from mixdepth.loading import load
from mixdepth.report.page import write_page
from mixdepth.routed import Routed, routing_loss
from mixdepth.router import Router, lookahead, update_routers
from mixdepth.routing import Route
from mixdepth.run import Run
from mixdepth.settings import TrainConfig
from mixdepth.trace import Trace, trace
from mixdepth.training import train
from mixdepth.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Comparison",
    "Conversion",
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
    "Speeds",
    "Trace",
    "TrainConfig",
    "UpdateRouters",
    "calibrate",
    "convert",
    "count_flops",
    "evaluate",
    "evaluate_runs",
    "find_shape",
    "fit_routers",
    "generate",
    "layer_costs",
    "load",
    "load_corpus",
    "lookahead",
    "lora_config",
    "measure_speed",
    "route",
    "routing_loss",
    "set_capacity",
    "supported_architectures",
    "trace",
    "train",
    "tune",
    "unroute",
    "update_routers",
    "write_page",
]
