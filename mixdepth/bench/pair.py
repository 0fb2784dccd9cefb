"""Two models to compare, from the name of one or from a shape: dense, and routed with the same weights."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mixdepth.config import DepthConfig
from mixdepth.data.corpus import Corpus, load_corpus
from mixdepth.evaluation.calibration import has_thresholds, set_thresholds
from mixdepth.hf.install import route, unroute
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.loading import Loaded, load, positions
from mixdepth.models.shape import model_config
from mixdepth.runs.run import text_of, tokenizer_of
from mixdepth.runs.settings import CONVERT_DEFAULTS

CALIBRATED_ON, LENGTH = 4, 512
"""Windows by which new routers are set to their capacity, and the tokens in each."""
RANDOM_ROWS, RANDOM_LENGTH = 32, 128
"""The same for a fresh model, whose random texts differ by so much that a few do not tell its thresholds."""
MAX_TEXT = 2**20
INIT_STD = 0.1
"""Of a fresh model's weights: so large that tokens differ more than texts do, and every text gets its share."""
POSITIONS = 2**17
"""Of a fresh model; rotary ones take no memory."""
FRESH = "the routers are new and calibrated, not trained: this says how fast such a routing is, not how good"


class Pair(NamedTuple):
    """A dense model and a routed one, which share their weights."""

    dense: Any
    routed: RoutedCausalLM
    text: Tensor | None  # (tokens,); None is random tokens
    notes: list[str]


def fresh_pair(shape: dict[str, int], routing: dict[str, Any]) -> Pair:
    """A Llama of this shape, or a Mixtral if it has experts, with random weights for random tokens."""
    config = model_config(**shape, context=POSITIONS)
    config.initializer_range = INIT_STD
    depth = DepthConfig(**routing)
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    if torch.accelerator.is_available():
        dense = dense.to(torch.accelerator.current_accelerator())
    ids = torch.randint(config.vocab_size, (RANDOM_ROWS, RANDOM_LENGTH))
    return Pair(dense, _routed(dense, depth, ids), None, [])


def pair_of(name: str, routing: dict[str, Any], corpus: str | None = None) -> Pair:
    """A model by its name, and itself the other way: a routed one is unrouted, a plain one is routed.

    Text is the held-out part of the corpus: by default that of the run, or the standard library's source.
    """
    loaded = load(name)
    model = loaded.model
    if routing and isinstance(model, RoutedCausalLM):
        raise ValueError(f"{name!r} is routed already: leave out {next(iter(routing))}")
    notes = [loaded.note] if loaded.note else []
    text = _corpus(name, loaded, corpus)
    held_out = torch.from_numpy(text.validation.tokens[:MAX_TEXT].astype("int64"))
    if isinstance(model, RoutedCausalLM):
        return Pair(unroute(shared_copy(model)), model, held_out, notes)
    depth = DepthConfig(**{**CONVERT_DEFAULTS, **routing})
    windows = text.train.windows(min(LENGTH, positions(model), len(text.train.tokens))).spread(CALIBRATED_ON)
    (ids,) = windows.batches(CALIBRATED_ON)
    return Pair(model, _routed(model, depth, ids), held_out, [*notes, FRESH])


def shared_copy(model: Any) -> Any:
    """A copy of the model with the same weights, not equal ones: only what is put into it takes memory."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _routed(dense: Any, depth: DepthConfig, ids: Tensor) -> RoutedCausalLM:
    routed: RoutedCausalLM = route(shared_copy(dense), depth).eval()
    if has_thresholds(routed):
        set_thresholds(routed, [ids.to(next(dense.parameters()).device)])
    return routed


def _corpus(name: str, loaded: Loaded, corpus: str | None) -> Corpus:
    run = loaded.run
    if corpus is None and run is not None:
        return text_of(run)
    return load_corpus(corpus or "stdlib", tokenizer_of(name))
