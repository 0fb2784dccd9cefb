"""What experiments share: a small Llama over bytes, and the standard library's source to train it on."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mixdepth.data.sources import stdlib_files
from mixdepth.models.shape import model_config

VOCAB_SIZE = 256  # bytes


def stdlib_bytes() -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes, every twentieth file held out: (training, validation)."""
    texts = [path.read_bytes() for path in stdlib_files()]
    validation = b"".join(text for i, text in enumerate(texts) if i % 20 == 7)
    training = b"".join(text for i, text in enumerate(texts) if i % 20 != 7)
    return _tensor(training), _tensor(validation)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, batch_size: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random windows of the text, (batch_size, length), without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def byte_llama(width: int, num_layers: int, length: int) -> Any:
    """A small dense Llama over bytes, with heads of 32: what is recorded was measured so."""
    shape = model_config(num_layers, width, VOCAB_SIZE, context=length, heads=width // 32)
    return AutoModelForCausalLM.from_config(shape)


def windows_of(text: Tensor, length: int, num_windows: int = 96) -> list[Tensor]:
    """Evenly spaced windows of the text, in batches (16, length)."""
    starts = torch.linspace(0, len(text) - length, num_windows).long().tolist()
    windows = torch.stack([text[start : start + length] for start in starts]).long()
    return [*windows.split(16)]  # type: ignore[no-untyped-call]
