"""`trace`: how a routed model routes a text, token by token, by its causal rule and with look-ahead.

Shapes: L routed layers, W windows in a pass, C tokens in a window, T tokens of the text.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.data.corpus import load_corpus
from mixdepth.data.tokenizers import token_texts
from mixdepth.evaluation.held_out import Interval, LayerRouting, evaluating, layer_routing, top_of_same_scores
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.models.loading import Loaded, load, positions
from mixdepth.modes import lookahead
from mixdepth.router import Router, weigh
from mixdepth.routes import Route, first_k, slots
from mixdepth.runs.run import text_of, tokenizer_of

MAX_TOKENS = 4096
"""A page with more would be slow to read and to scroll."""
LOGITS_AT_ONCE = 2**25
BLOCK = 32
"""Tokens that are drawn together in the bootstrap: neighbours are alike."""
NUM_TYPES, MIN_COUNT = 8, 3


class Pass(NamedTuple):
    """What one way of routing did with the text."""

    loss: float | None
    """Nats per token that was foretold; None if there was none."""
    surprise: list[float | None]
    """(T) nats: how unexpected each token was; None at the start of a window."""
    entropy: list[float]
    """(T) nats: how open the prediction made at each token is."""
    chosen: list[str]
    """(L) strings of T digits: 1 for a token that went through the layer."""
    best: list[str]
    """The same for what training would choose by the same scores: the top k, for expert choice."""
    scores: list[list[float | None]]
    """(L, T)"""
    guesses: list[list[float | None]] | None
    """(L, T): the predictor's, where there is one."""
    gates: list[list[float | None]]
    """(L, T): how far a token moves, or would if it were chosen; None where that is not known."""
    layers: list[LayerRouting]
    correlation: Interval | None
    """Spearman's, of how many layers a token went through and how open the prediction made at it is."""
    most: list[tuple[str, float, int]]
    """Token types that went through the most layers on average: text, layers, occurrences."""
    least: list[tuple[str, float, int]]

    def to_dict(self) -> dict[str, Any]:
        correlation = None if self.correlation is None else self.correlation._asdict()
        layers = [{**layer._asdict(), "f1": layer.f1} for layer in self.layers]
        return {**self._asdict(), "layers": layers, "correlation": correlation}


class Trace(NamedTuple):
    """A text and the routes of its tokens."""

    name: str
    model: str
    settings: dict[str, Any]
    """Of the routing."""
    layers: list[int]
    """Which layers decide."""
    num_layers: int
    capacities: list[float]
    tokens: list[str]
    context: int
    """Tokens in a window; each window is read afresh."""
    num_given: int
    """Tokens of the prompt, where the rest was generated; else all."""
    note: str
    causal: Pass
    lookahead: Pass

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "causal": self.causal.to_dict(), "lookahead": self.lookahead.to_dict()}


def trace(
    model: Any, text: str | None = None, *, tokenizer: Any = None, context: int | None = None, name: str | None = None
) -> Trace:
    """Route a text: `trace("runs/mod", "def f(x):")`; without one, some of what the run has held out.

    `model` is a run, a folder or a name of the hub, or a model with its `tokenizer`. The text is read in windows of
    `context` tokens, by default as long as in training: over each of them look-ahead takes its top k.
    """
    if isinstance(model, str | os.PathLike):
        loaded = load(str(model))
    elif tokenizer is None or text is None:
        raise ValueError("a model that is given as an object needs its tokenizer and a text too")
    else:
        loaded = Loaded(model, tokenizer, None, "")
    if context is not None:
        check_integer("context", context, minimum=2)
        if context > positions(loaded.model):
            raise ValueError(f"context={context} is beyond the model's {positions(loaded.model)} positions: lower it")
    trained = 1024 if loaded.run is None else loaded.run.settings.context
    length = context or min(trained, positions(loaded.model))
    ids = _held_out(loaded, str(model)) if text is None else _tokens(loaded.tokenizer, text)
    title = name or (str(model) if isinstance(model, str | os.PathLike) else type(model).__name__)
    return trace_tokens(loaded.model, ids, loaded.tokenizer, context=length, name=title, note=loaded.note)


