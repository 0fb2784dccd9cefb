"""Experts inside a block: which tokens go to which expert. This module does not use transformers.

Shapes: B batch, T tokens, D width, E experts with weights, N no-op experts, A = E + N, S experts of one
token, K slots of one expert, P pairs of a token and an expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.router import Chooser, check_not_recorded
from mixdepth.routes import first_k, slots, top_k

Gate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""(B * T, D) -> logits (B * T, A), and the weights and indices (B * T, S) of each token's best experts."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens (P, D), expert indices (P, S) and weights (P, S) -> (P, D). The index E stands for no expert."""


class ExpertLoad(NamedTuple):
    """Which experts processed which tokens in one layer.

    In a routed layer T counts the slots of its route: the chosen tokens, in order. In evaluation, rows that chose no
    token are left out.
    """

    logits: Tensor  # (B, T, A): the gate's scores of all experts, the no-op ones last
    processed: Tensor  # (B, T, A) bool: expert a processed token t
    used: Tensor  # (B, T) bool: False for tokens that are padding or routed around the layer
    dropped: Tensor  # (A,): the number of tokens that chose expert a and found it full

    @property
    def load(self) -> Tensor:
        """(A,): the share of tokens that each expert processed."""
        return self.processed.sum((0, 1)) / self.used.sum().clamp(min=1)

    @property
    def unserved(self) -> Tensor:
        """(): the share of tokens that no expert processed."""
        return (self.used & ~self.processed.any(-1)).sum() / self.used.sum().clamp(min=1)


