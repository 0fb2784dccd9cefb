"""What routers do in training, as counts that add up over micro-batches and processes.

Shapes: B batch, T tokens, L routed layers, V token types.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mixdepth.router import Router
from mixdepth.routes import Route

NUM_SUMS = 6


@torch.no_grad()
def routing_counts(routes: Sequence[Route], routers: Sequence[Router], ids: Tensor, vocab_size: int) -> Tensor:
    """(L, 6 + 2 V) float64: tokens that are real, chosen, that the causal rule would have chosen, and both; sums of
    weights and of their squares; how often each token type occurred, and was chosen."""
    flat = ids.flatten()
    rows = []
    for route, router in zip(routes, routers, strict=True):
        guess = route.logits if route.predictor_logits is None else route.predictor_logits
        guessed = route.candidates & (guess > router.cutoff)
        mask = route.mask
        weight = route.weight.double()  # 0 in unused slots
        sums = [
            route.real.sum(),
            mask.sum(),
            guessed.sum(),
            (guessed & mask).sum(),
            weight.sum(),
            weight.square().sum(),
        ]
        types = [weight.new_zeros(vocab_size).scatter_add(0, flat, m.flatten().double()) for m in (route.real, mask)]
        rows.append(torch.cat([torch.stack([value.double() for value in sums]), *types]))
    return torch.stack(rows)


def describe(counts: Tensor) -> dict[str, list[float]]:
    """Statistics of each layer, from its counts.

    `capacity` is the share of tokens that was processed, `causal_capacity` the share that the causal rule would
    have taken; `precision` and `recall` are the rule's, against the choice of training; `never_chosen` is the share
    of token types that occurred and were not chosen at any of their places.
    """
    real, chosen, guessed, both, weight, squared = counts[:, :NUM_SUMS].unbind(1)  # (L,) each
    occurred, were_chosen = (counts[:, NUM_SUMS:].reshape(len(counts), 2, -1) > 0).sum(2).unbind(1)  # (L,) each
    mean = weight / chosen.clamp(min=1)
    statistics = {
        "capacity": chosen / real,
        "causal_capacity": guessed / real,
        "precision": both / guessed.clamp(min=1),
        "recall": both / chosen.clamp(min=1),
        "gate_mean": mean,
        "gate_std": (squared / chosen.clamp(min=1) - mean.square()).clamp(min=0).sqrt(),
        "never_chosen": 1 - were_chosen / occurred,
    }
    return {name: values.tolist() for name, values in statistics.items()}
