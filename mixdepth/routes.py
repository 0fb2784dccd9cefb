"""Routes: which tokens a block processes, and how far each one moves.

Pure tensor code: no modules, no parameters, no configuration.
Shapes: B batch, T tokens in the stream, K slots in the route (K <= T), D width.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mixdepth.config import as_ratio

Count = TypeVar("Count", int, Tensor)


def slots(capacity: float, length: Count) -> Count:
    """Compute ceil(capacity * length) in exact arithmetic, for a number or a tensor of lengths.

    >>> slots(0.07, 100), slots(0.125, 3)
    (7, 1)
    """
    numerator, denominator = as_ratio(capacity)
    return (length * numerator + (denominator - 1)) // denominator


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """A weighted choice of tokens. Chosen tokens fill the first `count` slots, in stream order.

    The remaining slots are padding: they hold tokens that were not chosen, at weight 0. So the indices of a row are
    always distinct, and shapes need not depend on the data.
    """

    index: Tensor  # (B, K) long: the place of each slot's token in the stream
    weight: Tensor  # (B, K): 0 keeps the token as it was, 1 replaces it by what the block made of it
    count: Tensor  # (B,) long: the number of slots that hold chosen tokens
    logits: Tensor  # (B, T) at least float32: the scores that were compared
    predictor_logits: Tensor | None  # (B, T): the predictor's logits, if there is a predictor
    real: Tensor  # (B, T) bool: False for padding tokens
    candidates: Tensor  # (B, T) bool: the real tokens that earlier exits left; without exits, all of them
    dropped: Tensor  # (B,) long: the number of tokens that asked for the block and found it full

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
        """Make the route of the tokens in the mask `chosen` (B, T), each moved by its `weight` (B, T)."""
        index = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :num_slots]  # (B, K)
        count = chosen.sum(1)  # (B,)
        if candidates is None:
            candidates = real
        if dropped is None:
            dropped = torch.zeros_like(count)
        gathered = weight.gather(1, index)  # (B, K)
        return cls(
            index=index,
            # where, not a product: an infinite score of a padding token would give 0 * inf = NaN
            weight=gathered.where(first_slots(index, count), 0),
            count=count,
            logits=logits,
            predictor_logits=predictor_logits,
            real=real,
            candidates=candidates,
            dropped=dropped,
        )

    @property
    def used(self) -> Tensor:
        """(B, K) bool: the slots that hold chosen tokens."""
        return first_slots(self.index, self.count)

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the chosen tokens."""
        return torch.zeros_like(self.real).scatter(1, self.index, self.used)

    @property
    def capacity(self) -> Tensor:
        """() float: the realised capacity, chosen tokens per real token."""
        return self.count.sum() / self.real.sum().clamp(min=1)

    @property
    def guess(self) -> Tensor:
        """(B, T): what the causal rule compares with its threshold, the predictor's logits or else the scores."""
        if self.predictor_logits is None:
            return self.logits
        return self.predictor_logits

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Take the slots along the token axis `dim`: (B, ..., T, ...) -> (B, ..., K, ...)."""
        batch_size, num_slots = self.index.shape
        shape = [batch_size, *[1] * (x.ndim - 1)]
        shape[dim] = num_slots
        size = [*x.shape]
        size[0] = batch_size
        size[dim] = num_slots
        x = x.expand(batch_size, *x.shape[1:])  # position ids may have one row for all
        return x.gather(dim, self.index.view(shape).expand(size))

    def blend(self, x: Tensor, y: Tensor) -> Tensor:
        """Move the chosen tokens of the stream x (B, T, D) towards y (B, K, D).

        This is x + weight * (y - x), Eq. 1 of the paper with y - x for f(x). Written as a lerp it is exact at weights
        0 and 1, and as a scatter of distinct indices it is deterministic.
        """
        before = self.gather(x)  # (B, K, D)
        y = y.to(x.dtype).where(self.used[..., None], before)  # an overflow in an unused slot goes no further
        moved = torch.lerp(before, y, self.weight[..., None].to(x.dtype))  # (B, K, D)
        return x.scatter(1, self.index[..., None].expand_as(moved), moved)

    def with_weight(self, weight: Tensor) -> "Route":
        """The same route with other weights (B, K)."""
        return replace(self, weight=weight)

    def select(self, rows: list[int]) -> "Route":
        """The route of these rows alone."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[rows]
            selected[field.name] = value
        return Route(**selected)


class WholeRoute(Route):
    """The route of rows in which every token is chosen, as in a step of decoding: there is nothing to gather."""

    @classmethod
    def of(
        cls, weight: Tensor, logits: Tensor, predictor_logits: Tensor | None, real: Tensor, candidates: Tensor
    ) -> "WholeRoute":
        """Make the route of all tokens, each moved by its `weight` (B, T)."""
        batch_size, num_tokens = real.shape
        index = torch.arange(num_tokens, device=real.device).expand(batch_size, -1)  # (B, T)
        count = torch.full((batch_size,), num_tokens, device=real.device)  # (B,)
        return cls(
            index=index,
            weight=weight,
            count=count,
            logits=logits,
            predictor_logits=predictor_logits,
            real=real,
            candidates=candidates,
            dropped=torch.zeros_like(count),
        )

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return x itself, with one row for each row of the route."""
        return x.expand(self.index.shape[0], *x.shape[1:])

    def blend(self, x: Tensor, y: Tensor) -> Tensor:
        """Move all tokens of the stream x (B, T, D) towards y (B, T, D)."""
        return torch.lerp(x, y.to(x.dtype), self.weight[..., None].to(x.dtype))


def first_slots(index: Tensor, count: Tensor) -> Tensor:
    """Mask (B, K) of the first `count` (B,) slots of an index (B, K)."""
    return torch.arange(index.shape[1], device=index.device) < count[:, None]


def top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Mask (B, T) of the k (B,) highest scores of each row; among equals the earlier token wins."""
    order = scores.argsort(dim=1, descending=True, stable=True)  # (B, T): tokens from best to worst
    winners = torch.arange(scores.shape[1], device=scores.device) < k[:, None]  # (B, T)
    return torch.zeros_like(winners).scatter(1, order, winners)


def first_k(wanted: Tensor, k: Tensor) -> Tensor:
    """Mask (B, T) of the first k (B,) tokens of each row that are in the mask `wanted` (B, T)."""
    return wanted & (wanted.cumsum(1) <= k[:, None])


def edge(scores: Tensor, chosen: Tensor, candidates: Tensor) -> Tensor:
    """(...): the value halfway between the lowest score (..., T) that was chosen and the highest that was not.

    If all candidates were chosen, it lies just below the lowest of them.
    """
    inside = scores.masked_fill(~chosen, torch.inf).amin(-1)
    outside = scores.masked_fill(chosen | ~candidates, -torch.inf).amax(-1)
    below = torch.nextafter(inside, torch.full_like(inside, -torch.inf))
    return torch.where(outside.isfinite(), (inside + outside) / 2, below)


def gaussian(positions: Tensor, *keys: int | Tensor) -> Tensor:
    """Standard normal noise (float32) at integer positions: the same for the same positions and keys.

    There is no generator and no state, so the noise is the same on every device, after a resume and in a recomputation.
    Each key and the position are mixed into a hash, and its bits make a quantile.
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