class ExpertRouter(Chooser):
    """Assigns tokens to experts by the scores of the block's own gate.

    Token choice: each token goes to its best experts, in training up to `capacity` tokens for each expert.
    Expert choice: each expert processes the best `capacity` of the row's tokens, or in evaluation those above its
    running threshold. A token at a no-op expert keeps its value.
    """

    def __init__(self, config: DepthConfig, num_experts: int, num_experts_per_token: int) -> None:
        assert config.experts is not None
        num_all = num_experts + config.experts.num_noop
        experts_choose = schemes.experts_choose(config.experts.scheme)
        super().__init__((num_all,), config, estimates=experts_choose)
        self.scheme = config.experts.scheme
        self.experts_choose = experts_choose
        self.num_experts = num_experts
        self.num_noop_experts = config.experts.num_noop
        self.num_experts_per_token = num_experts_per_token
        self.capacity = config.experts.capacity
        if self.experts_choose and self.capacity is None:
            self.capacity = min(1.0, num_experts_per_token / num_all)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the estimates of the thresholds."""
        self.reset_threshold()

    @property
    def looks_ahead(self) -> bool:
        """Whether experts are limited as in training: in training, and within `mixdepth.lookahead`."""
        return self.training or self.forced_lookahead > 0

    def forward(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor | None = None, lookahead: bool | None = None
    ) -> tuple[Tensor, ExpertLoad]:
        """Run the experts on x (B, T, D), and report their load.

        `used` (B, T) is False at tokens of which no output is needed.
        """
        if used is None:
            used = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        if lookahead is None:
            lookahead = self.looks_ahead
        if self.experts_choose:
            return self._experts_choose(x, gate, experts, used, lookahead)
        return self._tokens_choose(x, gate, experts, used, lookahead)

    def _tokens_choose(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor, lookahead: bool
    ) -> tuple[Tensor, ExpertLoad]:
        """Send each token to its best experts."""
        # 1. The gate picks the best experts of each token.
        tokens = x.reshape(-1, x.shape[-1])  # (B * T, D)
        logits, weight, index = gate(tokens)
        logits = logits.view(*used.shape, -1)  # (B, T, A)
        choice = index.view(*used.shape, -1)  # (B, T, S)
        is_used = used[..., None].expand_as(choice)  # (B, T, S)
        wanted = torch.zeros_like(logits, dtype=torch.bool).scatter(2, choice, is_used)  # (B, T, A)

        # 2. In training an expert with a limit drops the tokens beyond it.
        processed = wanted  # (B, T, A)
        if lookahead and self.capacity is not None:
            processed = self._limited(wanted, slots(self.capacity, used.sum(1)))
        dropped = (wanted & ~processed).sum((0, 1))  # (A,)

        # 3. Run the experts. Dropped tokens and no-op experts become "no expert", at weight 0.
        runs = processed.gather(2, choice) & (choice < self.num_experts)  # (B, T, S)
        index = choice.where(runs, self.num_experts).view_as(index)  # (B * T, S)
        weight = weight.where(runs.view_as(weight), 0)  # (B * T, S)
        y = experts(tokens, index, weight).view_as(x)  # (B, T, D)
        return y, ExpertLoad(logits, processed, used, dropped)

    def _limited(self, wanted: Tensor, k: Tensor) -> Tensor:
        """Keep the first k (B,) tokens of `wanted` (B, T, A) for each expert and row; no-op experts have no limit."""
        by_expert = wanted.transpose(1, 2)  # (B, A, T)
        limit = k.repeat_interleave(by_expert.shape[1])  # (B * A,)
        first = first_k(by_expert.flatten(0, 1), limit)  # (B * A, T)
        within_limit = first.view_as(by_expert).transpose(1, 2)  # (B, T, A)
        is_noop = torch.arange(wanted.shape[2], device=wanted.device) >= self.num_experts  # (A,)
        return within_limit | (wanted & is_noop)

    def _experts_choose(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor, lookahead: bool
    ) -> tuple[Tensor, ExpertLoad]:
        """Let each expert pick its tokens."""
        # 1. Score every token for every expert.
        batch_size, num_tokens, width = x.shape
        tokens = x.reshape(-1, width)  # (B * T, D)
        logits = gate(tokens)[0].view(batch_size, num_tokens, -1)  # (B, T, A)
        scores = probabilities(logits).transpose(1, 2)  # (B, A, T)
        allowed = used[:, None].expand_as(scores)  # (B, A, T)

        # 2. Choose the pairs of a token and an expert: the best k of the row, or those above the threshold.
        if lookahead:
            processed = self._best_tokens(scores, used)  # (B, A, T)
            if self.training:
                self.remember_edge(scores, processed, allowed)
            at, expert, weight = self._slots_of_experts(scores, processed)  # (P,) each
        else:
            check_not_recorded()
            processed = allowed & (scores > self._cutoff_by_expert())  # (B, A, T)
            row, expert, column = processed[:, : self.num_experts].nonzero(as_tuple=True)  # (P,) each
            at = row * num_tokens + column
            weight = scores[row, expert, column]

        # 3. Run the experts on these pairs alone, and add up the results of each token.
        y = torch.zeros_like(tokens)  # (B * T, D)
        if at.numel():
            update = experts(tokens[at], expert[:, None], weight.to(x.dtype)[:, None])  # (P, D)
            y = y.index_add(0, at, update.to(x.dtype))
        dropped = torch.zeros(logits.shape[-1], dtype=torch.long, device=x.device)  # (A,)
        return y.view_as(x), ExpertLoad(logits, processed.transpose(1, 2), used, dropped)

    def _best_tokens(self, scores: Tensor, used: Tensor) -> Tensor:
        """Mask (B, A, T) of the tokens with the highest scores (B, A, T), among the used ones (B, T) of each row."""
        assert self.capacity is not None
        allowed = used[:, None].expand_as(scores)  # (B, A, T)
        k = slots(self.capacity, used.sum(1)).repeat_interleave(scores.shape[1])  # (B * A,)
        return top_k(scores.masked_fill(~allowed, -torch.inf).flatten(0, 1), k).view_as(scores) & allowed

    def _slots_of_experts(self, scores: Tensor, processed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, experts and weights (P,) of a fixed number of pairs; unused slots have weight 0.

        The pairs follow from scores (B, A, T) and from the mask `processed` (B, A, T).
        """
        assert self.capacity is not None
        batch_size, _, num_tokens = scores.shape
        num_slots = slots(self.capacity, num_tokens)
        is_free = ~processed[:, : self.num_experts]  # (B, E, T)
        order = is_free.to(torch.uint8).argsort(dim=2, stable=True)[..., :num_slots]  # (B, E, K)
        first_of_row = torch.arange(batch_size, device=scores.device)[:, None, None] * num_tokens  # (B, 1, 1)
        expert = torch.arange(self.num_experts, device=scores.device)[:, None].expand_as(order)  # (B, E, K)
        weight = scores.gather(2, order).where(processed.gather(2, order), 0)  # (B, E, K)
        return (first_of_row + order).reshape(-1), expert.reshape(-1), weight.reshape(-1)

    def _cutoff_by_expert(self) -> Tensor | float:
        """The threshold of each expert, (A, 1); or one number for all of them."""
        cutoff = self.cutoff
        if isinstance(cutoff, Tensor):
            cutoff = cutoff[:, None]
        return cutoff

    def extra_repr(self) -> str:
        return f"{self.scheme}, capacity={self.capacity}, num_noop_experts={self.num_noop_experts}"


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over experts (B, T, A), in float32 or better."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def balance_loss(loads: list[ExpertLoad]) -> Tensor:
    """Compute the balance loss of the Switch Transformer: A * sum over experts of load times mean probability.

    The result is the mean over layers. The loss counts the tokens that the layer processes, without padding and tokens
    routed around it, and the experts that they chose, even those that were full. With equal loads, no-op experts
    included, it is the number of experts of a token.
    """
    losses = []
    for load in loads:
        num_all = load.logits.shape[-1]
        num_used = load.used.sum().clamp(min=1)
        probability = (probabilities(load.logits) * load.used[..., None]).sum((0, 1)) / num_used  # (A,)
        chosen = load.load + load.dropped / num_used  # (A,)
        losses.append(num_all * (chosen * probability).sum())
    return torch.stack(losses).mean()
