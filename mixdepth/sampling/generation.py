"""`generate`: text from a run, a folder or a model of the hub, and the routes that its tokens took."""

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from mixdepth.data.tokenizers import pieces
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.loading import load
from mixdepth.text import tell

COLOURS = (240, 67, 37, 35, 70, 142, 208, 196)
"""Of a terminal with 256 colours, from tokens that skipped all routed layers to those that took them all."""


OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class Text(NamedTuple):
    """A prompt and what follows it."""

    prompt: str
    completion: str
    pieces: tuple[str, ...]
    """All of the text, cut into pieces: tokens, or several where only together they are characters."""
    depths: tuple[float, ...] | None
    """How many routed layers each piece went through; None without `show_routes`."""
    num_routed: int
    tokens: tuple[int, ...]
    num_given: int
    """How many of the tokens are the prompt's."""

    def colour(self) -> str:
        """The text for a terminal, each piece coloured by its depth."""
        assert self.depths is not None
        return "".join(
            paint(piece, depth, self.num_routed) for piece, depth in zip(self.pieces, self.depths, strict=True)
        )


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
    """Continue the prompts, all at once: `generate("runs/mod", "def f(", max_new_tokens=50, temperature=0.8)`.

    `model` is a run, a folder or a name of the hub, or a model with its `tokenizer`. `options` are those of
    transformers' `generate`; `stream` is called with the first prompt's text as it comes.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or not all(prompts):
        raise ValueError("give at least one prompt, and none that is empty")
    if isinstance(model, str | os.PathLike):
        model, tokenizer, _, note = load(str(model))
        if note:
            tell(note)
    if tokenizer is None:
        raise ValueError("a model that is given as an object needs its tokenizer too")
    if show_routes and not (isinstance(model, RoutedCausalLM) and model.depth_routers):
        raise ValueError(f"{type(model).__name__} has no routed layers: there are no routes to show")
    if seed is not None:
        torch.manual_seed(seed)
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if name in options:
            raise ValueError(f"{name} is not supported here: give a prompt several times, or call model.generate")
    if options.get("num_beams", 1) < 1:
        raise ValueError(f"num_beams must be at least 1, not {options['num_beams']}")
    tokenizer = _that_pads(tokenizer)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    batch = batch.to(next(model.parameters()).device)
    if model.generation_config.eos_token_id is None:
        options.setdefault("eos_token_id", tokenizer.eos_token_id)
    options.setdefault("pad_token_id", tokenizer.pad_token_id)
    stops = options.get("eos_token_id", model.generation_config.eos_token_id)
    stops = torch.tensor([] if stops is None else stops, dtype=torch.long).flatten().tolist()
    streamer = None if stream is None else FirstRow(tokenizer, stream, stops)
    processors = LogitsProcessorList(options.pop("logits_processor", []))
    if not options.get("do_sample", model.generation_config.do_sample):  # torch itself refuses to sample from NaN
        processors.append(RefuseNaN())
    try:
        ids = model.generate(**batch, streamer=streamer, logits_processor=processors, **options)  # (B, T)
    except TypeError as error:
        raise ValueError(str(error)) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        settings = ", ".join(f"{name}={options[name]!r}" for name in OF_SAMPLING if name in options)
        raise ValueError(
            f"there are no probabilities to sample from with {settings or 'the generation settings of this model'}: "
            "choose others, or the most likely token (do_sample=False, --greedy)"
        ) from error
    num_given = batch["input_ids"].shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, num_given:])], 1).bool()
    ends = torch.isin(ids[:, num_given:], torch.tensor(stops, dtype=ids.dtype, device=ids.device)).int()
    mask[:, num_given:] &= ends.cumsum(1) - ends == 0  # what follows the end of a row is padding
    depths = _depths(model, ids, mask) if show_routes else None  # (B, T)
    texts = []
    for row, prompt in enumerate(prompts):
        kept, num_prompt = mask[row], int(mask[row, :num_given].sum())
        completion = tokenizer.decode(ids[row, num_given:][kept[num_given:]], skip_special_tokens=True)
        tokens = ids[row][kept].tolist()
        found = pieces(tokenizer, tokens)
        means = None if depths is None else _means(depths[row][kept].tolist(), [length for _, length in found])
        num_routed = len(model.depth_routers) if isinstance(model, RoutedCausalLM) else 0
        whole = tuple(piece for piece, _ in found)
        texts.append(Text(prompt, completion, whole, means, num_routed, tuple(tokens), num_prompt))
    return texts


class RefuseNaN(LogitsProcessor):
    """Ends the generation of a text on which the model computes NaN: the most likely token would be token 0."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise ValueError(
                "the model computes NaN on this text: its weights or its config.json are damaged, or its numbers are "
                "beyond its precision"
            )
        return scores


def _that_pads(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that fills up texts with the token that ends them."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    if tokenizer.eos_token is None:
        name = tokenizer.name_or_path
        lost = "tokenizer_config.json"
        where = f"; {name!r} has no {lost}" if Path(name).is_dir() and not (Path(name) / lost).is_file() else ""
        raise ValueError(
            f"the tokenizer has no token that ends or fills a text{where}: save the tokenizer of this model again"
        )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class FirstRow(TextStreamer):
    """transformers' streamer, which takes one row, on the first of several."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], stops: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=False, skip_special_tokens=True)
        self.write = write
        self.stops = stops
        self.is_finished = False

    def put(self, value: Any) -> None:
        row = value[:1]
        if not self.is_finished:
            super().put(row)
        self.is_finished |= value.ndim == 1 and row.item() in self.stops

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text + ("\n" if stream_end else ""))


@torch.no_grad()
def _depths(model: RoutedCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T): through how many routed layers each token went; one causal pass routes as all the steps did."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    out: Any = model(ids, attention_mask=mask.long(), position_ids=positions, output_routes=True, routing="causal")
    return torch.stack([route.mask for route in out.routes]).sum(0)


def _means(values: list[int], lengths: list[int]) -> tuple[float, ...]:
    """The mean of each run of so many values."""
    ends = list(itertools.accumulate(lengths))
    return tuple(sum(values[end - length : end]) / length for end, length in zip(ends, lengths, strict=True))


def paint(piece: str, depth: float, num_routed: int) -> str:
    if os.environ.get("NO_COLOR"):
        return f"{piece}\u00b7{depth:.0f} " if piece.strip() else piece
    colour = COLOURS[round(depth / num_routed * (len(COLOURS) - 1))]
    return f"\x1b[38;5;{colour}m{piece}\x1b[0m"


def legend(num_routed: int) -> str:
    """Which colour says what."""
    shades = [paint(str(depth), depth, num_routed) for depth in range(num_routed + 1)]
    return f"routed layers that a token went through, of {num_routed}: {' '.join(shades)}"
