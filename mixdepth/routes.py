"""Routes: which tokens a block processes, and how far each one moves.

Pure tensor code: no modules, no parameters, no configuration.
Shapes: B batch, T tokens in the stream, K slots in the route (K <= T), D width.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mixdepth.config import as_ratio

Count = TypeVar("Count", int, Tensor)


def slots(capacity: float, length: Count) -> Count:
    """ceil(capacity * length) in exact arithmetic, for a number or a tensor of lengths.

    >>> slots(0.07, 100), slots(0.125, 3)
    (7, 1)
    """
    numerator, denominator = as_ratio(capacity)
    return (length * numerator + (denominator - 1)) // denominator


class Route(NamedTuple):
    """A weighted choice of tokens. Chosen tokens fill the first `count` slots, in stream order.

    The remaining slots are padding: they hold tokens that were not chosen, at weight 0. So the
    indices of a row are always distinct, and shapes need not depend on the data.
    """

    index: Tensor  # type: ignore[assignment]  # (B, K) long: where each slot's token lives in the stream
    weight: Tensor  # (B, K): 0 keeps the token as it was, 1 replaces it by its processed self
    count: Tensor  # type: ignore[assignment]  # (B,) long: how many slots are chosen tokens
    logits: Tensor  # (B, T) at least float32: the scores that were compared
    predictor_logits: Tensor | None  # (B, T): the predictor's guess, where there is one
    real: Tensor  # (B, T) bool: False for padding tokens
    candidates: Tensor  # (B, T) bool: the real tokens that earlier exits left, all of them elsewhere
    dropped: Tensor  # (B,) long: tokens that chose the block and found it full

    @classmethod
    def choose(
        cls,
        chosen: Tensor,
        weight: Tensor,
        logits: Tensor,
        predictor_logits: Tensor | None,
        real: Tensor,
        num_slots: int,
        candidates: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> "Route":
        """The route of the tokens in the mask `chosen` (B, T), each moved by its `weight` (B, T)."""
        index = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :num_slots]  # (B, K)
        count = chosen.sum(1)
        candidates = real if candidates is None else candidates
        dropped = torch.zeros_like(count) if dropped is None else dropped
        route = cls(index, weight.gather(1, index), count, logits, predictor_logits, real, candidates, dropped)
        # where, not a product: an infinite score of a padding token would give 0 * inf = NaN
        return route._replace(weight=route.weight.where(route.used, 0))

    @property
    def used(self) -> Tensor:
        """(B, K) bool: the slots that hold chosen tokens."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.count[:, None]

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the chosen tokens."""
        return torch.zeros_like(self.real).scatter(1, self.index, self.used)

    @property
    def capacity(self) -> Tensor:
        """() float: the realised capacity, chosen tokens per real token."""
        return self.count.sum() / self.real.sum().clamp(min=1)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Take the slots along the token axis `dim`: (B, ..., T, ...) -> (B, ..., K, ...)."""
        shape = [self.index.shape[0], *[1] * (x.ndim - 1)]
        shape[dim] = self.index.shape[1]
        size = [*x.shape]
        size[0], size[dim] = self.index.shape[0], self.index.shape[1]
        x = x.expand(size[0], *x.shape[1:])  # one row for all, as in position ids
        return x.gather(dim, self.index.view(shape).expand(size))

    def blend(self, x: Tensor, y: Tensor) -> Tensor:
        """Move the chosen tokens of the stream x (B, T, D) towards y (B, K, D).

        This is x + weight * (y - x), Eq. 1 of the paper with y - x for f(x). Written as a lerp it is
        exact at weights 0 and 1, and as a scatter of distinct indices it is deterministic.
        """
        before = self.gather(x)  # (B, K, D)
        y = y.to(x.dtype).where(self.used[..., None], before)  # what overflowed in an unused slot stays there
        moved = torch.lerp(before, y, self.weight[..., None].to(x.dtype))
        return x.scatter(1, self.index[..., None].expand_as(moved), moved)

    def select(self, rows: list[int]) -> "Route":
        """The route of these rows alone."""
        return Route(*(None if field is None else field[rows] for field in self))  # type: ignore[arg-type]


class WholeRoute(Route):
    """The route of rows of which every token is chosen, as in a step of decoding: there is nothing to gather."""

    @classmethod
    def of(
        cls, weight: Tensor, logits: Tensor, predictor_logits: Tensor | None, real: Tensor, candidates: Tensor
    ) -> "WholeRoute":
        batch_size, num_tokens = real.shape
        index = torch.arange(num_tokens, device=real.device).expand(batch_size, -1)
        count = torch.full((batch_size,), num_tokens, device=real.device)
        return cls(index, weight, count, logits, predictor_logits, real, candidates, torch.zeros_like(count))

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.expand(self.index.shape[0], *x.shape[1:])

    def blend(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(x, y.to(x.dtype), self.weight[..., None].to(x.dtype))


def top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Mask (B, T) of the k (B,) highest scores of each row; among equals the earlier token wins."""
    order = scores.argsort(dim=1, descending=True, stable=True)  # (B, T): tokens from best to worst
    winners = torch.arange(scores.shape[1], device=scores.device) < k[:, None]  # (B, T)
    return torch.zeros_like(winners).scatter(1, order, winners)


def first_k(wanted: Tensor, k: Tensor) -> Tensor:
    """Mask (B, T) of the first k (B,) tokens of each row that are in the mask `wanted` (B, T)."""
    return wanted & (wanted.cumsum(1) <= k[:, None])


def edge(scores: Tensor, chosen: Tensor, candidates: Tensor) -> Tensor:
    """Halfway between the lowest score (..., T) that was chosen and the highest that was not; just below the former
    if all were."""
    inside = scores.masked_fill(~chosen, torch.inf).amin(-1)
    outside = scores.masked_fill(chosen | ~candidates, -torch.inf).amax(-1)
    below = torch.nextafter(inside, torch.full_like(inside, -torch.inf))
    return torch.where(outside.isfinite(), (inside + outside) / 2, below)


def gaussian(positions: Tensor, *keys: int | Tensor) -> Tensor:
    """Standard normal noise (float32) at integer positions: the same for the same positions and keys.

    No generator and no state, so that it comes out alike on every device, after a resume and in a
    recomputation: each key and the position are mixed into a hash, whose bits make a quantile.
    """
    positions = positions.long()  # the hash needs 64 bits, and some engines count in int32
    state = torch.zeros_like(positions)
    for key in (*keys, positions):
        state = _mix(state * 31 + key + 1)
    quantile = ((state & (2**23 - 1)).float() + 0.5) / 2**23  # (0, 1), exact in float32
    return torch.erfinv(2 * quantile - 1) * 2**0.5


def _mix(x: Tensor) -> Tensor:
    """Scramble the low 32 bits of an integer: the finaliser of MurmurHash3."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
