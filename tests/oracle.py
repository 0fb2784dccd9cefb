"""The slow reference: one token at a time, no gathering, no compact sequences.

A token that is not chosen is left alone. For a chosen one, the dense layer runs over the whole row
with a mask that hides every token that was not chosen, and only that token's output is used.
"""

import copy
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from mixdepth.hf.layer import DepthContext, RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.routing import Route


def oracle(model: RoutedCausalLM) -> RoutedCausalLM:
    """A copy of the model whose routed layers follow the slow reference."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, RoutedLayer):
            module.__class__ = type("OracleLayer", (OracleForward, type(module)), {})
    return model


class OracleForward(RoutedLayer):
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
        rows, picks, reals = [], [], []
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
            chosen = self.pick(x, real, depth.lookahead)
            visible = torch.zeros(num_tokens, dtype=torch.bool)
            visible[chosen] = True
            hidden = allowed[row] & visible[None]
            hidden = hidden | torch.eye(num_tokens, dtype=torch.bool) * ~hidden.any(1, keepdim=True)
            layer_mask = hidden[None, None]
            if mask is not None and mask.dtype != torch.bool:
                layer_mask = torch.zeros_like(layer_mask, dtype=x.dtype).masked_fill(
                    ~layer_mask, torch.finfo(x.dtype).min
                )
            y = super(RoutedLayer, self).forward(x[None], attention_mask=layer_mask, **one_row)[0]
            out = []
            for token in range(num_tokens):
                if token not in chosen:
                    out.append(x[token])
                else:
                    out.append(x[token] + self.weigh(x[token]) * (y[token] - x[token]))
            rows.append(torch.stack(out))
            picks.append(visible)
            reals.append(torch.tensor([token in real for token in range(num_tokens)]))
        self.record(depth, hidden_states, torch.stack(picks), torch.stack(reals))
        return torch.stack(rows)

    def record(self, depth: DepthContext, x: Tensor, picks: Tensor, real: Tensor) -> None:
        """Report the choice for the routing losses."""
        router = self.depth_router
        scores = torch.stack([torch.stack([router.projection.weight[0] @ token for token in row]) for row in x])
        guesses = None if router.predictor is None else router.predictor(x)
        depth.routes[self.depth_index] = Route.choose(picks, scores, scores, guesses, real, x.shape[1])

    def pick(self, x: Tensor, real: list[int], lookahead: bool) -> list[int]:
        router = self.depth_router
        if lookahead:
            scores = {token: (router.projection.weight[0] @ x[token]).item() for token in real}
            k = math.ceil(Fraction(str(router.capacity)) * len(real))
            return sorted(sorted(real, key=lambda token: -scores[token])[:k])
        return [token for token in real if router.capacity == 1 or self.guess(x[token]) > 0]

    def guess(self, token: Tensor) -> Tensor:
        router = self.depth_router
        if router.predictor is None:
            return router.projection.weight[0] @ token
        return router.predictor(token[None, None])[0, 0]

    def weigh(self, token: Tensor) -> Tensor | float:
        score = self.depth_router.projection.weight[0] @ token
        return {
            "raw": score,
            "sigmoid": 1 / (1 + torch.exp(-score)),
            "tanh": torch.tanh(score),
            "unit": 1 + torch.tanh(score),
            "one": 1.0,
        }[self.depth_router.gate]
