"""What routers do in training, as counts that add up over micro-batches and processes.

Shapes: B batch, T tokens, L routed layers, V token types.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mixdepth.router import Router
from mixdepth.routes import Route

NUM_SUMS = 6
"""How many sums stand before the counts of token types."""


@torch.no_grad()
def routing_counts(routes: Sequence[Route], routers: Sequence[Router], ids: Tensor, vocab_size: int) -> Tensor:
    """Count what each routed layer chose, as (L, 6 + 2 V) in float64.

    The sums are the tokens that are real, that were chosen, that the causal rule would have chosen, and both of the
    latter; then the weights and their squares. Then follow how often each token type occurred, and was chosen.
    """
    flat_ids = ids.flatten()  # (B T,)
    rows = []
    for route, router in zip(routes, routers, strict=True):
        guess = route.guess  # (B, T)
        guessed = route.candidates & (guess > router.cutoff)  # (B, T)
        chosen = route.mask  # (B, T)
        weight = route.weight.double()  # (B, K), 0 in unused slots
        sums = [
            route.real.sum(),
            chosen.sum(),
            guessed.sum(),
            (guessed & chosen).sum(),
            weight.sum(),
            weight.square().sum(),
        ]
        parts = [torch.stack([value.double() for value in sums])]  # (6,)
        for mask in (route.real, chosen):
            parts.append(weight.new_zeros(vocab_size).scatter_add(0, flat_ids, mask.flatten().double()))  # (V,)
        rows.append(torch.cat(parts))  # (6 + 2 V,)
    return torch.stack(rows)


def describe(counts: Tensor) -> dict[str, list[float]]:
    """Turn the counts (L, 6 + 2 V) into statistics, each a list with a value for each layer.

    - `capacity` is the share of the tokens that was processed.
    - `causal_capacity` is the share that the causal rule would have chosen.
    - `precision` and `recall` are those of the causal rule, against the choice of training.
    - `gate_mean` and `gate_std` are of the weights of chosen tokens.
    - `never_chosen` is the share of the token types that occurred and were not chosen at any of their places.
    """
    real, chosen, guessed, both, weight, squared = counts[:, :NUM_SUMS].unbind(1)  # (L,) each
    by_type = counts[:, NUM_SUMS:].reshape(len(counts), 2, -1)  # (L, 2, V)
    occurred, were_chosen = (by_type > 0).sum(2).unbind(1)  # (L,) each
    mean = weight / chosen.clamp(min=1)  # (L,)
    variance = squared / chosen.clamp(min=1) - mean.square()  # (L,)
    statistics = {
        "capacity": chosen / real,
        "causal_capacity": guessed / real,
        "precision": both / guessed.clamp(min=1),
        "recall": both / chosen.clamp(min=1),
        "gate_mean": mean,
        "gate_std": variance.clamp(min=0).sqrt(),
        "never_chosen": 1 - were_chosen / occurred,
    }
    return {name: values.tolist() for name, values in statistics.items()}
