"""The variants and architectures that the laws run over, and models of them.

Every variant runs on Llama (with experts: on Mixtral), and every supported architecture runs the default variant.
The full cross product carries the marker `slow`.
"""

import functools
from typing import Any

import pytest
import torch
from tiny import routed, token_ids

import mixdepth
from mixdepth.hf.architectures import EXPERTS, HALVES

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sigmoid": {"gate": "sigmoid"},
    "tanh": {"gate": "tanh"},
    "unit": {"gate": "unit"},
    "straight": {"gate": "straight", "causal": "threshold"},
    "one": {"gate": "one"},
    "normed": {"router_input": "normed", "causal": "threshold"},
    "aux_loss": {"causal": "aux_loss"},
    "aux_loss-unit": {"causal": "aux_loss", "gate": "unit"},
    "linear-predictor": {"predictor_width": 0.0},
    "capacities": {"capacity": (0.07, 0.5, 1.0)},
    "all-layers": {"layers": None, "every": 1, "capacity": 0.25},
    "threshold": {"causal": "threshold"},
    "token_choice": {"scheme": "token_choice"},
    "early_exit": {"scheme": "early_exit", "layers": (0, 2), "capacity": (0.7, 0.4)},
    "early_exit-aux_loss": {
        "scheme": "early_exit",
        "layers": (0, 2),
        "capacity": (0.7, 0.4),
        "causal": "aux_loss",
        "gate": "unit",
    },
    "early_exit-threshold": {
        "scheme": "early_exit",
        "layers": (1, 2, 3),
        "capacity": (0.7, 0.5, 0.3),
        "causal": "threshold",
    },
    "random": {"scheme": "random"},
    "soft": {"scheme": "soft", "capacity": 1.0},
    "attention": {"target": "attention"},
    "mlp": {"target": "mlp"},
    "mlp-token_choice": {"target": "mlp", "scheme": "token_choice"},
    "gate_on_mlp": {"gate_on": "mlp"},
}

EXPERT_VARIANTS: dict[str, dict[str, Any]] = {
    "staged": {"experts": "token_choice"},
    "staged-limited": {"experts": "token_choice", "expert_capacity": 0.3},
    "staged-expert_choice": {"experts": "expert_choice"},
    "staged-early_exit": {
        "experts": "token_choice",
        "scheme": "early_exit",
        "layers": (0, 2),
        "capacity": (0.7, 0.4),
    },
    "staged-mlp": {"experts": "expert_choice", "target": "mlp"},
    "experts": {"experts": "token_choice", "layers": ()},
    "experts-limited": {"experts": "token_choice", "layers": (), "expert_capacity": 0.3},
    "expert_choice": {"experts": "expert_choice", "layers": ()},
    "integrated": {"experts": "token_choice", "layers": (), "num_noop_experts": 2},
    "integrated-limited": {
        "experts": "token_choice",
        "layers": (),
        "num_noop_experts": 2,
        "expert_capacity": 0.2,
    },
    "integrated-expert_choice": {"experts": "expert_choice", "layers": (), "num_noop_experts": 2},
    "staged-integrated": {"experts": "token_choice", "num_noop_experts": 1},
}
ALL_VARIANTS = {**VARIANTS, **EXPERT_VARIANTS}
ON_ALL_EXPERTS = ("staged-integrated", "staged-expert_choice")
"""Expert variants that run on every architecture whose experts can be routed; the others run on Mixtral."""

EAGER = {"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"}
"""Architectures without SDPA. Their softmax runs in float32 whatever the model's dtype, and float64's lowest number
overflows in it."""

FLOAT32_INSIDE = {
    "afmoe",
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "kolibri1",
    "laguna",
    "minimax_m2",
    "solar_open",
}
"""Architectures that score experts (DiffLlama: its lambda) in float32, where rounding depends on a sum's shape."""


def precision(architecture):
    """The dtype to test in, and the tolerance that its rounding asks for."""
    if architecture in EAGER:
        return torch.float32, 5e-4
    if architecture in FLOAT32_INSIDE:
        return torch.float64, 1e-5
    return torch.float64, 1e-10


# Cases are pairs of an architecture and a variant. Those with the marker `slow` are left out of the quick suite.


def case(architecture, variant, is_slow=False):
    """A case, with an id that omits a default variant except on Llama."""
    id_of_case = f"{architecture}-{variant}"
    if variant == "default" and architecture != "llama":
        id_of_case = architecture
    marks = ()
    if is_slow:
        marks = (pytest.mark.slow,)
    return pytest.param(architecture, variant, id=id_of_case, marks=marks)


def expert_cases():
    """Every variant of experts on every architecture whose experts can be routed."""
    for architecture in EXPERTS:
        for name in EXPERT_VARIANTS:
            yield case(architecture, name, is_slow=architecture != "mixtral" and name not in ON_ALL_EXPERTS)


def cases():
    """Every variant on every architecture that it can be had on."""
    yield from expert_cases()
    for architecture in mixdepth.supported_architectures():
        for name, settings in VARIANTS.items():
            needs_halves = "target" in settings or "gate_on" in settings
            if architecture in HALVES or not needs_halves:
                yield case(architecture, name, is_slow=architecture != "llama" and name != "default")


every_case = pytest.mark.parametrize(("architecture", "variant"), list(cases()))
every_expert_case = pytest.mark.parametrize(("architecture", "variant"), list(expert_cases()))

CACHES = ("llama", "mistral", "gemma2", "gpt2", "gpt_neox", "deepseek_v3", "mixtral")
"""An architecture of each kind of cache: full, sliding, both, with other names, latent, and behind experts."""


def cache_cases():
    """All cases; those of other architectures than CACHES are slow."""
    for of_all in cases():
        architecture, variant = of_all.values
        yield case(architecture, variant, is_slow=bool(of_all.marks) or architecture not in CACHES)


every_cache_case = pytest.mark.parametrize(("architecture", "variant"), list(cache_cases()))


@functools.cache
def shared(architecture, variant):
    """One model for all laws that do not change it, with its tolerance."""
    dtype, tolerance = precision(architecture)
    settings = ALL_VARIANTS[variant]
    if "experts" in settings:  # transformers' gates weigh experts in float32
        tolerance = max(tolerance, 1e-5)
    return routed(architecture, dtype, **settings), tolerance


def left_padded(num_padding=6):
    """Two rows of token ids, the first with padding on the left, and their attention mask."""
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, :num_padding] = 0
    return ids.masked_fill(mask == 0, 0), mask


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance
