"""The variants and architectures that the laws run over, and models of them.

Every variant runs on Llama (with experts: on Mixtral), and every supported architecture runs the default variant.
The full cross product carries the marker `slow`.
"""

import functools

import pytest
import torch
from tiny import routed, token_ids

import mixdepth
from mixdepth.hf.architectures import EXPERTS, HALVES

VARIANTS = {
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
        **{"scheme": "early_exit", "layers": (0, 2), "capacity": (0.7, 0.4)},
        **{"causal": "aux_loss", "gate": "unit"},
    },
    "early_exit-threshold": {
        **{"scheme": "early_exit", "layers": (1, 2, 3), "capacity": (0.7, 0.5, 0.3)},
        "causal": "threshold",
    },
    "random": {"scheme": "random"},
    "soft": {"scheme": "soft", "capacity": 1.0},
    "attention": {"target": "attention"},
    "mlp": {"target": "mlp"},
    "mlp-token_choice": {"target": "mlp", "scheme": "token_choice"},
    "gate_on_mlp": {"gate_on": "mlp"},
}

EXPERT_VARIANTS = {
    "staged": {"experts": "token_choice"},
    "staged-limited": {"experts": "token_choice", "expert_capacity": 0.3},
    "staged-expert_choice": {"experts": "expert_choice"},
    "staged-early_exit": {
        **{"experts": "token_choice", "scheme": "early_exit", "layers": (0, 2), "capacity": (0.7, 0.4)}
    },
    "staged-mlp": {"experts": "expert_choice", "target": "mlp"},
    "experts": {"experts": "token_choice", "layers": ()},
    "experts-limited": {"experts": "token_choice", "layers": (), "expert_capacity": 0.3},
    "expert_choice": {"experts": "expert_choice", "layers": ()},
    "integrated": {"experts": "token_choice", "layers": (), "num_noop_experts": 2},
    "integrated-limited": {**{"experts": "token_choice", "layers": (), "num_noop_experts": 2, "expert_capacity": 0.2}},
    "integrated-expert_choice": {"experts": "expert_choice", "layers": (), "num_noop_experts": 2},
    "staged-integrated": {"experts": "token_choice", "num_noop_experts": 1},
}
ALL_VARIANTS = {**VARIANTS, **EXPERT_VARIANTS}
ON_ALL_EXPERTS = ("staged-integrated", "staged-expert_choice")
"""Expert variants that run on every architecture whose experts can be routed; the others run on Mixtral."""

EAGER = {"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"}
"""No SDPA: their softmax runs in float32 whatever the model's dtype, and its -inf overflows from float64."""

FLOAT32_INSIDE = {
    *("afmoe", "axk1", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe"),
    *("glm4_moe_lite", "hy_v3", "kolibri1", "laguna", "minimax_m2", "solar_open"),
}
"""Score experts (DiffLlama: its lambda) in float32, where sums round by their shape."""


def precision(architecture):
    """The dtype to test in, and the tolerance that its rounding asks for."""
    if architecture in EAGER:
        return torch.float32, 5e-4
    return torch.float64, 1e-5 if architecture in FLOAT32_INSIDE else 1e-10


def expert_cases():
    for architecture in EXPERTS:
        for name in EXPERT_VARIANTS:
            marks = () if architecture == "mixtral" or name in ON_ALL_EXPERTS else pytest.mark.slow
            yield pytest.param(architecture, name, id=f"{architecture}-{name}", marks=marks)


def cases():
    for name in VARIANTS:
        yield pytest.param("llama", name, id=f"llama-{name}")
    yield from expert_cases()
    for architecture in mixdepth.supported_architectures():
        if architecture != "llama":
            yield pytest.param(architecture, "default", id=architecture)
            for name, settings in VARIANTS.items():
                by_halves = "target" in settings or "gate_on" in settings
                if name != "default" and (architecture in HALVES or not by_halves):
                    yield pytest.param(architecture, name, id=f"{architecture}-{name}", marks=pytest.mark.slow)


every_case = pytest.mark.parametrize(("architecture", "variant"), list(cases()))
every_expert_case = pytest.mark.parametrize(("architecture", "variant"), list(expert_cases()))


CACHES = ("llama", "mistral", "gemma2", "gpt2", "gpt_neox", "deepseek_v3", "mixtral")
"""An architecture of each kind of cache: full, sliding, both, with other names, latent, and behind experts."""


def cache_cases():
    """All cases, of which other architectures than those of CACHES are slow."""
    for case in cases():
        marks = case.marks
        if case.values[0] not in CACHES:
            marks = (pytest.mark.slow,)
        yield pytest.param(*case.values, id=case.id, marks=marks)


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
