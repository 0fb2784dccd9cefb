"""The slow reference: Mixture-of-Depths written with plain loops, one row and one token at a time.

The oracle takes three things from a routed model: its architecture, its settings (`DepthConfig`) and its weights (by
their names in the state dict). The rest is written here again, and no function of the package is called. So nothing
is gathered, nothing is batched, and there is no cache.

Equation numbers are those of the paper (Raposo et al. 2024, arXiv 2404.02258). Its Eq. 1, for the token t of a layer:

    x_t <- x_t + r_t f(X)_t    if t is among the chosen tokens X
    x_t <- x_t                 otherwise

A decoder layer of transformers returns y = x + f(x), so f is the layer's output minus its input.

Shapes: B rows, T tokens in a row, D width, E experts with weights, A experts with the no-op experts. A "row" is the
list of its T tokens, and each token is a tensor (D,).
"""

import functools
import inspect
import math
import re
import statistics
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from tiny import dense
from torch import Tensor


@dataclass
class Output:
    """What the oracle computes."""

    logits: Tensor
    """(B, T, V)"""
    loss: Tensor | None
    """The language-model loss, and in training the weighted routing losses. None without labels."""


@dataclass
class Choice:
    """What one routed layer decided about one row. Tokens are named by their index in the row."""

    real: list[int]
    """The tokens that are not padding."""
    candidates: list[int]
    """The tokens to choose from: the real tokens that earlier exits left."""
    chosen: list[int]
    weights: dict[int, Tensor]
    """The gate of each chosen token."""
    scores: dict[int, Tensor]
    """r_t of each real token."""
    guesses: dict[int, Tensor]
    """The predictor's logit of each real token; empty without a predictor."""
    num_dropped: int = 0
    """How many tokens chose the layer and found it full (token choice)."""


@dataclass
class ServedRow:
    """What the experts of one layer did for one row."""

    logits: list[Tensor]
    """The score of every expert, (A,), for each token that the layer processed."""
    num_wanted: list[int]
    """How many tokens chose each expert, served or not."""


