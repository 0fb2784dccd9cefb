"""`measure_speed`: training, prefill, decoding and cache of a routed model against a dense one, on this machine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mixdepth import schemes
from mixdepth.bench.bounds import Work, decode_work, last_logits, prefill_work, share_taken, step_work, tokens_taken
from mixdepth.bench.speeds import Cache, Machine, Speed, Speeds
from mixdepth.bench.timing import Spread, decode_in_turns, interleave, memory_bandwidth
from mixdepth.config import check_integer
from mixdepth.evaluation.batches import evaluating
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.machine import describe_machine, matmul_peak
from mixdepth.models.loading import positions
from mixdepth.router import Chooser

SHORT_PROMPT = 16
LONG_PROMPT = 1000
TRAIN_CONTEXT = 512
"""Numbers of tokens in prompts and training windows by default, if the model takes as many."""

ANCESTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
"""Sampling from the model's own distribution, with nothing on top of it that would take time."""


def measure_speed(
    dense: Any,
    routed: Any,
    text: Tensor | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8),
    prompts: Sequence[int] | None = None,
    new_tokens: int = 64,
    train_batch_size: int = 4,
    train_context: int | None = None,
    repeats: int = 5,
    notes: Sequence[str] = (),
) -> Speeds:
    """Time two causal language models against each other, and count the least work that each of them has.

    Three things are timed:

    - a training step (forward, backward, AdamW) over `train_batch_size` windows of `train_context` tokens, unless
      `train_batch_size` is 0;
    - prefill of the longest of the `prompts` (lengths), in each of the `batch_sizes`;
    - decoding of `new_tokens` after each of the `prompts` by generate(), in each of the `batch_sizes`.

    By default windows have 512 tokens and prompts 16 and 1,000, or as many as the models have positions for. They are
    cut from `text` (tokens,), or are random. The models take turns, after a round that warms up. Both are left as they
    were.
    """
    # 1. Fill in the lengths, and check them.
    models = {"dense": dense, "routed": routed}
    room = min(positions(unwrapped(model)) for model in models.values())
    if prompts is None:
        prompts = _default_prompts(room, new_tokens)
    if train_context is None:
        train_context = min(TRAIN_CONTEXT, room)
    _check(batch_sizes, prompts, new_tokens, train_batch_size, train_context, repeats, room)
    cut = _cutter(text, models)
    # 2. Time one thing after the other.
    num_comparisons = len(batch_sizes) * (1 + len(prompts))
    if train_batch_size:
        num_comparisons += 1
    rows = []
    with (
        tqdm(total=2 * (repeats + 1) * num_comparisons, desc="training step", leave=False) as bar,
        evaluating(dense),
        evaluating(routed),
        torch.random.fork_rng(),
    ):
        if train_batch_size:
            rows.append(_training_step(models, cut(train_batch_size, train_context), repeats, bar))
        for what, lengths, measure in (("prefill", [max(prompts)], _prefill), ("decode", prompts, _decode)):
            bar.set_description(what)
            for batch_size in batch_sizes:
                for length in lengths:
                    rows.append(measure(models, cut(batch_size, length), new_tokens, repeats, bar))
    # 3. Say what was measured on what.
    descriptions = {}
    for kind, model in models.items():
        plain = unwrapped(model)
        descriptions[kind] = {"class": type(plain).__name__, "parameters": plain.num_parameters()}
    return Speeds(
        machine=_machine(dense),
        models=descriptions,
        repeats=repeats,
        rows=rows,
        notes=[*notes, *_notes(unwrapped(routed))],
    )


def _default_prompts(room: int, new_tokens: int) -> list[int]:
    longest = max(1, room - new_tokens - 1)
    return sorted({min(SHORT_PROMPT, longest), min(LONG_PROMPT, longest)})


def _check(
    batch_sizes: Sequence[int],
    prompts: Sequence[int],
    new_tokens: int,
    train_batch_size: int,
    train_context: int,
    repeats: int,
    room: int,
) -> None:
    check_integer("train_batch_size", train_batch_size, minimum=0)
    check_integer("train_context", train_context, minimum=2)
    check_integer("new_tokens", new_tokens, minimum=1)
    check_integer("repeats", repeats, minimum=1)
    for name, values in {"batch_sizes": batch_sizes, "prompts": prompts}.items():
        if not values:
            raise ValueError(f"{name} must name at least one number")
        for value in values:
            check_integer(name, value, minimum=1)
    if train_batch_size and train_context > room:
        raise ValueError(f"train_context={train_context} is beyond the models' {room} positions: choose a shorter one")
    if max(prompts) + new_tokens >= room:
        raise ValueError(
            f"a prompt of {max(prompts)} tokens and new_tokens={new_tokens} are beyond the models' {room} positions: "
            "choose shorter ones"
        )


def _cutter(text: Tensor | None, models: dict[str, Any]) -> Callable[[int, int], Tensor]:
    """Return a function that cuts a number of evenly spaced windows of a length from the text: (number, length)."""
    vocab_size = min(m.config.get_text_config(decoder=True).vocab_size for m in models.values())
    device = next(models["dense"].parameters()).device

    def cut(number: int, length: int) -> Tensor:
        if text is None:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(vocab_size, (number, length), generator=generator).to(device)
        if len(text) < length:
            raise ValueError(f"the text has {len(text)} tokens, fewer than a window of {length}: give more text")
        starts = torch.linspace(0, len(text) - length, number).long().tolist()
        windows = torch.stack([text[start : start + length] for start in starts]).long()
        if windows.max() >= vocab_size:
            raise ValueError(f"the text has a token {windows.max()}, and the models have {vocab_size} tokens")
        return windows.to(device)

    return cut


