"""What routers do in training, as counts that add up over micro-batches and processes.

Shapes: B batch, T tokens, L routed layers, V token types.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mixdepth.router import Router
from mixdepth.routing import Route

COUNTS = ("real", "chosen", "guessed", "both", "weight", "weight_squared", "types", "types_chosen")


@torch.no_grad()
def routing_counts(routes: Sequence[Route], routers: Sequence[Router], ids: Tensor, vocab_size: int) -> Tensor:
    """(L, 8) float64: see COUNTS; `guessed` is what the causal rule would have chosen, `both` what top-k chose too."""
    flat = ids.flatten()
    rows = []
    for route, router in zip(routes, routers, strict=True):
        guess = route.logits if route.predictor_logits is None else route.predictor_logits
        guessed = route.candidates & (guess > router.cutoff)
        mask = route.mask
        types, types_chosen = (
            torch.zeros(vocab_size, device=ids.device).scatter_reduce(0, flat, m.flatten().float(), "amax").sum()
            for m in (route.real, mask)
        )
        weight = route.weight.double()  # 0 in unused slots
        sums = [route.real.sum(), mask.sum(), guessed.sum(), (guessed & mask).sum()]
        sums += [weight.sum(), weight.square().sum(), types, types_chosen]
        rows.append(torch.stack([value.double() for value in sums]))
    return torch.stack(rows)


def describe(counts: Tensor) -> dict[str, list[float]]:
    """Statistics of each layer, from counts (L, 8).

    `capacity` is the share of tokens that was processed, `causal_capacity` the share that the causal rule would
    have taken; `precision` and `recall` are the rule's, against the choice of training; `never_chosen` is the share
    of token types that occurred and were not chosen at any of their places.
    """
    real, chosen, guessed, both, weight, squared, types, types_chosen = counts.unbind(1)  # (L,) each
    mean = weight / chosen.clamp(min=1)
    statistics = {
        "capacity": chosen / real,
        "causal_capacity": guessed / real,
        "precision": both / guessed.clamp(min=1),
        "recall": both / chosen.clamp(min=1),
        "gate_mean": mean,
        "gate_std": (squared / chosen.clamp(min=1) - mean.square()).clamp(min=0).sqrt(),
        "never_chosen": 1 - types_chosen / types,
    }
    return {name: values.tolist() for name, values in statistics.items()}
