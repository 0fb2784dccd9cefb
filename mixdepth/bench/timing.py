"""Clocks: functions that take turns, a decode without its prompt's time, and what the machine can do at best.

Shapes: B batch, T tokens, H heads, S stored tokens.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from mixdepth.hf.cache import RoutedCacheLayer

Result = TypeVar("Result")
MEMORY_BYTES = 2**28
"""How much memory is read to time it: more than most caches hold."""


class Spread(NamedTuple):
    """A median, and from where to where the values went.

    >>> f"{Spread.of([1.0, 3.0, 2.0]):.1f}"
    '2.0 (1.0 to 3.0)'
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> "Spread":
        """Of ratios taken pair by pair: what slows the machine down hits both of a pair."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def take_turns(
    functions: Mapping[str, Callable[[int], Result]], repeats: int, bar: tqdm | None = None
) -> dict[str, list[Result]]:
    """What each function returned, call by call. They take turns, so that a drift of the machine hits all alike.

    A function is told which round it is; round 0 warms up and is left out.
    """
    found: dict[str, list[Result]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            result = function(repeat)
            if repeat:
                found[name].append(result)
            if bar is not None:
                bar.update()
    return found


def interleave(
    functions: Mapping[str, Callable[[], object]], repeats: int, bar: tqdm | None = None
) -> dict[str, list[float]]:
    """Seconds of each call of each function, the functions taking turns."""

    def timed(function: Callable[[], object]) -> Callable[[int], float]:
        def seconds(_: int) -> float:
            start = time.perf_counter()
            function()
            wait()
            return time.perf_counter() - start

        return seconds

    return take_turns({name: timed(function) for name, function in functions.items()}, repeats, bar)


def wait() -> None:
    """Until the device is done with what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class CacheSize(NamedTuple):
    """What a key-value cache holds."""

    stored: tuple[int, ...]  # tokens of all rows in each layer
    token_bytes: tuple[int, ...]  # of one token's keys and values
    windows: tuple[int | None, ...]  # each layer's sliding window
    allocated: int  # bytes of all its tensors, with room that was made ahead

    @property
    def held(self) -> int:
        """Bytes of the keys and values of stored tokens."""
        return sum(number * size for number, size in zip(self.stored, self.token_bytes, strict=True))

    @classmethod
    def of(cls, cache: Any) -> "CacheSize":
        stored, token_bytes, allocated = [], [], 0
        for layer in cache.layers:
            tensors = [t for t in (layer.keys, layer.values) if t is not None]  # (B, H, S, width); None: nobody came
            token_bytes.append(sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors))
            allocated += sum(t.nbytes for t in tensors)
            if not isinstance(layer, RoutedCacheLayer):
                stored.append(tensors[0].shape[0] * tensors[0].shape[2] if tensors else 0)
                continue
            stored.append(sum(layer.lengths))
            allocated += 0 if layer.columns is None else layer.columns.nbytes
        windows = tuple(getattr(layer, "sliding_window", None) for layer in cache.layers)
        return cls(tuple(stored), tuple(token_bytes), windows, allocated)


class Decoded(NamedTuple):
    """A text that was sampled, and how fast."""

    tokens_per_second: float  # of all rows together
    ids: Tensor  # (B, T): prompt and new tokens; the last one has not been through the model
    cache: CacheSize


def decode(model: Any, prompt: Tensor, new_tokens: int, seed: int = 0, **sampling: Any) -> Decoded:
    """Sample after the prompt (B, T) by transformers' own generate(), with or without an end of text.

    The prompt's time is left out, and so is the first new token, which comes with it: `new_tokens` more are timed.
    """
    times: list[float] = []

    def note_time(ids: Tensor, scores: Any) -> Tensor:
        wait()
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    torch.manual_seed(seed)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else tokens that look like padding would be taken for it
        max_new_tokens=new_tokens + 1,
        min_new_tokens=new_tokens + 1,
        do_sample=True,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        stopping_criteria=[note_time],
        **sampling,
    )
    speed = len(prompt) * new_tokens / (times[-1] - times[0])
    return Decoded(speed, out.sequences, CacheSize.of(out.past_key_values))


def decode_in_turns(
    models: Mapping[str, Any],
    prompt: Tensor,
    new_tokens: int,
    repeats: int,
    same_text: bool = True,
    bar: tqdm | None = None,
    **sampling: Any,
) -> dict[str, list[Decoded]]:
    """What each model sampled after the prompt (B, T), time after time: the same text, or one for each round."""

    def turn(model: Any) -> Callable[[int], Decoded]:
        return lambda repeat: decode(model, prompt, new_tokens, 0 if same_text else repeat, **sampling)

    return take_turns({name: turn(model) for name, model in models.items()}, repeats, bar)


def memory_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes read in a second by a product of a large matrix and a vector, at best: what decoding is made of."""
    matrix = torch.ones(MEMORY_BYTES // 4 // 4096, 4096, device=device)
    vector = matrix[0]
    seconds = interleave({"read": lambda: matrix @ vector}, repeats)["read"]
    return matrix.nbytes / min(seconds)
