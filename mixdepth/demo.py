"""The demo: route a small Llama, train it on the Python standard library's source, sample from it."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import mixdepth
from mixdepth.hf import RoutedCausalLM
from mixdepth.shape import model_config
from mixdepth.sources import stdlib_files

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
    """A small dense Llama over bytes."""
    return AutoModelForCausalLM.from_config(model_config(num_layers, width, VOCAB_SIZE, context=length))


def run(steps: int = 800, capacity: float = 0.125, every: int = 2, seed: int = 0) -> RoutedCausalLM:
    """Train a small routed model; print its loss, realised capacity and a sample."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    torch.manual_seed(seed)
    length, batch_size, num_layers, peak = 256, 8, 4, 4e-3
    training, validation = stdlib_bytes()
    model = mixdepth.route(byte_llama(64, num_layers, length), capacity=capacity, every=every)
    routed = sorted(model.depth_config.routed_layers(num_layers))
    print(
        f"mixdepth {mixdepth.__version__}: a Llama of {model.num_parameters() / 1e6:.2f} M parameters, layers {routed} "
        f"of {num_layers} routed at capacity {capacity}; {len(training) / 1e6:.1f} MB of Python source"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    windows = batches(training, batch_size, length, seed)
    with tqdm(range(steps), desc="training", unit="step", mininterval=1) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                warm = min(1.0, 20 * (step + 1) / steps)
                group["lr"] = peak * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            ids = next(windows)
            out = model(ids, labels=ids)
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"loss {out.lm_loss.item():.3f}", refresh=False)
    result = mixdepth.evaluate(model, windows_of(validation, length))
    ahead = result.lookahead_loss
    print(f"held-out loss {result.loss:.3f} nats per byte with causal routing ({ahead:.3f} with look-ahead)")
    realised = " ".join(f"{layer.capacity:.1%}" for layer in result.layers.values())
    foreseen = " ".join(f"{layer.f1:.2f}" for layer in result.layers.values())
    print(f"realised capacity {realised} in layers {routed}, configured {capacity:.1%}; F1 against top-k {foreseen}")
    model.eval()
    prompt = torch.tensor([list(b"def get_")])
    sample = model.generate(prompt, max_new_tokens=200, do_sample=True, temperature=0.8, pad_token_id=0)
    print("a sample:\n" + bytes(sample[0].tolist()).decode(errors="replace"))
    return model


def windows_of(text: Tensor, length: int, num_windows: int = 96) -> list[Tensor]:
    """Evenly spaced windows of the text, in batches (16, length)."""
    starts = torch.linspace(0, len(text) - length, num_windows).long().tolist()
    windows = torch.stack([text[start : start + length] for start in starts]).long()
    return [*windows.split(16)]  # type: ignore[no-untyped-call]