class Oracle:
    """The slow reference of one routed model."""

    def __init__(self, routed_model: Any) -> None:
        self.settings = routed_model.depth_config
        self.weights: dict[str, Tensor] = {}
        """Every tensor of the routed model by its name. The parameters among them take gradients."""
        # A dense model of the same architecture runs everything outside the routed layers.
        architecture = routed_model.config.model_type.removeprefix("mixdepth_")
        self.model = dense(architecture, routed_model.dtype)
        own_weights = dict(self.model.named_parameters())
        for name, tensor in routed_model.state_dict().items():
            if name in own_weights and own_weights[name].shape == tensor.shape:
                own_weights[name].data.copy_(tensor)
                self.weights[name] = own_weights[name]
            else:  # of a router, or of a gate with no-op experts
                self.weights[name] = tensor.clone().requires_grad_(tensor.is_floating_point())
        # Every decoder layer of the dense model is replaced by its slow form.
        self.stack = self.name_of_stack()
        self.layers = list(self.model.get_submodule(self.stack))
        self.routed_layers = [i for i in range(len(self.layers)) if self.has(i, "depth_router.projection.weight")]
        for index, layer in enumerate(self.layers):
            layer.forward = functools.partial(self.run_layer, index, layer.forward)

    def __call__(
        self, ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, lookahead: bool = False
    ) -> Output:
        """Run the model on ids (B, T). With `lookahead` it is a pass of training, otherwise one of evaluation."""
        self.lookahead = lookahead
        self.choices: dict[int, list[Choice]] = {index: [] for index in self.routed_layers}
        self.served: dict[int, list[ServedRow]] = {}
        self.model.train(lookahead)
        out = self.model(ids, attention_mask=attention_mask, labels=labels, use_cache=False)
        loss = out.loss
        if loss is not None and lookahead:
            loss = loss + self.routing_loss() + self.balance_loss()
        return Output(out.logits, loss)

    def name_of_stack(self) -> str:
        """The name of the list of decoder layers: a router is "<stack>.<index>.depth_router..."."""
        for name in self.weights:
            match = re.match(r"(.+)\.\d+\.(mlp\.)?depth_router\.", name)
            if match:
                return match[1]
        raise AssertionError("the model has no router")

    def has(self, index: int, name: str) -> bool:
        return f"{self.stack}.{index}.{name}" in self.weights

    def weight(self, index: int, name: str) -> Tensor:
        return self.weights[f"{self.stack}.{index}.{name}"]

    # ------------------------------------------------------------------------------------------- layers

    def run_layer(self, index: int, dense_forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do what the layer with this index does to its input (B, T, D), row by row."""
        arguments = inspect.signature(dense_forward).bind(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        hidden_states = arguments.pop("hidden_states")
        mask = arguments.pop("attention_mask", None)
        rows = []
        for row in range(len(hidden_states)):
            run = Row(self, index, row, dense_forward, arguments, mask, hidden_states)
            rows.append(run.result())
        return torch.stack(rows)  # (B, T, D)

    # ------------------------------------------------------------------------------------------- the choice

    def choose(self, index: int, row: int, x: list[Tensor], real: list[int]) -> Choice:
        """Decide which tokens of the row x the layer with this index processes."""
        exits = [i for i in self.routed_layers if i < index] if self.settings.scheme == "early_exit" else []
        candidates = real
        if exits:  # only the tokens that stayed at the last exit
            before = self.choices[exits[-1]][row]
            candidates = before.chosen
            if index not in self.routed_layers:
                return before
        scores = {}
        guesses = {}
        for t in real:
            scores[t] = self.score(index, x[t])
            if self.has(index, "depth_router.predictor.up.weight"):
                guesses[t] = self.guess(index, x[t])
        wanted = self.wanted(index, real, candidates, scores, guesses)
        chosen = wanted
        if self.lookahead and self.settings.scheme == "token_choice":
            chosen = wanted[: self.num_slots(index, real)]  # the block is full: later tokens are dropped
        weights = {t: self.gate(scores[t]) for t in chosen}
        choice = Choice(real, candidates, chosen, weights, scores, guesses, len(wanted) - len(chosen))
        self.choices[index].append(choice)
        return choice

    def wanted(
        self,
        index: int,
        real: list[int],
        candidates: list[int],
        scores: dict[int, Tensor],
        guesses: dict[int, Tensor],
    ) -> list[int]:
        """The candidates that the scheme chooses, in the order of the row."""
        settings = self.settings
        if self.capacity(index) == 1:
            return candidates
        compared = {t: scores[t].item() for t in candidates}
        if settings.scheme == "random":
            compared = {t: self.noise(index, real.index(t)) for t in candidates}
        # Token choice: each token compares its own score with zero, in training too.
        if settings.scheme == "token_choice":
            return [t for t in candidates if compared[t] > 0]
        # Training: the k best of the row (Section 3.4). Python's sort is stable: the earlier of equals wins.
        if self.lookahead:
            ranked = sorted(candidates, key=lambda t: -compared[t])
            return sorted(ranked[: self.num_slots(index, real)])
        # Evaluation: each token by itself (Section 3.5).
        if settings.scheme == "random":
            threshold = statistics.NormalDist().inv_cdf(1 - self.capacity(index))
            return [t for t in candidates if compared[t] > threshold]
        if settings.causal == "predictor":
            return [t for t in candidates if guesses[t].item() > 0]
        if settings.causal == "threshold":
            threshold = self.weight(index, "depth_router.threshold").item()
            return [t for t in candidates if compared[t] > threshold]
        assert settings.causal == "aux_loss"
        return [t for t in candidates if compared[t] > 0]

    def capacity(self, index: int) -> float:
        """The share of its row that the routed layer processes."""
        capacity: Any = self.settings.capacity
        if isinstance(capacity, (tuple, list)):  # one for each routed layer
            return float(capacity[self.routed_layers.index(index)])
        return float(capacity)

    def num_slots(self, index: int, real: list[int]) -> int:
        """k = ceil(capacity * length)."""
        return rounded_up(self.capacity(index), len(real))

    # ------------------------------------------------------------------------------------------- scores

    def score(self, index: int, token: Tensor) -> Tensor:
        """r_t = w . x_t (Section 3.4)."""
        if self.settings.gate == "straight":  # the router's gradient must not reach the stream
            token = token.detach()
        if self.settings.router_input == "normed":
            token = token / root_mean_square(token)
        w = self.weight(index, "depth_router.projection.weight")[0]  # (D,)
        return w.to(token.dtype) @ token

    def guess(self, index: int, token: Tensor) -> Tensor:
        """The predictor's logit for "top-k would choose this token". It sends no gradient to the stream."""
        token = token.detach()
        token = token / root_mean_square(token)
        name = "depth_router.predictor"
        hidden = self.weight(index, f"{name}.up.weight") @ token + self.weight(index, f"{name}.up.bias")
        if not self.has(index, f"{name}.down.weight"):
            return hidden[0]  # a linear predictor
        hidden = hidden / (1 + torch.exp(-hidden))  # silu
        out = self.weight(index, f"{name}.down.weight") @ hidden + self.weight(index, f"{name}.down.bias")
        return out[0]

    def gate(self, score: Tensor) -> Tensor:
        """How far a chosen token moves."""
        kind = self.settings.gate
        if kind == "raw":
            return score
        if kind == "sigmoid":
            return 1 / (1 + torch.exp(-score))
        if kind == "tanh":
            return torch.tanh(score)
        if kind == "unit":
            return 1 + torch.tanh(score)
        if kind == "straight":
            return 1 + (score - score.detach())
        assert kind == "one"
        return torch.ones_like(score)

    def noise(self, index: int, position: int) -> float:
        """The standard normal score of a position under `scheme="random"`, new in each step of training."""
        step = 0
        if self.lookahead:
            step = int(self.weight(index, "depth_router.step")) + 1
        state = 0
        for key in (self.settings.seed, index, step, position):
            state = scrambled(state * 31 + key + 1)
        quantile = (state % 2**23 + 0.5) / 2**23
        return statistics.NormalDist().inv_cdf(quantile)

    # ------------------------------------------------------------------------------------------- experts

    def expert_outputs(self, index: int, h: list[Tensor], in_use: list[int]) -> list[Tensor]:
        """What the experts of a layer return for each token of the row h. They see the tokens in use only."""
        experts = self.layers[index].mlp.experts
        num_experts = len(experts.down_proj)  # E
        gate = self.weight(index, "mlp.gate.weight")  # (A, D)
        logits = {t: gate @ h[t] for t in in_use}
        probabilities = {t: torch.exp(logits[t]) / torch.exp(logits[t]).sum() for t in in_use}
        if self.settings.experts.scheme == "token_choice":
            shares, num_wanted = self.tokens_choose(index, num_experts, probabilities, in_use)
        else:
            shares, num_wanted = self.experts_choose(index, probabilities, in_use)
        self.served.setdefault(index, []).append(ServedRow(list(logits.values()), num_wanted))
        out = [torch.zeros_like(token) for token in h]
        for (t, e), share in shares.items():
            if e >= num_experts:
                continue  # a no-op expert adds nothing
            gated, up = (experts.gate_up_proj[e] @ h[t]).chunk(2)
            out[t] = out[t] + share * (experts.down_proj[e] @ (experts.act_fn(gated) * up))
        return out

    def tokens_choose(
        self, index: int, num_experts: int, probabilities: dict[int, Tensor], in_use: list[int]
    ) -> tuple[dict[tuple[int, int], Tensor], list[int]]:
        """Token choice: the weight of each pair (token, expert), and how many tokens chose each expert."""
        gate = self.layers[index].mlp.gate
        num_all = len(self.weight(index, "mlp.gate.weight"))  # A
        limit = math.inf
        if self.lookahead and self.settings.experts.capacity is not None:
            limit = rounded_up(self.settings.experts.capacity, len(in_use))
        shares = {}
        num_wanted = [0] * num_all
        for t in in_use:
            ranked = sorted(range(num_all), key=lambda e, t=t: -probabilities[t][e].item())  # type: ignore[misc]
            best = ranked[: gate.top_k]
            total = 1.0
            if getattr(gate, "norm_topk_prob", True):
                total = sum(probabilities[t][e] for e in best)
            for e in best:
                num_wanted[e] += 1
                if num_wanted[e] <= limit or e >= num_experts:  # a no-op expert is never full
                    shares[t, e] = probabilities[t][e] / total
        return shares, num_wanted

    def experts_choose(
        self, index: int, probabilities: dict[int, Tensor], in_use: list[int]
    ) -> tuple[dict[tuple[int, int], Tensor], list[int]]:
        """Expert choice: the weight of each pair (token, expert), and how many tokens each expert took."""
        num_all = len(self.weight(index, "mlp.gate.weight"))  # A
        capacity = self.settings.experts.capacity
        if capacity is None:  # each token has as many experts on average as with token choice
            capacity = min(1.0, self.layers[index].mlp.gate.top_k / num_all)
        thresholds = self.weight(index, "mlp.depth_router.threshold")  # (A,)
        shares = {}
        num_wanted = []
        for e in range(num_all):
            if self.lookahead:
                ranked = sorted(in_use, key=lambda t, e=e: -probabilities[t][e].item())  # type: ignore[misc]
                chosen = ranked[: rounded_up(capacity, len(in_use))]
            elif capacity == 1:
                chosen = in_use
            else:
                chosen = [t for t in in_use if probabilities[t][e] > thresholds[e]]
            for t in chosen:
                shares[t, e] = probabilities[t][e]
            num_wanted.append(len(chosen))
        return shares, num_wanted

    # ------------------------------------------------------------------------------------------- losses

    def routing_loss(self) -> Tensor:
        """The loss of the routers with its coefficient: the mean over the routed layers."""
        settings = self.settings
        losses = [torch.zeros(())]
        coefficient = 0.0
        if settings.scheme == "token_choice":
            losses = [self.capacity_loss(index) for index in self.routed_layers]
            coefficient = settings.capacity_loss_coef
        elif settings.causal == "predictor":
            losses = [loss_of_choice(self.choices[i], [c.guesses for c in self.choices[i]]) for i in self.routed_layers]
            coefficient = settings.predictor_loss_coef
        elif settings.causal == "aux_loss":
            losses = [loss_of_choice(self.choices[i], [c.scores for c in self.choices[i]]) for i in self.routed_layers]
            coefficient = settings.router_aux_loss_coef
        if not losses:
            return torch.zeros(())
        return coefficient * sum(losses) / len(losses)

    def capacity_loss(self, index: int) -> Tensor:
        """f p / c + (1 - f) (1 - p) / (1 - c), with f the share of tokens that chose the layer and p their mean
        probability of it, c the capacity."""
        c = self.capacity(index)
        if c == 1:
            return torch.zeros(())
        num_real = 0
        num_wanted = 0
        total = torch.zeros(())
        for choice in self.choices[index]:
            num_real += len(choice.real)
            num_wanted += len(choice.chosen) + choice.num_dropped
            for t in choice.real:
                total = total + 1 / (1 + torch.exp(-choice.scores[t]))
        f = num_wanted / num_real
        p = total / num_real
        return f * p / c + (1 - f) * (1 - p) / (1 - c)

    def balance_loss(self) -> Tensor:
        """A * sum over experts of the share of tokens that chose it times its mean probability (Switch Transformer,
        Fedus et al. 2021, Eq. 4), as a mean over layers, with its coefficient."""
        experts = self.settings.experts
        if experts is None or experts.scheme != "token_choice":
            return torch.zeros(())
        losses = []
        for rows in self.served.values():
            logits = [token for row in rows for token in row.logits]
            num_all = len(logits[0])  # A
            loss = torch.zeros(())
            for e in range(num_all):
                share = sum(row.num_wanted[e] for row in rows) / len(logits)
                probability = sum(torch.exp(token[e]) / torch.exp(token).sum() for token in logits) / len(logits)
                loss = loss + num_all * share * probability
            losses.append(loss)
        return experts.balance_coef * sum(losses) / len(losses)


class Row:
    """One row of the batch in one layer.

    To keep what was not chosen out of attention, the dense layer runs on the whole row with a mask that hides every
    token that was not chosen, and only the outputs of the chosen tokens are read.
    """

    def __init__(
        self,
        oracle: Oracle,
        index: int,
        row: int,
        dense_forward: Any,
        arguments: dict[str, Any],
        mask: Tensor | None,
        hidden_states: Tensor,
    ) -> None:
        self.oracle = oracle
        self.index = index
        self.row = row
        self.dense_forward = dense_forward
        self.layer = oracle.layers[index]
        self.arguments = {name: of_row(value, row, len(hidden_states)) for name, value in arguments.items()}
        self.x: list[Tensor] = list(hidden_states[row])
        self.is_additive = mask is not None and mask.dtype != torch.bool
        self.allowed = allowed_pairs(mask, row, len(self.x))
        # A token that may not see itself is padding.
        self.real = [t for t in range(len(self.x)) if self.allowed[t][t]]

    def result(self) -> Tensor:
        """(T, D): the row behind the layer."""
        settings = self.oracle.settings
        is_behind_exit = settings.scheme == "early_exit" and any(i < self.index for i in self.oracle.routed_layers)
        if self.index not in self.oracle.routed_layers and not is_behind_exit:
            return torch.stack(self.whole_layer(self.x, self.real))
        if settings.target == "attention":
            return torch.stack(self.feed_forward(self.routed(self.x, self.attend), self.real))
        if settings.target == "mlp":
            return torch.stack(self.routed(self.attend(self.x, self.real), self.feed_forward))
        if settings.gate_on == "mlp":
            return torch.stack(self.gated_within())
        return torch.stack(self.routed(self.x, self.whole_layer))

    def routed(self, x: list[Tensor], f: Any) -> list[Tensor]:
        """Eq. 1 around f, which is the layer or one half of it."""
        choice = self.oracle.choose(self.index, self.row, x, self.real)
        y = f(x, choice.chosen)
        out = []
        for t in range(len(x)):
            if t in choice.chosen:
                out.append(x[t] + choice.weights[t] * (y[t] - x[t]))
            else:
                out.append(x[t])
        return out

    def gated_within(self) -> list[Tensor]:
        """The paper's Fig. 1: the weight multiplies the MLP's update alone."""
        choice = self.oracle.choose(self.index, self.row, self.x, self.real)
        between = self.attend(self.x, choice.chosen)
        y = self.feed_forward(between, choice.chosen)
        out = []
        for t in range(len(self.x)):
            if t in choice.chosen:
                out.append(between[t] + choice.weights[t] * (y[t] - between[t]))
            else:
                out.append(self.x[t])
        return out

    def whole_layer(self, x: list[Tensor], visible: list[int]) -> list[Tensor]:
        """The dense layer, in which tokens see the visible ones only."""
        if self.oracle.settings.experts is not None:
            return self.feed_forward(self.attend(x, visible), visible)
        y = self.dense_forward(torch.stack(x)[None], attention_mask=self.mask(visible), **self.arguments)  # (1, T, D)
        return list(y[0])

    def attend(self, x: list[Tensor], visible: list[int]) -> list[Tensor]:
        """x + attention(norm(x)), in which tokens see the visible ones only."""
        normed = self.layer.input_layernorm(torch.stack(x)[None])  # (1, T, D)
        mask = self.mask(visible)
        update = self.layer.self_attn(hidden_states=normed, attention_mask=mask, **self.arguments)[0]  # (1, T, D)
        return [x[t] + update[0, t] for t in range(len(x))]

    def feed_forward(self, x: list[Tensor], in_use: list[int]) -> list[Tensor]:
        """x + mlp(norm(x)); routed experts serve the tokens in use only."""
        normed = list(self.layer.post_attention_layernorm(torch.stack(x)[None])[0])
        if self.oracle.has(self.index, "mlp.depth_router.threshold"):
            updates = self.oracle.expert_outputs(self.index, normed, in_use)
        else:
            updates = list(self.layer.mlp(torch.stack(normed)[None])[0])
        return [x[t] + updates[t] for t in range(len(x))]

    def mask(self, visible: list[int]) -> Tensor:
        """(1, 1, T, T): which tokens (columns) each token (rows) may see."""
        num_tokens = len(self.x)
        mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        for query in range(num_tokens):
            for key in visible:
                mask[query, key] = self.allowed[query][key]
            if not mask[query].any():
                mask[query, query] = True  # a softmax over nothing is NaN; nothing reads this output
        if self.is_additive:
            zeros = torch.zeros(num_tokens, num_tokens, dtype=self.x[0].dtype)
            return zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)[None, None]
        return mask[None, None]


