"""`generate`: text from a run, a folder or a model of the hub, and the routes that its tokens took.

Shapes: B rows, T columns of prompt and answer.
"""

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from mixdepth.data.tokenizers import pieces
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.loading import load
from mixdepth.text import tell

COLOURS = (240, 67, 37, 35, 70, 142, 208, 196)
"""Colours of a terminal with 256 colours, from tokens that skipped all routed layers to tokens that took them all."""

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""The options that change the probabilities of tokens."""

NOT_SUPPORTED = ("num_return_sequences", "return_dict_in_generate")
"""Options of transformers' generate that would change the shape of its result."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and its continuation."""

    prompt: str
    completion: str
    pieces: tuple[str, ...]
    """The whole text, cut into pieces: tokens, or groups of tokens that are characters only together."""
    depths: tuple[float, ...] | None
    """The number of routed layers that each piece went through; None without `show_routes`."""
    num_routed: int
    """The number of routed layers of the model."""
    tokens: tuple[int, ...]
    """The tokens of the prompt and the completion."""
    num_given: int
    """The number of tokens of the prompt."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def colour(self) -> str:
        """Return the text for a terminal, each piece coloured by its depth."""
        assert self.depths is not None
        painted = ""
        for piece, depth in zip(self.pieces, self.depths, strict=True):
            painted += paint(piece, depth, self.num_routed)
        return painted


def generate(
    model: Any,
    prompts: str | Sequence[str],
    *,
    tokenizer: Any = None,
    show_routes: bool = False,
    seed: int | None = None,
    stream: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Text]:
    """Continue all prompts at once, as in `generate("runs/mod", "def f(", max_new_tokens=50, temperature=0.8)`.

    `model` is a run, a folder or a name of the hub, or a model object with its `tokenizer`. The `options` are those of
    transformers' `generate`. `stream` is called with each new part of the first text.
    """
    # 1. Check the arguments, and load the model.
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or not all(prompts):
        raise ValueError("give at least one prompt, and none that is empty")
    if isinstance(model, str | os.PathLike):
        loaded = load(str(model))
        model, tokenizer = loaded.model, loaded.tokenizer
        if loaded.note:
            tell(loaded.note)
    if tokenizer is None:
        raise ValueError("a model that is given as an object needs its tokenizer too")
    num_routed = len(model.depth_routers) if isinstance(model, RoutedCausalLM) else 0
    if show_routes and not num_routed:
        raise ValueError(f"{type(model).__name__} has no routed layers: there are no routes to show")
    if seed is not None:
        torch.manual_seed(seed)
    _check_options(options)
    # 2. Make tokens of the prompts, and choose the tokens that end a text.
    tokenizer = _with_padding(tokenizer)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    batch = batch.to(next(model.parameters()).device)
    if model.generation_config.eos_token_id is None:
        options.setdefault("eos_token_id", tokenizer.eos_token_id)
    options.setdefault("pad_token_id", tokenizer.pad_token_id)
    ends = _end_tokens(model, options)
    # 3. Generate.
    streamer = None if stream is None else FirstRow(tokenizer, stream, ends)
    ids = _generate(model, batch, streamer, options)  # (B, T)
    # 4. Cut each row at its end, and look up its routes.
    num_columns = batch["input_ids"].shape[1]
    mask = _real_tokens(batch["attention_mask"], ids, ends)  # (B, T)
    depths = _depths(model, ids, mask) if show_routes else None  # (B, T)
    texts = []
    for row, prompt in enumerate(prompts):
        tokens = ids[row][mask[row]].tolist()
        new_tokens = ids[row, num_columns:][mask[row, num_columns:]]
        parts = pieces(tokenizer, tokens)
        mean_depths = None
        if depths is not None:
            mean_depths = _means(depths[row][mask[row]].tolist(), [length for _, length in parts])
        text = Text(
            prompt=prompt,
            completion=tokenizer.decode(new_tokens, skip_special_tokens=True),
            pieces=tuple(piece for piece, _ in parts),
            depths=mean_depths,
            num_routed=num_routed,
            tokens=tuple(tokens),
            num_given=len(tokens) - len(new_tokens),
        )
        texts.append(text)
    return texts


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that transformers' generate takes and this function does not."""
    for name in NOT_SUPPORTED:
        if name in options:
            raise ValueError(f"{name} is not supported here: give a prompt several times, or call model.generate")
    if options.get("num_beams", 1) < 1:
        raise ValueError(f"num_beams must be at least 1, not {options['num_beams']}")


