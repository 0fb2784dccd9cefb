"""Mixture-of-Depths for PyTorch and Hugging Face transformers.

Names are imported when they are first used, so that `import mixdepth` by itself costs next to nothing.
"""

from typing import TYPE_CHECKING

from mixdepth.announcing import announce
from mixdepth.lazy import lazily
from mixdepth.version import __version__ as __version__

if TYPE_CHECKING:
    from mixdepth.bench.measure import measure_speed as measure_speed
    from mixdepth.bench.speeds import Speeds as Speeds
    from mixdepth.block import Routed as Routed
    from mixdepth.block import routing_loss as routing_loss
    from mixdepth.config import DepthConfig as DepthConfig
    from mixdepth.config import ExpertConfig as ExpertConfig
    from mixdepth.conversion.converting import Conversion as Conversion
    from mixdepth.conversion.converting import convert as convert
    from mixdepth.conversion.fitting_routers import fit_routers as fit_routers
    from mixdepth.conversion.importance import layer_costs as layer_costs
    from mixdepth.data.corpus import Corpus as Corpus
    from mixdepth.data.corpus import load_corpus as load_corpus
    from mixdepth.encoder import MixtureOfDepths as MixtureOfDepths
    from mixdepth.evaluation.calibration import Calibration as Calibration
    from mixdepth.evaluation.calibration import calibrate as calibrate
    from mixdepth.evaluation.comparison import Comparison as Comparison
    from mixdepth.evaluation.comparison import evaluate_runs as evaluate_runs
    from mixdepth.evaluation.held_out import Evaluation as Evaluation
    from mixdepth.evaluation.held_out import LayerRouting as LayerRouting
    from mixdepth.evaluation.held_out import evaluate as evaluate
    from mixdepth.evaluation.tracing import Trace as Trace
    from mixdepth.evaluation.tracing import trace as trace
    from mixdepth.experts import ExpertLoad as ExpertLoad
    from mixdepth.hf.install import route as route
    from mixdepth.hf.install import set_capacity as set_capacity
    from mixdepth.hf.install import supported_architectures as supported_architectures
    from mixdepth.hf.install import unroute as unroute
    from mixdepth.hf.lora import lora_config as lora_config
    from mixdepth.hf.router_updates import UpdateRouters as UpdateRouters
    from mixdepth.models.flops import FlopCount as FlopCount
    from mixdepth.models.flops import count_flops as count_flops
    from mixdepth.models.fresh import find_shape as find_shape
    from mixdepth.models.loading import load as load
    from mixdepth.modes import given_scores as given_scores
    from mixdepth.modes import lookahead as lookahead
    from mixdepth.modes import observe as observe
    from mixdepth.modes import update_routers as update_routers
    from mixdepth.report.page import write_page as write_page
    from mixdepth.router import Observation as Observation
    from mixdepth.router import Router as Router
    from mixdepth.routes import Route as Route
    from mixdepth.runs.run import Run as Run
    from mixdepth.runs.settings import TrainConfig as TrainConfig
    from mixdepth.sampling.generation import generate as generate
    from mixdepth.training.job import train as train
    from mixdepth.training.tuning import tune as tune


PLACES = {
    "Calibration": "mixdepth.evaluation.calibration",
    "Comparison": "mixdepth.evaluation.comparison",
    "Conversion": "mixdepth.conversion.converting",
    "Corpus": "mixdepth.data.corpus",
    "DepthConfig": "mixdepth.config",
    "Evaluation": "mixdepth.evaluation.held_out",
    "ExpertConfig": "mixdepth.config",
    "ExpertLoad": "mixdepth.experts",
    "FlopCount": "mixdepth.models.flops",
    "LayerRouting": "mixdepth.evaluation.held_out",
    "MixtureOfDepths": "mixdepth.encoder",
    "Observation": "mixdepth.router",
    "Route": "mixdepth.routes",
    "Routed": "mixdepth.block",
    "Router": "mixdepth.router",
    "Run": "mixdepth.runs.run",
    "Speeds": "mixdepth.bench.speeds",
    "Trace": "mixdepth.evaluation.tracing",
    "TrainConfig": "mixdepth.runs.settings",
    "UpdateRouters": "mixdepth.hf.router_updates",
    "calibrate": "mixdepth.evaluation.calibration",
    "convert": "mixdepth.conversion.converting",
    "count_flops": "mixdepth.models.flops",
    "evaluate": "mixdepth.evaluation.held_out",
    "evaluate_runs": "mixdepth.evaluation.comparison",
    "find_shape": "mixdepth.models.fresh",
    "fit_routers": "mixdepth.conversion.fitting_routers",
    "generate": "mixdepth.sampling.generation",
    "given_scores": "mixdepth.modes",
    "layer_costs": "mixdepth.conversion.importance",
    "load": "mixdepth.models.loading",
    "load_corpus": "mixdepth.data.corpus",
    "lookahead": "mixdepth.modes",
    "lora_config": "mixdepth.hf.lora",
    "measure_speed": "mixdepth.bench.measure",
    "observe": "mixdepth.modes",
    "route": "mixdepth.hf.install",
    "routing_loss": "mixdepth.block",
    "set_capacity": "mixdepth.hf.install",
    "supported_architectures": "mixdepth.hf.install",
    "trace": "mixdepth.evaluation.tracing",
    "train": "mixdepth.training.job",
    "tune": "mixdepth.training.tuning",
    "unroute": "mixdepth.hf.install",
    "update_routers": "mixdepth.modes",
    "write_page": "mixdepth.report.page",
}

__all__ = [*PLACES]
__getattr__, __dir__ = lazily(PLACES, globals())
announce()