def allowed_pairs(mask: Tensor | None, row: int, num_tokens: int) -> list[list[bool]]:
    """Which keys each query may see, by the mask (B or 1, 1, T, T) that the model gives its layers."""
    if mask is None:
        return [[key <= query for key in range(num_tokens)] for query in range(num_tokens)]
    of_this_row = mask[min(row, len(mask) - 1), 0]  # (T, T)
    if mask.dtype != torch.bool:
        of_this_row = of_this_row == 0  # an additive mask adds 0 to what is allowed
    pairs: list[list[bool]] = of_this_row.tolist()
    return pairs


def of_row(value: Any, row: int, num_rows: int) -> Any:
    """An argument of the layer for one row of the batch: the same for all rows, or with a first axis of rows."""
    if isinstance(value, tuple):
        return tuple(of_row(part, row, num_rows) for part in value)
    if isinstance(value, Tensor) and value.ndim > 1 and len(value) == num_rows:
        return value[row : row + 1]
    return value


def loss_of_choice(choices: list[Choice], logits: list[dict[int, Tensor]]) -> Tensor:
    """The cross-entropy of logits, one dict for each row, for having been chosen: the mean over candidates."""
    total = torch.zeros(())
    num_candidates = 0
    for choice, of_token in zip(choices, logits, strict=True):
        num_candidates += len(choice.candidates)
        for t in choice.candidates:
            if t in choice.chosen:
                total = total - F.logsigmoid(of_token[t])  # -log p
            else:
                total = total - F.logsigmoid(-of_token[t])  # -log(1 - p)
    return total / num_candidates


def root_mean_square(token: Tensor) -> Tensor:
    return (token * token).mean().sqrt()


def rounded_up(capacity: float, length: int) -> int:
    """ceil(capacity * length) in exact arithmetic: the capacity is the fraction that was meant, such as 7/100."""
    return math.ceil(Fraction(capacity).limit_denominator(10**6) * length)


def scrambled(number: int) -> int:
    """The finaliser of MurmurHash3 on 32 bits."""
    number %= 2**32
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    number ^= number >> 16
    return number
