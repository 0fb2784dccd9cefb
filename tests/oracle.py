"""The slow reference: one token at a time, no gathering, no compact sequences.

A token that is not chosen is left alone. For a chosen one, the dense layer runs over the whole row
with a mask that hides every token that was not chosen, and only that token's output is used. Experts
run one at a time, on one token at a time.
"""

import copy
import math
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from mixdepth.experts import ExpertLoad
from mixdepth.hf.layer import DepthContext, HalvesLayer, RoutedExperts, RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.router import Router
from mixdepth.routes import Route, gaussian


def oracle(model: RoutedCausalLM) -> RoutedCausalLM:
    """A copy of the model whose routed layers and experts follow the slow reference."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for ours, slow in ((RoutedLayer, OracleLayer), (RoutedExperts, OracleExperts)):
            if isinstance(module, ours):
                module.__class__ = type("Oracle", (slow, type(module)), {})
    return model


def k_of(capacity: float, length: int) -> int:
    return math.ceil(Fraction(capacity).limit_denominator(10**6) * length)


class OracleLayer(RoutedLayer):
    def forward(self, hidden_states: Tensor, *args: Any, depth: DepthContext, **kwargs: Any) -> Tensor:
        kwargs.update(zip(self.argument_names, args, strict=False))
        kwargs.pop(self.cache_name, None)
        mask = kwargs.pop("attention_mask", None)
        batch_size, num_tokens, _ = hidden_states.shape
        columns = torch.arange(num_tokens)
        if mask is None:
            allowed = (columns[None] <= columns[:, None]).expand(batch_size, -1, -1)
        else:
            allowed = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(batch_size, -1, -1)
        rows, streams, picks, weights, reals, loads = [], [], [], [], [], []
        for row in range(batch_size):
            x = hidden_states[row]
            one_row = {
                name: tuple(part[row : row + 1] if len(part) > 1 else part for part in value)
                if isinstance(value, tuple)
                else value[row : row + 1]
                if isinstance(value, Tensor) and value.ndim > 1 and len(value) > 1
                else value
                for name, value in kwargs.items()
            }
            real = [token for token in range(num_tokens) if allowed[row, token, token]]
            every = torch.tensor([token in real for token in range(num_tokens)])
            additive = mask is not None and mask.dtype != torch.bool
            if self.depth_target == "mlp":
                x = self.attend(x[None], {**one_row, "attention_mask": visible_mask(allowed[row], every, additive, x)})[
                    0
                ]
            chosen, weight = self.pick(row, x, real, depth)
            visible = torch.tensor([token in chosen for token in range(num_tokens)])
            one_row["attention_mask"] = visible_mask(allowed[row], visible, additive, x)
            out = self.processed(x, visible, chosen, weight, one_row, depth)
            if self.depth_target == "attention":
                out = self.feed_forward(out[None], every[None], depth)[0]
            rows.append(out)
            streams.append(x)
            picks.append(visible)
            weights.append(weight)
            reals.append(every)
            loads.append(depth.loads.get(self.depth_index))
        self.record(depth, torch.stack(streams), torch.stack(picks), weights, torch.stack(reals))
        if loads[0] is not None:
            depth.loads[self.depth_index] = ExpertLoad(
                *(torch.cat(parts) for parts in list(zip(*loads, strict=True))[:3]), sum(load.dropped for load in loads)
            )
        return torch.stack(rows)

    def processed(self, x, visible, chosen, weight, kwargs, depth) -> Tensor:
        """The row x (T, D) with its chosen tokens moved."""
        inner = None  # the stream between attention and MLP
        if self.depth_target == "mlp":
            y = self.feed_forward(x[None], visible[None], depth)[0]
        elif self.depth_target == "attention":
            y = self.attend(x[None], kwargs)[0]
        elif isinstance(self, HalvesLayer):
            inner = self.attend(x[None], kwargs)
            y = self.feed_forward(inner, visible[None], depth)[0]
        else:
            y = super(RoutedLayer, self).forward(x[None], **kwargs)[0]
        out = []
        for token in range(len(x)):
            if token not in chosen:
                out.append(x[token])
            elif self.depth_gate_on == "mlp":
                out.append(inner[0, token] + weight[token] * (y[token] - inner[0, token]))
            else:
                out.append(x[token] + weight[token] * (y[token] - x[token]))
        return torch.stack(out)

    def record(self, depth: DepthContext, x: Tensor, picks: Tensor, weights: list, real: Tensor) -> None:
        """Report the choice for the routing losses."""
        router = self.depth_router
        if router is None:
            return
        candidates = real if self.depth_exit is None else depth.alive[self.depth_exit][0]
        if router.scheme == "early_exit":
            depth.alive[self.depth_index] = (picks, weights)
        scores = torch.stack([torch.stack([score(router, token) for token in row]) for row in x])
        guesses = None if router.predictor is None else router.predictor(x)
        dropped = torch.zeros(len(x), dtype=torch.long)
        if router.scheme == "token_choice" and router.capacity < 1:
            dropped = (real & (scores > 0) & ~picks).sum(1)
        depth.routes[self.depth_index] = Route.choose(
            picks, scores, scores, guesses, real, x.shape[1], candidates, dropped
        )

    def pick(self, row: int, x: Tensor, real: list[int], depth: DepthContext) -> tuple[list[int], dict[int, Any]]:
        """The chosen tokens and their weights."""
        router = self.depth_router
        if self.depth_exit is not None:
            picks, weights = depth.alive[self.depth_exit]
            candidates = [token for token in real if picks[row, token]]
            if router is None:
                return candidates, weights[row]
        else:
            candidates = real
        k = k_of(router.capacity, len(real))
        scores = {token: score(router, x[token]).item() for token in candidates}
        if router.scheme == "random":
            for token in candidates:
                position = torch.tensor(real.index(token))
                step = router.step + 1 if depth.lookahead and router.training else 0
                scores[token] = gaussian(position, *router.noise_keys, step).item()
        best = sorted(sorted(candidates, key=lambda token: -scores[token])[:k])
        if router.capacity == 1:
            chosen = candidates
        elif router.scheme == "token_choice":
            chosen = [token for token in candidates if scores[token] > 0]
            chosen = chosen[:k] if depth.lookahead else chosen
        elif depth.lookahead:
            chosen = best
        elif router.scheme == "random":
            chosen = [token for token in candidates if scores[token] > NormalDist().inv_cdf(1 - router.capacity)]
        elif router.predictor is not None:
            chosen = [token for token in candidates if router.predictor(x[token][None, None])[0, 0] > 0]
        else:
            cutoff = router.threshold.item() if router.causal == "threshold" else 0
            chosen = [token for token in candidates if scores[token] > cutoff]
        return chosen, {token: self.weigh(x[token]) for token in chosen}

    def weigh(self, token: Tensor) -> Tensor | float:
        raw = score(self.depth_router, token)
        return {
            "raw": raw,
            "sigmoid": 1 / (1 + torch.exp(-raw)),
            "tanh": torch.tanh(raw),
            "unit": 1 + torch.tanh(raw),
            "straight": 1 + (raw - raw.detach()),
            "one": 1.0,
        }[self.depth_router.gate]


def score(router: Router, token: Tensor) -> Tensor:
    """The router's score of one token (D,)."""
    if router.gate == "straight":  # no gradient reaches the stream through such a score
        token = token.detach()
    if router.router_input == "normed":
        token = token / (token * token).mean().sqrt()
    return router.projection.weight[0] @ token


def visible_mask(allowed: Tensor, visible: Tensor, additive: bool, x: Tensor) -> Tensor:
    """(1, 1, T, T): what is allowed (T, T) of the tokens that are visible (T,)."""
    hidden = allowed & visible[None]
    hidden = hidden | torch.eye(len(visible), dtype=torch.bool) * ~hidden.any(1, keepdim=True)
    mask = hidden[None, None]
    if additive:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
    return mask


class OracleExperts(RoutedExperts):
    def serve(self, x: Tensor, used: Tensor | None, lookahead: bool | None) -> tuple[Tensor, ExpertLoad]:
        router, weights = self.depth_router, self.gate.weight
        used = torch.ones(x.shape[:2], dtype=torch.bool) if used is None else used
        logits = x @ weights.T
        taken = torch.zeros_like(logits, dtype=torch.bool)
        dropped = torch.zeros(len(weights), dtype=torch.long)
        rows = []
        for row in range(len(x)):
            probabilities = [torch.exp(scores) / torch.exp(scores).sum() for scores in logits[row]]
            tokens = [token for token in range(x.shape[1]) if used[row, token]]
            share: dict[tuple[int, int], Tensor] = {}  # (token, expert) -> weight
            for token in tokens if not router.experts_choose else ():
                best = sorted(range(len(weights)), key=lambda e, t=token: -probabilities[t][e].item())[
                    : self.gate.top_k
                ]
                total = sum(probabilities[token][e] for e in best) if getattr(self.gate, "norm_topk_prob", True) else 1
                for e in best:
                    full = sum(1 for _, other in share if other == e) >= k_of(router.capacity or 1, len(tokens))
                    if lookahead and e < router.num_experts and full:
                        dropped[e] += 1
                    else:
                        share[token, e] = probabilities[token][e] / total
            for e in range(len(weights)) if router.experts_choose else ():
                ranked = sorted(tokens, key=lambda t, e=e: -probabilities[t][e].item())
                best = ranked[: k_of(router.capacity, len(tokens))]
                if not lookahead:
                    best = [t for t in tokens if probabilities[t][e] > router.threshold[e]]
                share.update({(t, e): probabilities[t][e] for t in best})
            out = [torch.zeros_like(token) for token in x[row]]
            for (token, e), weight in share.items():
                taken[row, token, e] = True
                if e < router.num_experts:
                    out[token] = out[token] + weight * self.expert(x[row, token], e)
            rows.append(torch.stack(out))
        return torch.stack(rows), ExpertLoad(logits, taken, used, dropped)

    def expert(self, token: Tensor, e: int) -> Tensor:
        gate, up = (self.experts.gate_up_proj[e] @ token).chunk(2)
        return self.experts.down_proj[e] @ (self.experts.act_fn(gate) * up)
