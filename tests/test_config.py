import json
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixdepth import DepthConfig, ExpertConfig
from mixdepth.routes import slots


@pytest.mark.parametrize("capacity", [0, -0.1, 1.5, math.nan, math.inf, "half", True, (0.5, 2.0), ("half",)])
def test_a_capacity_that_is_no_fraction_is_refused_by_name_and_value(capacity):
    with pytest.raises(ValueError, match=r"capacity must be a fraction in \(0, 1\], not"):
        DepthConfig(capacity=capacity)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, not 0"),
        ({"every": 1.5}, "every must be a whole number"),
        ({"first": -1}, "first must be a whole number of at least 0, not -1"),
        ({"layers": (1, 1)}, r"layers must name each routed layer once, not \[1, 1\]"),
        ({"layers": ()}, "layers must name each routed layer once"),
        ({"layers": "all"}, "layers must be a list of layer indices, not 'all'"),
        ({"layers": (-1,)}, "layers must be a whole number of at least 0, not -1"),
        ({"layers": (1,), "first": 0}, r"first=0 has no meaning next to layers=\[1\]"),
        ({"gate": "softmax"}, "gate must be one of 'raw', .*, not 'softmax'"),
        ({"causal": "topk"}, "causal must be one of 'predictor', 'aux_loss', 'threshold', None, not 'topk'"),
        ({"init_std": -1}, "init_std must be a number of at least 0, not -1"),
        ({"predictor_loss_coef": math.nan}, "predictor_loss_coef must be a number of at least 0, not nan"),
        ({"scheme": "topk"}, "scheme must be one of 'expert_choice', 'token_choice', .*, not 'topk'"),
        ({"target": "mlps"}, "target must be one of 'block', 'attention', 'mlp', not 'mlps'"),
        ({"gate_on": "attention"}, "gate_on must be one of 'block', 'mlp', not 'attention'"),
        ({"experts": "mixtral"}, "experts must be one of 'token_choice', 'expert_choice', None, not 'mixtral'"),
        ({"threshold_momentum": 1.0}, "threshold_momentum must be below 1, not 1.0"),
        ({"layers": (1,), "every": 5}, r"every=5 has no meaning next to layers=\[1\]"),
        ({"layers": (), "experts": "token_choice", "target": "mlp"}, "target='mlp' has no meaning where layers="),
        ({"seed": 2**70}, r"seed must be below 2\*\*32"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"num_noop_experts": 0.5, "experts": "token_choice"}, "num_noop_experts must be a whole number"),
        ({"expert_capacity": 2, "experts": "token_choice"}, "expert_capacity must be a fraction in .*, not 2"),
        *(
            ({"scheme": scheme, "causal": "predictor"}, f"causal='predictor' has no meaning with scheme='{scheme}'")
            for scheme in ("token_choice", "random", "soft")
        ),
        *(
            (
                {"scheme": scheme, "gate": "straight"},
                f"gate='straight' .* and scheme='{scheme}' does not choose by scores",
            )
            for scheme in ("random", "soft")
        ),
        ({"scheme": "soft", "capacity": 0.5}, "scheme='soft' processes every token: leave out capacity=0.5"),
        ({"scheme": "early_exit", "target": "mlp"}, "scheme='early_exit' skips whole layers: leave out target='mlp'"),
        ({"scheme": "early_exit", "gate_on": "mlp"}, "leave out .* gate_on='mlp'"),
        ({"target": "attention", "gate_on": "mlp"}, "gate_on='mlp' has no meaning with target='attention'"),
        ({"expert_capacity": 0.5}, "expert_capacity=0.5 needs experts='token_choice'"),
        ({"num_noop_experts": 2}, "num_noop_experts=2 needs experts='token_choice'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_value(settings, message):
    with pytest.raises(ValueError, match=message):
        DepthConfig.from_flat(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 9}, "every must be at most the model's 8 layers, not 9"),
        ({"first": 8}, "first must be below the model's 8 layers, not 8"),
        ({"layers": (3, 8)}, "layers must be below the model's 8 layers, not 8"),
        ({"scheme": "early_exit", "every": 4}, r"capacity must fall .*: 2 exits \[3, 7\] cannot have \[0.125, 0.125\]"),
        ({"scheme": "early_exit", "layers": (1, 2), "capacity": (0.5, 0.7)}, "capacity must fall from one exit"),
        ({"capacity": (0.5, 0.5)}, r"capacity lists 2 values for 4 routed layers \[1, 3, 5, 7\]"),
    ],
)
def test_a_setting_beyond_the_models_depth_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DepthConfig(**settings).routed_layers(8)


