"""`trace`: how a routed model routes a text, token by token, by its causal rule and with look-ahead.

Shapes: L routed layers, W windows in a pass, C tokens in a window, T tokens of the text, V tokens of the vocabulary.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from mixdepth import schemes
from mixdepth.config import check_integer
from mixdepth.data.corpus import load_corpus
from mixdepth.data.tokenizers import token_texts
from mixdepth.evaluation.batches import evaluating
from mixdepth.evaluation.held_out import LayerRouting, layer_routing, top_of_same_scores
from mixdepth.evaluation.intervals import Interval, rank_correlation
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.models.loading import Loaded, load, positions
from mixdepth.modes import lookahead
from mixdepth.router import Router, weigh
from mixdepth.routes import Route, first_k, slots
from mixdepth.runs.run import tokenizer_of

MAX_TOKENS = 4096
"""The most tokens that a trace holds. A page with more would be slow to read and to scroll."""

LOGITS_AT_ONCE = 2**25
"""The most logits that one pass may compute; it limits how many windows are read together."""

DEFAULT_CONTEXT = 1024
"""The length of a window for a model that is not a run, if it has so many positions."""

NUM_TYPES = 8
"""How many of the most and least processed token types a trace names."""

MIN_COUNT = 3
"""How often a token type must occur to be among them."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one way of routing did with the text."""

    loss: float | None
    """Nats per predicted token; None if no token was predicted."""
    surprise: list[float | None]
    """(T) nats: the negative log-probability of each token; None at the start of a window."""
    entropy: list[float]
    """(T) nats: the entropy of the prediction that the model makes at each token."""
    chosen: list[str]
    """(L) strings of T digits: 1 for a token that went through the layer."""
    best: list[str]
    """The same for what training would choose by the same scores: the top k, for expert choice."""
    scores: list[list[float | None]]
    """(L, T): the scores of the router."""
    guesses: list[list[float | None]] | None
    """(L, T): the scores of the predictor, where there is one."""
    gates: list[list[float | None]]
    """(L, T): how far a token moves, or would if it were chosen; None where that is not known."""
    layers: list[LayerRouting]
    correlation: Interval | None
    """Spearman's correlation of the number of layers that a token went through with the entropy at it."""
    most: list[tuple[str, float, int]]
    """Token types that went through the most layers on average: text, mean number of layers, occurrences."""
    least: list[tuple[str, float, int]]
    """The same for those that went through the fewest."""

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["layers"] = [layer.to_dict() for layer in self.layers]
        values["correlation"] = None if self.correlation is None else self.correlation.to_dict()
        return values


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A text and the routes of its tokens."""

    name: str
    model: str
    """The class of the model and its number of parameters."""
    settings: dict[str, Any]
    """The settings of the routing, as in `DepthConfig.to_dict`."""
    layers: list[int]
    """The indices of the layers that decide."""
    num_layers: int
    """The number of all layers of the model."""
    capacities: list[float]
    """The configured capacity of each layer that decides."""
    tokens: list[str]
    """(T) the texts of the tokens."""
    context: int
    """The number of tokens in a window. The model reads each window by itself."""
    num_given: int
    """The number of tokens of the prompt if the rest was generated, else of all tokens."""
    note: str
    causal: Pass
    lookahead: Pass

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["causal"] = self.causal.to_dict()
        values["lookahead"] = self.lookahead.to_dict()
        return values


def trace(
    model: Any, text: str | None = None, *, tokenizer: Any = None, context: int | None = None, name: str | None = None
) -> Trace:
    """Route a text, as in `trace("runs/mod", "def f(x):")`. Without a text, take some that the run has held out.

    `model` is a run, a folder or a name of the hub, or a model object with its `tokenizer`. The model reads the text in
    windows of `context` tokens, by default as long as in training; look-ahead takes its top k over each window.
    """
    # 1. Load the model.
    is_name = isinstance(model, str | os.PathLike)
    if is_name:
        loaded = load(str(model))
    elif tokenizer is None or text is None:
        raise ValueError("a model that is given as an object needs its tokenizer and a text too")
    else:
        loaded = Loaded(model, tokenizer, None, "")
    # 2. Choose the length of a window.
    longest = positions(loaded.model)
    if context is not None:
        check_integer("context", context, minimum=2)
        if context > longest:
            raise ValueError(f"context={context} is beyond the model's {longest} positions: lower it")
    default_context = DEFAULT_CONTEXT if loaded.run is None else loaded.run.settings.context
    length = context or min(default_context, longest)
    # 3. Make tokens of the text, and route them.
    if text is None:
        ids = _held_out_tokens(loaded, str(model))
    else:
        ids = _tokens(loaded.tokenizer, text)
    default_name = str(model) if is_name else type(model).__name__
    return trace_tokens(
        loaded.model, ids, loaded.tokenizer, context=length, name=name or default_name, note=loaded.note
    )


@torch.no_grad()
def trace_tokens(
    model: Any,
    ids: Sequence[int],
    tokenizer: Any,
    *,
    context: int = DEFAULT_CONTEXT,
    num_given: int | None = None,
    name: str = "the model",
    note: str = "",
) -> Trace:
    """Route a text that consists of tokens already."""
    model = unwrapped(model)
    check_routed(model, name)
    if not len(ids):
        raise ValueError("there is no text to route: it is empty")
    if len(ids) > MAX_TOKENS:
        cut = f"the first {MAX_TOKENS:,} of {len(ids):,} tokens"
        note = f"{note}; {cut}" if note else cut
    tokens = torch.tensor(list(ids[:MAX_TOKENS]), dtype=torch.long)  # (T,)
    texts = token_texts(tokenizer, tokens.tolist())
    passes = []
    with evaluating(model):
        for mode in (nullcontext(), lookahead(model)):
            with mode:
                passes.append(_read(model, tokens, context, texts))
    causal, ahead = passes
    num_tokens = len(texts)
    if num_given is None or num_given > num_tokens:
        num_given = num_tokens
    return Trace(
        name=name,
        model=f"{type(model).__name__}, {model.num_parameters():,} parameters",
        settings=model.depth_config.to_dict(),
        layers=list(model.deciding_layers),
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        capacities=[router.capacity for router in model.depth_routers],
        tokens=texts,
        context=context,
        num_given=num_given,
        note=note,
        causal=causal,
        lookahead=ahead,
    )


def check_routed(model: Any, name: str) -> None:
    """Refuse a model without routes."""
    if not (isinstance(model, RoutedCausalLM) and model.depth_routers):
        raise ValueError(f"{name!r} has no routed layers: there are no routes to show")


def _tokens(tokenizer: Any, text: str) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text cannot be written in UTF-8 ({error.reason}): give another") from error
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _held_out_tokens(loaded: Loaded, name: str) -> list[int]:
    """Return the beginning of the text that the run has held out, or of the standard library's."""
    if loaded.run is None:
        text = load_corpus("stdlib", tokenizer_of(name))
    else:
        text = loaded.run.corpus()
    tokens: list[int] = text.validation.tokens[: MAX_TOKENS // 2].tolist()
    return tokens


def _read(model: RoutedCausalLM, tokens: Tensor, context: int, texts: list[str]) -> Pass:
    """Route the tokens (T,) of a text in one way, and describe the result."""
    # 1. Route the windows, several in a pass.
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    windows_at_once = max(1, LOGITS_AT_ONCE // (vocab_size * context))
    batches = list(_batches(tokens, context, windows_at_once))
    parts = []
    for windows in tqdm(batches, desc="routing", unit="pass", leave=False, disable=len(batches) < 3):
        parts.append(_route_windows(model, windows.to(device)))
    whole = {}  # (T,) or (L, T) each
    for name in parts[0]:
        whole[name] = torch.cat([part[name] for part in parts], -1).cpu()
    # 2. Count what each layer chose.
    layers = []
    for chosen, best in zip(whole["chosen"], whole["best"], strict=True):  # (T,) each
        both = (chosen & best).sum().item()
        layers.append(layer_routing(chosen.sum().item(), best.sum().item(), both, len(texts)))
    # 3. Say which tokens went through many layers, and which through few.
    depths = whole["chosen"].sum(0).numpy()  # (T,): the number of layers that each token went through
    types = token_types(texts, depths)
    # 4. The loss is the mean over predicted tokens; the first token of a window is not predicted.
    surprise = whole["surprise"]  # (T,)
    predicted = surprise[~surprise.isnan()]
    loss = predicted.double().mean().item() if len(predicted) else None
    guesses = None
    if "guesses" in whole:
        guesses = _rounded_rows(whole["guesses"])
    return Pass(
        loss=loss,
        surprise=_rounded(surprise),
        entropy=_rounded(whole["entropy"]),
        chosen=_digits(whole["chosen"]),
        best=_digits(whole["best"]),
        scores=_rounded_rows(whole["scores"]),
        guesses=guesses,
        gates=_rounded_rows(whole["gates"]),
        layers=layers,
        correlation=rank_correlation(depths, whole["entropy"].numpy()),
        most=types[:NUM_TYPES],
        least=types[: -NUM_TYPES - 1 : -1],
    )


def _route_windows(model: RoutedCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Route windows (W, C) in one pass; return what it says of their tokens, by name: (W * C,) or (L, W * C)."""
    routers: list[Router] = list(model.depth_routers)
    out: Any = model(ids, output_routes=True, use_cache=False)
    if out.logits.isnan().any():
        raise ValueError("the model computes NaN on this text: its weights or its config.json are damaged")
    routes: list[Route] = list(out.routes)
    surprise, entropy = _surprise_and_entropy(out.logits, ids)
    # Each of these lists has one tensor (W, C) for each layer. Guesses are empty unless there are predictors.
    by_layer: dict[str, list[Tensor]] = {"chosen": [], "best": [], "scores": [], "gates": [], "guesses": []}
    for router, route in zip(routers, routes, strict=True):
        by_layer["chosen"].append(route.mask)
        by_layer["best"].append(_as_in_training(router, route))
        by_layer["scores"].append(route.logits)
        by_layer["gates"].append(_gates(router, route))
        if route.predictor_logits is not None:
            by_layer["guesses"].append(route.predictor_logits)
    if len(by_layer["guesses"]) < len(routes):
        del by_layer["guesses"]
    values = {"surprise": surprise.flatten(), "entropy": entropy.flatten()}
    for name, tensors in by_layer.items():
        values[name] = torch.stack([tensor.flatten() for tensor in tensors])
    return values


def _surprise_and_entropy(logits: Tensor, ids: Tensor, length: int = 128) -> tuple[Tensor, Tensor]:
    """Return how unexpected each token is (NaN for the first), and the entropy of the prediction at it: (W, C) each.

    It works on `length` columns at a time, because log-probabilities (W, C, V) take as much memory as the logits.
    """
    targets = F.pad(ids[:, 1:], (0, 1))  # (W, C): the token that follows each token
    losses, entropies = [], []
    for some, target in zip(logits.split(length, 1), targets.split(length, 1), strict=True):  # type: ignore
        logs = F.log_softmax(some.float(), -1)  # (W, length, V)
        losses.append(-logs.gather(2, target[..., None])[..., 0])
        entropies.append(-(logs.exp() * logs).nan_to_num(0.0).sum(-1))
    surprise = F.pad(torch.cat(losses, 1)[:, :-1], (1, 0), value=torch.nan)
    return surprise, torch.cat(entropies, 1)


def _batches(tokens: Tensor, context: int, size: int) -> Iterator[Tensor]:
    """Yield windows (W, C) of the text in order; a last window that is shorter comes by itself."""
    whole = len(tokens) // context * context
    if whole:
        yield from tokens[:whole].view(-1, context).split(size)  # type: ignore[no-untyped-call]
    if whole < len(tokens):
        yield tokens[whole:][None]


def _as_in_training(router: Router, route: Route) -> Tensor:
    """Return what training would choose by the scores of this route: (W, C) bool."""
    if schemes.processes_everything(router.scheme):
        return route.mask
    if schemes.limits_in_stream_order(router.scheme):
        return first_k(route.candidates & (route.logits > router.cutoff), slots(router.capacity, route.real.sum(1)))
    return top_of_same_scores(route, router.capacity)


def _gates(router: Router, route: Route) -> Tensor:
    """Return the weight of each token, or what it would be: (W, C)."""
    if not schemes.uses_noise(router.scheme):
        return weigh(route.logits, router.gate)
    # Random routing knows the gate of the tokens that it drew, and of no other.
    unknown = torch.full_like(route.logits, torch.nan)  # (W, C)
    weights = route.weight.to(unknown.dtype).where(route.used, torch.nan)  # (W, K)
    return unknown.scatter(1, route.index, weights)


def token_types(texts: list[str], depths: np.ndarray) -> list[tuple[str, float, int]]:
    """Return token types that occur often enough, from most to least processed: text, mean depth, occurrences."""
    depths_of: dict[str, list[int]] = {}
    for text, depth in zip(texts, depths.tolist(), strict=True):
        depths_of.setdefault(text, []).append(depth)
    types = []
    for text, values in depths_of.items():
        if len(values) >= MIN_COUNT:
            types.append((text, round(sum(values) / len(values), 3), len(values)))
    return sorted(types, key=lambda entry: (-entry[1], -entry[2], entry[0]))


def _digits(masks: Tensor) -> list[str]:
    """Write each row of the masks (L, T) as a string of T digits."""
    return ["".join(map(str, row)) for row in masks.int().tolist()]


def _rounded_rows(rows: Tensor) -> list[list[Any]]:
    return [_rounded(row) for row in rows]


def _rounded(values: Tensor) -> list[Any]:
    """Round to four digits. NaN and infinity become None, because JSON has no numbers for them."""
    rounded: list[Any] = []
    for value in values.tolist():
        rounded.append(float(f"{value:.4g}") if math.isfinite(value) else None)
    return rounded
