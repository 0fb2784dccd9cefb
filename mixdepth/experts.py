"""Experts inside a block: which tokens go to which expert. Knows nothing of transformers.

Shapes: B batch, T tokens, D width, E experts with weights, N no-op experts, A = E + N, S experts of one
token, P pairs of a token and an expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mixdepth.config import DepthConfig
from mixdepth.router import Chooser, check_not_recorded
from mixdepth.routes import first_k, slots, top_k

Gate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""(B * T, D) -> logits (B * T, A), and of each token's best experts the weights and indices (B * T, S)."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens (P, D), expert indices (P, S) and weights (P, S) -> (P, D); an index of E is no expert."""


class ExpertLoad(NamedTuple):
    """Which experts took which tokens in one layer.

    In a routed layer T are the slots of its route: the chosen tokens, in order; in evaluation rows that chose none
    are left out.
    """

    logits: Tensor  # (B, T, A): the gate's scores of all experts, the no-op ones last
    taken: Tensor  # (B, T, A) bool: expert a took token t
    used: Tensor  # (B, T) bool: False for tokens that are padding or routed around the layer
    dropped: Tensor  # (A,): how many tokens chose expert a and found it full

    @property
    def load(self) -> Tensor:
        """(A,): the share of tokens that each expert took."""
        return self.taken.sum((0, 1)) / self.used.sum().clamp(min=1)

    @property
    def unserved(self) -> Tensor:
        """(): the share of tokens that no expert took."""
        return (self.used & ~self.taken.any(-1)).sum() / self.used.sum().clamp(min=1)