@torch.no_grad()
def trace_tokens(
    model: Any,
    ids: Sequence[int],
    tokenizer: Any,
    *,
    context: int = 1024,
    num_given: int | None = None,
    name: str = "the model",
    note: str = "",
) -> Trace:
    """The trace of a text that is tokens already."""
    model = unwrapped(model)
    check_routed(model, name)
    if not len(ids):
        raise ValueError("there is no text to route: it is empty")
    notes = [note] if note else []
    if len(ids) > MAX_TOKENS:
        notes.append(f"the first {MAX_TOKENS:,} of {len(ids):,} tokens")
    tokens = torch.tensor(list(ids[:MAX_TOKENS]), dtype=torch.long)  # (T,)
    texts = token_texts(tokenizer, tokens.tolist())
    passes = []
    with evaluating(model):
        for ahead in (False, True):
            with lookahead(model) if ahead else nullcontext():
                passes.append(_read(model, tokens, context, texts))
    size = f"{type(model).__name__}, {model.num_parameters():,} parameters"
    return Trace(
        name=name,
        model=size,
        settings=model.depth_config.to_dict(),
        layers=list(model.deciding_layers),
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        capacities=[router.capacity for router in model.depth_routers],
        tokens=texts,
        context=context,
        num_given=len(texts) if num_given is None else min(num_given, len(texts)),
        note="; ".join(notes),
        causal=passes[0],
        lookahead=passes[1],
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


def _held_out(loaded: Loaded, name: str) -> list[int]:
    """The beginning of the text that the run has held out, or of the standard library's."""
    text = load_corpus("stdlib", tokenizer_of(name)) if loaded.run is None else text_of(loaded.run)
    tokens: list[int] = text.validation.tokens[: MAX_TOKENS // 2].tolist()
    return tokens


def _read(model: RoutedCausalLM, tokens: Tensor, context: int, texts: list[str]) -> Pass:
    """Route the windows of the text one way."""
    device = next(model.parameters()).device
    routers: list[Router] = list(model.depth_routers)
    found: dict[str, list[Tensor]] = {name: [] for name in ("surprise", "entropy", "chosen", "best", "scores", "gates")}
    guesses: list[Tensor] = []
    size = max(1, LOGITS_AT_ONCE // (model.config.get_text_config(decoder=True).vocab_size * context))
    batches = list(_batches(tokens, context, size))
    for windows in tqdm(batches, desc="routing", unit="pass", leave=False, disable=len(batches) < 3):
        ids = windows.to(device)  # (W, C)
        out: Any = model(ids, output_routes=True, use_cache=False)
        surprise, entropy = _foretold(out.logits, ids)
        found["surprise"].append(surprise.flatten())
        found["entropy"].append(entropy.flatten())
        pairs = list(zip(routers, out.routes, strict=True))
        best = [_as_in_training(router, route) for router, route in pairs]
        found["chosen"].append(torch.stack([route.mask.flatten() for route in out.routes]))  # (L, W * C)
        found["best"].append(torch.stack([mask.flatten() for mask in best]))
        found["scores"].append(torch.stack([route.logits.flatten() for route in out.routes]))
        found["gates"].append(torch.stack([_gates(router, route).flatten() for router, route in pairs]))
        if all(route.predictor_logits is not None for route in out.routes):
            guesses.append(torch.stack([route.predictor_logits.flatten() for route in out.routes]))
    whole = {name: torch.cat(parts, -1).cpu() for name, parts in found.items()}
    chosen, best_all, entropy = whole["chosen"], whole["best"], whole["entropy"]
    depths = chosen.sum(0).numpy()  # (T,)
    counts = [(c.sum().item(), b.sum().item(), (c & b).sum().item()) for c, b in zip(chosen, best_all, strict=True)]
    ranked = _types(texts, depths)
    was_foretold = whole["surprise"][~whole["surprise"].isnan()]
    return Pass(
        loss=was_foretold.double().mean().item() if len(was_foretold) else None,
        surprise=_rounded(whole["surprise"]),
        entropy=_rounded(entropy),
        chosen=[_digits(mask) for mask in chosen],
        best=[_digits(mask) for mask in best_all],
        scores=[_rounded(row) for row in whole["scores"]],
        guesses=[_rounded(row) for row in torch.cat(guesses, -1).cpu()] if guesses else None,
        gates=[_rounded(row) for row in whole["gates"]],
        layers=[layer_routing(*layer, len(texts)) for layer in counts],
        correlation=rank_correlation(depths, entropy.numpy()),
        most=ranked[:NUM_TYPES],
        least=ranked[: -NUM_TYPES - 1 : -1],
    )


def _foretold(logits: Tensor, ids: Tensor, length: int = 128) -> tuple[Tensor, Tensor]:
    """How unexpected each token is, NaN for the first, and the entropy of the prediction made at it: (W, C) both.

    In parts of some columns, since log-probabilities (W, C, V) take as much memory as the logits.
    """
    targets = F.pad(ids[:, 1:], (0, 1))  # (W, C): what each token foretells
    losses, entropies = [], []
    for some, target in zip(logits.split(length, 1), targets.split(length, 1), strict=True):  # type: ignore
        logs = F.log_softmax(some.float(), -1)
        losses.append(-logs.gather(2, target[..., None])[..., 0])
        entropies.append(-(logs.exp() * logs).nan_to_num(0.0).sum(-1))
    return F.pad(torch.cat(losses, 1)[:, :-1], (1, 0), value=torch.nan), torch.cat(entropies, 1)


def _batches(tokens: Tensor, context: int, size: int) -> Iterator[Tensor]:
    """Windows (W, C) of the text in order; what does not fill one comes last, alone."""
    whole = len(tokens) // context * context
    if whole:
        yield from tokens[:whole].view(-1, context).split(size)  # type: ignore[no-untyped-call]
    if whole < len(tokens):
        yield tokens[whole:][None]


def _as_in_training(router: Router, route: Route) -> Tensor:
    """(W, C) bool: what training would choose by the scores of this route."""
    if router.scheme == "soft":
        return route.mask
    if router.scheme == "token_choice":
        return first_k(route.candidates & (route.logits > router.cutoff), slots(router.capacity, route.real.sum(1)))
    return top_of_same_scores(route, router.capacity)


def _gates(router: Router, route: Route) -> Tensor:
    """(W, C): the weight of each token, or what it would be."""
    if router.scheme != "random":
        return weigh(route.logits, router.gate)
    drawn = torch.full_like(route.logits, torch.nan)  # what is drawn by lot has a gate of its own, if it is drawn
    return drawn.scatter(1, route.index, route.weight.to(drawn.dtype).where(route.used, torch.nan))


def rank_correlation(x: np.ndarray, y: np.ndarray, draws: int = 1000) -> Interval | None:
    """Spearman's correlation with its 95 % interval, from a bootstrap over blocks of neighbouring tokens; None where
    one of the two does not vary.

    >>> rank_correlation(np.arange(9.0), np.arange(9.0) ** 3)
    Interval(mean=1.0, low=None, high=None)
    """
    ranks = np.stack([_ranks(x), _ranks(y)])  # (2, T)
    if not ranks.std(axis=1).all():
        return None
    value = float(round(np.corrcoef(ranks)[0, 1], 12))
    blocks = np.array_split(ranks, max(1, round(len(x) / BLOCK)), axis=1)
    if len(blocks) < 8:
        return Interval(value, None, None)
    drawn = np.random.default_rng(0).integers(len(blocks), size=(draws, len(blocks)))
    samples = [np.concatenate([blocks[block] for block in row], axis=1) for row in drawn]
    if not all(sample.std(axis=1).all() for sample in samples):  # too rare to say how sure it is
        return Interval(value, None, None)
    low, high = np.quantile([np.corrcoef(sample)[0, 1] for sample in samples], [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, of equals their mean."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[where]


def _types(texts: list[str], depths: np.ndarray) -> list[tuple[str, float, int]]:
    """Token types that occur often enough, from most to least processed: text, mean depth, occurrences."""
    seen: dict[str, list[int]] = {}
    for text, depth in zip(texts, depths.tolist(), strict=True):
        seen.setdefault(text, []).append(depth)
    types = [(text, round(sum(d) / len(d), 3), len(d)) for text, d in seen.items() if len(d) >= MIN_COUNT]
    return sorted(types, key=lambda entry: (-entry[1], -entry[2], entry[0]))


def _digits(mask: Tensor) -> str:
    return "".join("1" if chosen else "0" for chosen in mask.tolist())


def _rounded(values: Tensor) -> list[Any]:
    """Four digits, and None for what is no number: JSON has no other way to say so."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]
