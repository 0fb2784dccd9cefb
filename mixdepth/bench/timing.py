"""Clocks: functions that take turns, decoding without the time of its prompt, and the memory bandwidth of the machine.

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
"""How much memory is read to measure its bandwidth: more than most caches of a processor hold."""


class Spread(NamedTuple):
    """The median of some values with the lowest and the highest.

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
        """Return the spread of ratios taken pair by pair, because what slows the machine down hits both of a pair."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def to_dict(self) -> dict[str, float]:
        return self._asdict()

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def take_turns(
    functions: Mapping[str, Callable[[int], Result]], repeats: int, bar: tqdm | None = None
) -> dict[str, list[Result]]:
    """Call the functions in turns, and return the results of each, call by call.

    Because of the turns, a drift of the machine hits all functions equally. A function gets the number of the round;
    round 0 warms up, and its result is left out.
    """
    results: dict[str, list[Result]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            result = function(repeat)
            if repeat > 0:
                results[name].append(result)
            if bar is not None:
                bar.update()
    return results


def interleave(
    functions: Mapping[str, Callable[[], object]], repeats: int, bar: tqdm | None = None
) -> dict[str, list[float]]:
    """Call the functions in turns, and return the seconds of each call."""

    def timed(function: Callable[[], object]) -> Callable[[int], float]:
        def seconds(_: int) -> float:
            start = time.perf_counter()
            function()
            wait()
            return time.perf_counter() - start

        return seconds

    return take_turns({name: timed(function) for name, function in functions.items()}, repeats, bar)


def wait() -> None:
    """Wait until the device has finished all work that it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class CacheSize(NamedTuple):
    """The size of a key-value cache, layer by layer."""

    stored: tuple[int, ...]
    """The number of stored tokens of all rows in each layer."""
    token_bytes: tuple[int, ...]
    """The bytes of one token's keys and values in each layer."""
    windows: tuple[int | None, ...]
    """The sliding window of each layer."""
    allocated: int
    """The bytes of all tensors of the cache, with the room that was made ahead."""

    @property
    def held(self) -> int:
        """The bytes of the keys and values of stored tokens."""
        return sum(number * size for number, size in zip(self.stored, self.token_bytes, strict=True))

    @classmethod
    def of(cls, cache: Any) -> "CacheSize":
        stored = []
        token_bytes = []
        windows = []
        allocated = 0
        for layer in cache.layers:
            # (B, H, S, width) each; they are None in a layer that no token has reached.
            tensors = [tensor for tensor in (layer.keys, layer.values) if tensor is not None]
            num_stored = layer_bytes = 0
            for tensor in tensors:
                batch_size, num_heads, num_columns, width = tensor.shape
                num_stored = batch_size * num_columns
                layer_bytes += num_heads * width * tensor.element_size()
                allocated += tensor.nbytes
            if isinstance(layer, RoutedCacheLayer):
                num_stored = sum(layer.lengths)  # rows differ
                if layer.columns is not None:
                    allocated += layer.columns.nbytes
            stored.append(num_stored)
            token_bytes.append(layer_bytes)
            windows.append(getattr(layer, "sliding_window", None))
        return cls(tuple(stored), tuple(token_bytes), tuple(windows), allocated)


class Decoded(NamedTuple):
    """A text that was sampled, and how fast."""

    tokens_per_second: float
    """New tokens of all rows together per second."""
    ids: Tensor
    """(B, T): prompt and new tokens. The last token has not been through the model."""
    cache: CacheSize


def decode(model: Any, prompt: Tensor, new_tokens: int, seed: int = 0, **sampling: Any) -> Decoded:
    """Sample after the prompt (B, T) by transformers' own generate(). An end of text does not stop it.

    The time of the prompt is left out, and so is the first new token, which comes with it: `new_tokens` more are timed.
    """
    times: list[float] = []  # the time of each new token

    def note_time(ids: Tensor, scores: Any) -> Tensor:
        wait()
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    torch.manual_seed(seed)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else tokens with the id of padding would count as padding
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
    """Sample after the prompt (B, T) with each model in turns: the same text each time, or another in each round."""

    def turn(model: Any) -> Callable[[int], Decoded]:
        def decode_again(repeat: int) -> Decoded:
            seed = 0 if same_text else repeat
            return decode(model, prompt, new_tokens, seed, **sampling)

        return decode_again

    return take_turns({name: turn(model) for name, model in models.items()}, repeats, bar)


def memory_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Measure how many bytes per second a product of a large matrix and a vector reads at best.

    Such products are most of the work of decoding.
    """
    matrix = torch.ones(MEMORY_BYTES // 4 // 4096, 4096, device=device)  # float32: 4 bytes each
    vector = matrix[0]  # (4096,)
    seconds = interleave({"read": lambda: matrix @ vector}, repeats)["read"]
    return matrix.nbytes / min(seconds)