class ExpertRouter(Chooser):
    """Brings tokens and experts together by the scores of the block's own gate.

    Token choice: each token goes to its best experts, in training up to `capacity` tokens for each.
    Expert choice: each expert takes its `capacity` of the row's tokens, or in evaluation those above its
    running threshold. A token at a no-op expert is left as it is.
    """

    def __init__(self, config: DepthConfig, num_experts: int, num_experts_per_token: int) -> None:
        num_all = num_experts + config.num_noop_experts
        super().__init__((num_all,), config, estimates=config.experts == "expert_choice")
        self.experts_choose = config.experts == "expert_choice"
        self.num_experts = num_experts
        self.num_noop_experts = config.num_noop_experts
        self.num_experts_per_token = num_experts_per_token
        self.capacity = config.expert_capacity
        if self.experts_choose and self.capacity is None:
            self.capacity = min(1.0, num_experts_per_token / num_all)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_threshold()

    @property
    def looks_ahead(self) -> bool:
        return self.training or self.forced_lookahead > 0

    def forward(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor | None = None, lookahead: bool | None = None
    ) -> tuple[Tensor, ExpertLoad]:
        """The experts' output for x (B, T, D), and who did what; `used` (B, T) is False where nobody needs it."""
        if used is None:
            used = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if lookahead is None:
            lookahead = self.looks_ahead
        run = self._experts_choose if self.experts_choose else self._tokens_choose
        return run(x, gate, experts, used, lookahead)

    def _tokens_choose(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor, lookahead: bool
    ) -> tuple[Tensor, ExpertLoad]:
        tokens = x.reshape(-1, x.shape[-1])
        logits, weight, index = gate(tokens)
        logits, choice = logits.view(*used.shape, -1), index.view(*used.shape, -1)  # (B, T, A), (B, T, S)
        taken = torch.zeros_like(logits, dtype=torch.bool).scatter(2, choice, used[..., None].expand_as(choice))
        wanted = taken
        if lookahead and self.capacity is not None:
            taken = self._limited(wanted, slots(self.capacity, used.sum(1)))
        dropped = (wanted & ~taken).sum((0, 1))
        runs = taken.gather(2, choice) & (choice < self.num_experts)
        index = choice.where(runs, self.num_experts).view_as(index)
        y = experts(tokens, index, weight.where(runs.view_as(weight), 0)).view_as(x)
        return y, ExpertLoad(logits, taken, used, dropped)

    def _limited(self, wanted: Tensor, k: Tensor) -> Tensor:
        """The first k (B,) tokens of each row for each expert; no-op experts are never full."""
        by_expert = wanted.transpose(1, 2)  # (B, A, T)
        limit = k.repeat_interleave(by_expert.shape[1])
        kept = first_k(by_expert.flatten(0, 1), limit).view_as(by_expert).transpose(1, 2)
        is_noop = torch.arange(wanted.shape[2], device=wanted.device) >= self.num_experts
        return kept | (wanted & is_noop)

    def _experts_choose(
        self, x: Tensor, gate: Gate, experts: Experts, used: Tensor, lookahead: bool
    ) -> tuple[Tensor, ExpertLoad]:
        assert self.capacity is not None
        batch_size, num_tokens, width = x.shape
        tokens = x.reshape(-1, width)
        logits = gate(tokens)[0].view(batch_size, num_tokens, -1)  # (B, T, A)
        scores = probabilities(logits).transpose(1, 2)  # (B, A, T)
        allowed = used[:, None].expand_as(scores)
        if lookahead:
            k = slots(self.capacity, used.sum(1)).repeat_interleave(scores.shape[1])  # (B * A,)
            taken = top_k(scores.masked_fill(~allowed, -torch.inf).flatten(0, 1), k).view_as(scores) & allowed
            if self.training:
                self.observe(scores, taken, allowed)
            num_slots = slots(self.capacity, num_tokens)
            order = (
                (~taken[:, : self.num_experts]).to(torch.uint8).argsort(dim=2, stable=True)[..., :num_slots]
            )  # (B, E, K)
            rows = torch.arange(batch_size, device=x.device)[:, None, None] * num_tokens
            at = (rows + order).reshape(-1)  # (P,): tokens
            expert = torch.arange(self.num_experts, device=x.device)[:, None].expand_as(order).reshape(-1)
            weight = scores.gather(2, order).where(taken.gather(2, order), 0).reshape(-1)  # unused slots: nothing
        else:
            check_not_recorded()
            cutoff = self.cutoff
            taken = allowed & (scores > (cutoff[:, None] if isinstance(cutoff, Tensor) else cutoff))
            row, expert, column = taken[:, : self.num_experts].nonzero(as_tuple=True)  # run on these pairs alone
            at, weight = row * num_tokens + column, scores[row, expert, column]
        y = torch.zeros_like(tokens)
        if at.numel():
            y = y.index_add(0, at, experts(tokens[at], expert[:, None], weight.to(x.dtype)[:, None]).to(x.dtype))
        dropped = torch.zeros(logits.shape[-1], dtype=torch.long, device=x.device)
        return y.view_as(x), ExpertLoad(logits, taken.transpose(1, 2), used, dropped)

    def extra_repr(self) -> str:
        scheme = "expert_choice" if self.experts_choose else "token_choice"
        return f"{scheme}, capacity={self.capacity}, num_noop_experts={self.num_noop_experts}"


def probabilities(logits: Tensor) -> Tensor:
    """(B, T, A), in float32 or better."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def balance_loss(loads: list[ExpertLoad]) -> Tensor:
    """The Switch Transformer's: A * sum over experts of their load times mean probability, mean over layers.

    Counted are the tokens that the layer processes, not padding, nor those routed around it, and what they
    chose, even where an expert was full. With equal loads, of no-op experts too, it is the number of
    experts of a token.
    """
    losses = []
    for load in loads:
        num_used = load.used.sum().clamp(min=1)
        probability = (probabilities(load.logits) * load.used[..., None]).sum((0, 1)) / num_used  # (A,)
        losses.append(load.logits.shape[-1] * ((load.load + load.dropped / num_used) * probability).sum())
    return torch.stack(losses).mean()