def test_every_first_and_layers_say_which_layers_are_routed():
    assert list(DepthConfig(every=2).routed_layers(5)) == [1, 3]
    assert list(DepthConfig(every=1).routed_layers(3)) == [0, 1, 2]
    assert list(DepthConfig(every=3, first=0).routed_layers(7)) == [0, 3, 6]
    assert DepthConfig(layers=[4, 1], capacity=[0.5, 0.25]).routed_layers(5) == {1: 0.25, 4: 0.5}


def test_settings_survive_json():
    config = DepthConfig(capacity=(0.3, 0.07), layers=(2, 5), gate="unit", causal="aux_loss", init_std=0.5)
    assert DepthConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


EARLIER_SETTINGS = {
    "capacity": 0.5,
    "every": 1,
    "gate": "unit",
    "experts": "expert_choice",
    "expert_capacity": 0.25,
    "num_noop_experts": 2,
    "expert_balance_coef": 0.5,
}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_flat_settings_of_all_versions_are_read(version):
    experts = ExpertConfig(scheme="expert_choice", capacity=0.25, num_noop=2, balance_coef=0.5)
    expected = DepthConfig(capacity=0.5, every=1, gate="unit", experts=experts)
    assert DepthConfig.from_dict({"version": version, **EARLIER_SETTINGS}) == expected


def test_settings_are_written_flat_and_in_the_order_of_the_fields():
    names = list(DepthConfig().to_dict())
    assert names[:3] == ["version", "scheme", "capacity"]
    assert names[-4:] == ["experts", "expert_capacity", "num_noop_experts", "expert_balance_coef"]
    written = DepthConfig.from_flat(**EARLIER_SETTINGS).to_dict()
    assert EARLIER_SETTINGS.items() <= written.items()


def test_a_model_without_routed_experts_writes_the_defaults_of_experts():
    assert list(DepthConfig().to_dict().values())[-4:] == [None, None, 0, 0.01]


def test_the_name_of_an_expert_scheme_is_no_expert_config():
    with pytest.raises(ValueError, match=r"must be an ExpertConfig or None, not 'token_choice': or use .*from_flat"):
        DepthConfig(experts="token_choice")


def test_settings_of_a_newer_version_or_unknown_are_refused():
    with pytest.raises(ValueError, match="format version 4, this mixdepth reads up to 3: install a newer"):
        DepthConfig.from_dict({"version": 4})
    with pytest.raises(ValueError, match="unknown routing setting 'depths'=3"):
        DepthConfig.from_dict({"version": 1, "depths": 3})
    for version in (None, 0, True, "1"):
        with pytest.raises(ValueError, match="must have a format version of at least 1, not"):
            DepthConfig.from_dict({"version": version})
    with pytest.raises(ValueError, match="must be a mapping of names to values, not 5"):
        DepthConfig.from_dict(5)


def test_the_smallest_capacity_still_has_one_slot_and_no_more():
    assert [slots(capacity, 100) for capacity in (1e-7, 1e-300, 5e-324)] == [1, 1, 1]


@given(st.integers(1, 10_000), st.integers(1, 1000), st.data())
def test_slots_are_the_exact_ceiling_for_numbers_and_tensors_alike(length, denominator, data):
    numerator = data.draw(st.integers(1, denominator))
    expected = math.ceil(Fraction(numerator, denominator) * length)
    capacity = numerator / denominator  # 0.07 * 100 is not 7 in floats
    assert slots(capacity, length) == expected
    assert slots(capacity, torch.tensor([length, 0])).tolist() == [expected, 0]
    assert 1 <= expected <= length


def test_schemes_have_defaults_of_their_own():
    assert (DepthConfig().capacity, DepthConfig().gate) == (0.125, "raw")
    assert (DepthConfig(scheme="soft").capacity, DepthConfig(scheme="soft").gate) == (1.0, "sigmoid")
    assert DepthConfig(scheme="early_exit", every=4, capacity=(0.5, 0.25)).routed_layers(8) == {3: 0.5, 7: 0.25}
    assert DepthConfig.from_flat(experts="token_choice", layers=()).routed_layers(8) == {}