def _with_padding(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy that pads with the token that ends a text."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    if tokenizer.eos_token is None:
        folder = Path(tokenizer.name_or_path)
        file = "tokenizer_config.json"
        reason = ""
        if folder.is_dir() and not (folder / file).is_file():
            reason = f"; {tokenizer.name_or_path!r} has no {file}"
        raise ValueError(
            f"the tokenizer has no token that ends or fills a text{reason}: save the tokenizer of this model again"
        )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _end_tokens(model: Any, options: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text; the options may name one, several, or a tensor of them."""
    ends = options.get("eos_token_id", model.generation_config.eos_token_id)
    if ends is None:
        return []
    tokens: list[int] = torch.tensor(ends, dtype=torch.long).flatten().tolist()
    return tokens


def _generate(model: Any, batch: Any, streamer: Any, options: dict[str, Any]) -> Tensor:
    """Call transformers' generate: token ids (B, T). Its errors about options become a sentence."""
    processors = LogitsProcessorList(options.pop("logits_processor", []))
    if not options.get("do_sample", model.generation_config.do_sample):  # torch itself refuses to sample from NaN
        processors.append(RefuseNaN())
    try:
        ids: Tensor = model.generate(**batch, streamer=streamer, logits_processor=processors, **options)
        return ids
    except TypeError as error:  # an option that it does not have
        raise ValueError(str(error)) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        settings = ", ".join(f"{name}={options[name]!r}" for name in SAMPLING_OPTIONS if name in options)
        raise ValueError(
            f"there are no probabilities to sample from with {settings or 'the generation settings of this model'}: "
            "choose others, or the most likely token (do_sample=False, --greedy)"
        ) from error


class RefuseNaN(LogitsProcessor):
    """End the generation of a text on which the model computes NaN. The most likely token would be token 0."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise ValueError(
                "the model computes NaN on this text: its weights or its config.json are damaged, or its numbers are "
                "beyond its precision"
            )
        return scores


def _real_tokens(attention_mask: Tensor, ids: Tensor, ends: list[int]) -> Tensor:
    """Return which of the tokens (B, T) belong to a text: no padding before the prompt or after the end of a row."""
    num_columns = attention_mask.shape[1]
    new_ids = ids[:, num_columns:]  # (B, new columns)
    is_end = torch.isin(new_ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device)).int()
    ends_before = is_end.cumsum(1) - is_end  # (B, new columns)
    return torch.cat([attention_mask.bool(), ends_before == 0], 1)


class FirstRow(TextStreamer):
    """The streamer of transformers, which takes a single row, for the first of several rows."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], ends: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=False, skip_special_tokens=True)
        self.write = write
        self.ends = ends
        self.is_finished = False

    def put(self, value: Any) -> None:
        row = value[:1]
        if not self.is_finished:
            super().put(row)
        is_new_token = value.ndim == 1  # a prompt has two dimensions
        if is_new_token and row.item() in self.ends:
            self.is_finished = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text + ("\n" if stream_end else ""))


@torch.no_grad()
def _depths(model: RoutedCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Return how many routed layers each token went through: (B, T).

    One causal pass over the whole text routes as the steps of generation did.
    """
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # (B, T)
    out: Any = model(ids, attention_mask=mask.long(), position_ids=positions, output_routes=True, routing="causal")
    return torch.stack([route.mask for route in out.routes]).sum(0)


def _means(values: list[int], lengths: list[int]) -> tuple[float, ...]:
    """Cut the values into runs of these lengths, and return the mean of each run."""
    ends = itertools.accumulate(lengths)
    return tuple(sum(values[end - length : end]) / length for end, length in zip(ends, lengths, strict=True))


def paint(piece: str, depth: float, num_routed: int) -> str:
    """Return a piece of text in the colour of its depth; or with the depth as a number, if NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return f"{piece}\u00b7{depth:.0f} " if piece.strip() else piece
    colour = COLOURS[round(depth / num_routed * (len(COLOURS) - 1))]
    return f"\x1b[38;5;{colour}m{piece}\x1b[0m"


def legend(num_routed: int) -> str:
    """Return a line that explains the colours."""
    shades = [paint(str(depth), depth, num_routed) for depth in range(num_routed + 1)]
    return f"routed layers that a token went through, of {num_routed}: {' '.join(shades)}"
