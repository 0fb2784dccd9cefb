"""The models that transformers' promises are tried on: six architectures, dense and routed by every rule.

The dense model is the control: what a test asks of a routed model it asks of the dense one too.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from tiny import dense, routed, token_ids

ARCHITECTURES = ("llama", "gemma2", "mistral", "gpt2", "mixtral", "qwen3")
"""Mistral's window is shorter than the text, and so is that of every other layer of Gemma 2."""

DENSE = "dense"
VARIANTS: dict[str, dict[str, Any]] = {
    "predictor": {"causal": "predictor"},
    "aux_loss": {"causal": "aux_loss"},
    "threshold": {"causal": "threshold"},
    "random": {"scheme": "random"},
    "token_choice": {"scheme": "token_choice"},
    "early_exit": {"scheme": "early_exit", "layers": (0, 2), "capacity": (0.7, 0.4)},
    "experts-token_choice": {"experts": "token_choice"},
    "experts-expert_choice": {"experts": "expert_choice"},
}
RULES = ("predictor", "aux_loss", "threshold")

ON_ALL = [(architecture, variant) for architecture in ARCHITECTURES for variant in (DENSE, "predictor")]
OTHERS = [
    ("llama", "aux_loss"),
    ("llama", "threshold"),
    ("llama", "random"),
    ("llama", "token_choice"),
    ("llama", "early_exit"),
    ("mixtral", "experts-token_choice"),
    ("mixtral", "experts-expert_choice"),
]
CASES = ON_ALL + OTHERS
ROUTED_CASES = [case for case in CASES if case[1] != DENSE]


def over(cases: list[tuple[str, str]]) -> Any:
    """Run a test over pairs of an architecture and a variant."""
    return pytest.mark.parametrize(("architecture", "variant"), cases, ids=["-".join(case) for case in cases])


every_model = over(CASES)
every_routed_model = over(ROUTED_CASES)
every_rule_on_llama = over([("llama", variant) for variant in (DENSE, *RULES)])


def promised(architecture: str, variant: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model in evaluation mode, which a test may change."""
    return copy.deepcopy(_made(architecture, variant, dtype))


@functools.cache
def _made(architecture: str, variant: str, dtype: torch.dtype) -> Any:
    if variant == DENSE:
        return dense(architecture, dtype)
    model = routed(architecture, dtype, **VARIANTS[variant])
    for router in model.depth_routers:
        if router.step is not None:
            router.step += 7  # as after some training
    return model


def precision(architecture: str, variant: str) -> tuple[torch.dtype, float]:
    """The dtype in which sums of another order are compared, and the tolerance."""
    if architecture == "gemma2":  # its softmax runs in float32 whatever the model's dtype
        return torch.float32, 5e-4
    if variant.startswith("experts"):  # gates weigh experts in float32
        return torch.float64, 1e-5
    return torch.float64, 1e-10


def logits_of(model: Any, ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """The logits of one pass in evaluation, computed by the plain loop over experts."""
    model.set_experts_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(token_ids() if ids is None else ids, **kwargs).logits
    return logits