def _training_step(models: dict[str, Any], ids: Tensor, repeats: int, bar: tqdm) -> Speed:
    for kind, model in models.items():
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"no parameter of the {kind} model can be trained: leave training out (train_batch_size=0)"
            )
        if unwrapped(model).dtype == torch.float16:
            raise ValueError(
                f"the {kind} model is in float16, in which a training step overflows: leave training out "
                "(train_batch_size=0), or load it in float32 or bfloat16"
            )
    with _training_steps(models["dense"]) as dense_step, _training_steps(models["routed"]) as routed_step:
        steps = {"dense": lambda: dense_step(ids), "routed": lambda: routed_step(ids)}
        seconds = interleave(steps, repeats, bar)
    plain = {kind: unwrapped(model) for kind, model in models.items()}
    works = {kind: step_work(model, *ids.shape) for kind, model in plain.items()}
    capacities = [router.capacity for router in getattr(plain["routed"], "depth_routers", ())]
    share = sum(capacities) / len(capacities) if capacities else None
    return _comparison("training step", ids, ids.numel(), seconds, works, share)


@contextmanager
def _training_steps(model: Any) -> Iterator[Callable[[Tensor], None]]:
    """Give a function that takes a training step at a learning rate of 0, so that it changes no weight."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    choosers = [module for module in model.modules() if isinstance(module, Chooser)]
    gradients = [parameter.grad for parameter in parameters]
    observed = [chooser.observed for chooser in choosers]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    optimizer.zero_grad()

    def step(ids: Tensor) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    try:
        yield step
    finally:
        model.eval()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for chooser, before in zip(choosers, observed, strict=True):
            chooser.observed = before


@torch.no_grad()
def _prefill(models: dict[str, Any], ids: Tensor, new_tokens: int, repeats: int, bar: tqdm) -> Speed:
    plain = {kind: unwrapped(model) for kind, model in models.items()}

    def prefill(kind: str) -> Callable[[], object]:
        return lambda: models[kind](input_ids=ids, use_cache=True, **last_logits(plain[kind]))

    seconds = interleave({kind: prefill(kind) for kind in models}, repeats, bar)
    masks = {kind: tokens_taken(model, ids) for kind, model in plain.items()}
    works = {kind: prefill_work(model, masks[kind]) for kind, model in plain.items()}
    share = share_taken(plain["routed"], masks["routed"])
    return _comparison("prefill", ids, ids.numel(), seconds, works, share)


def _decode(models: dict[str, Any], prompt: Tensor, new_tokens: int, repeats: int, bar: tqdm) -> Speed:
    # 1. Decode in turns, and keep the last text of each model with its cache.
    texts = decode_in_turns(models, prompt, new_tokens, repeats, bar=bar, **ANCESTRAL)
    batch_size, length = prompt.shape
    num_tokens = batch_size * new_tokens
    seconds = {}
    masks = {}
    works = {}
    caches = {}
    for kind, model in models.items():
        last = texts[kind][-1]
        seconds[kind] = [num_tokens / text.tokens_per_second for text in texts[kind]]
        caches[kind] = last.cache
        # 2. Count the work of that text. Its last token has not been through the model.
        masks[kind] = tokens_taken(unwrapped(model), last.ids[:, :-1])
        works[kind] = decode_work(unwrapped(model), masks[kind], length, last.cache)
    share = share_taken(unwrapped(models["routed"]), [mask[:, length:] for mask in masks["routed"]])
    cache = Cache(dense=caches["dense"].held, routed=caches["routed"].held, routed_allocated=caches["routed"].allocated)
    return _comparison("decode", prompt, num_tokens, seconds, works, share, cache)


def _comparison(
    what: str,
    ids: Tensor,
    num_tokens: int,
    seconds: dict[str, list[float]],
    works: dict[str, Work],
    taken: float | None,
    cache: Cache | None = None,
) -> Speed:
    """Turn the seconds of both models into speeds, and compare them pair by pair."""
    dense_speeds = [num_tokens / each for each in seconds["dense"]]
    routed_speeds = [num_tokens / each for each in seconds["routed"]]
    return Speed(
        what=what,
        batch_size=ids.shape[0],
        context=ids.shape[1],
        dense=Spread.of(dense_speeds),
        routed=Spread.of(routed_speeds),
        speed_up=Spread.of_ratios(routed_speeds, dense_speeds),
        dense_work=works["dense"],
        routed_work=works["routed"],
        taken=taken,
        seconds=Spread.of(seconds["dense"]).median,
        cache=cache,
    )


def _machine(model: Any) -> Machine:
    device = next(model.parameters()).device
    return Machine(
        name=describe_machine(device),
        dtype=str(model.dtype).removeprefix("torch."),
        flops_per_second=matmul_peak(device, model.dtype),
        bytes_per_second=memory_bandwidth(device),
    )


def _notes(routed: Any) -> list[str]:
    if not isinstance(routed, RoutedCausalLM) or not routed.depth_routers:
        return []
    is_whole = all(router.capacity == 1 for router in routed.depth_routers)
    if not is_whole or schemes.processes_everything(routed.depth_config.scheme):
        return []
    return ["the routed model stands at capacity 1: every token passes; mixdepth tune leads it down"]
