"""The demo: route a small Llama, train it on the Python standard library's source, sample from it."""

import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

import mixdepth
from mixdepth.hf import RoutedCausalLM

VOCAB_SIZE = 256  # bytes
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


def stdlib_bytes() -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes, every twentieth file held out: (training, validation)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
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
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, width // 32),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def run(seconds: float = 60, capacity: float = 0.125, every: int = 2, seed: int = 0) -> RoutedCausalLM:
    """Train a routed model for about `seconds`; print its loss, realised capacity and a sample."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a number above 0, not {seconds}")
    torch.manual_seed(seed)
    length, batch_size = 256, 16
    training, validation = stdlib_bytes()
    model = mixdepth.route(byte_llama(128, 6, length), capacity=capacity, every=every)
    routed = sorted(model.depth_config.routed_layers(6))
    print(
        f"mixdepth {mixdepth.__version__}: a Llama of {model.num_parameters() / 1e6:.1f} M parameters, "
        f"layers {routed} of 6 routed at capacity {capacity}; {len(training) / 1e6:.1f} MB of Python source"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    windows = batches(training, batch_size, length, seed)
    start, share = time.monotonic(), 0.0
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}") as bar:
        while share < 1:
            share = min(1.0, (time.monotonic() - start) / seconds)
            for group in optimizer.param_groups:  # warm-up, then down to nothing at the end
                group["lr"] = 3e-3 * min(1.0, 20 * share) * (1 - share)
            ids = next(windows)
            out = model(ids, labels=ids)
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"loss {out.lm_loss.item():.3f}", refresh=False)
            bar.update(round(100 * share) - bar.n)
    causal, realised = evaluate(model, validation, length)
    with mixdepth.lookahead(model):
        ahead, _ = evaluate(model, validation, length)
    print(f"held-out loss {causal:.3f} nats per byte with causal routing ({ahead:.3f} with look-ahead)")
    print(f"realised capacity {' '.join(f'{c:.1%}' for c in realised)} in layers {routed}, configured {capacity:.1%}")
    prompt = torch.tensor([list(b"def main(")])
    sample = model.generate(prompt, max_new_tokens=160, do_sample=True, temperature=0.7, pad_token_id=0)
    print("sample:\n" + bytes(sample[0].tolist()).decode(errors="replace"))
    return model


@torch.no_grad()
def evaluate(model: RoutedCausalLM, text: Tensor, length: int, num_windows: int = 96) -> tuple[float, list[float]]:
    """Loss on evenly spaced windows of the text, and the realised capacity of each routed layer."""
    model.eval()
    starts = torch.linspace(0, len(text) - length, num_windows).long().tolist()
    windows = torch.stack([text[start : start + length] for start in starts]).long()
    losses, capacities = [], []
    for ids in torch.split(windows, 16):
        out: Any = model(ids, labels=ids, output_routes=True)
        losses.append(out.lm_loss)
        capacities.append(torch.stack([route.capacity for route in out.routes]))
    return torch.stack(losses).mean().item(), torch.stack(capacities).mean(0).tolist()
