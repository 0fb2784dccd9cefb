"""Two models to compare, a dense and a routed one with the same weights, from the name of one or from a shape."""

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
from mixdepth.runs.run import tokenizer_of
from mixdepth.runs.settings import CONVERT_DEFAULTS

NUM_WINDOWS = 4
WINDOW_LENGTH = 512
"""The text that new routers are calibrated on: the number of windows, and the number of tokens in each."""

NUM_RANDOM_WINDOWS = 32
RANDOM_WINDOW_LENGTH = 128
"""The same for a fresh model. Its random texts differ so much that thresholds from a few of them would be wrong."""

MAX_TEXT = 2**20
"""The most tokens of held-out text that prompts and training windows are cut from."""

INIT_STD = 0.1
"""The scale of a fresh model's weights. With smaller weights, scores would vary more between texts than between tokens,
and some texts would get no routed tokens."""

POSITIONS = 2**17
"""The number of positions of a fresh model. They are rotary, so they take no memory."""

NOT_TRAINED = "the routers are new and calibrated, not trained: this says how fast such a routing is, not how good"


class Pair(NamedTuple):
    """A dense model and a routed one, which share their weights."""

    dense: Any
    routed: RoutedCausalLM
    text: Tensor | None
    """(tokens,) to cut prompts from; None for random tokens."""
    notes: list[str]


def fresh_pair(shape: dict[str, int], routing: dict[str, Any]) -> Pair:
    """Make a Llama of this shape (a Mixtral if it has experts) with random weights, for random tokens."""
    config = model_config(**shape, context=POSITIONS)
    config.initializer_range = INIT_STD
    depth = DepthConfig.from_flat(**routing)
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    if torch.accelerator.is_available():
        dense = dense.to(torch.accelerator.current_accelerator())
    ids = torch.randint(config.vocab_size, (NUM_RANDOM_WINDOWS, RANDOM_WINDOW_LENGTH))
    return Pair(dense=dense, routed=_routed(dense, depth, ids), text=None, notes=[])


def pair_of(name: str, routing: dict[str, Any], corpus: str | None = None) -> Pair:
    """Load a model, and make its counterpart: a routed model is unrouted for it, a plain one is routed.

    The text is the held-out part of the corpus: by default that of the run, or the standard library's source.
    """
    loaded = load(name)
    model = loaded.model
    if routing and isinstance(model, RoutedCausalLM):
        raise ValueError(f"{name!r} is routed already: leave out {next(iter(routing))}")
    notes = [loaded.note] if loaded.note else []
    text = _corpus(name, loaded, corpus)
    held_out = torch.from_numpy(text.validation.tokens[:MAX_TEXT].astype("int64"))  # (tokens,)
    if isinstance(model, RoutedCausalLM):
        return Pair(dense=unroute(shared_copy(model)), routed=model, text=held_out, notes=notes)
    depth = DepthConfig.from_flat(**{**CONVERT_DEFAULTS, **routing})
    length = min(WINDOW_LENGTH, positions(model), len(text.train.tokens))
    windows = text.train.windows(length).spread(NUM_WINDOWS)
    (ids,) = windows.batches(NUM_WINDOWS)  # (NUM_WINDOWS, length)
    return Pair(dense=model, routed=_routed(model, depth, ids), text=held_out, notes=[*notes, NOT_TRAINED])


def shared_copy(model: Any) -> Any:
    """Copy the model without its weights, which both copies share: only new parts take memory."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _routed(dense: Any, depth: DepthConfig, ids: Tensor) -> RoutedCausalLM:
    routed: RoutedCausalLM = route(shared_copy(dense), depth).eval()
    if has_thresholds(routed):
        set_thresholds(routed, [ids.to(next(dense.parameters()).device)])
    return routed


def _corpus(name: str, loaded: Loaded, corpus: str | None) -> Corpus:
    run = loaded.run
    if corpus is None and run is not None:
        return run.corpus()
    return load_corpus(corpus or "stdlib", tokenizer_of(name))
