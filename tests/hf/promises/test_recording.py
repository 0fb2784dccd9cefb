"""Programs recorded from a model, by torch.jit.trace and torch.export: they compute what the model computes, for other
texts too, or are refused. A record of evaluation would hold the tokens that one text chose."""

import warnings

import pytest
import torch
from promised import DENSE, RULES, VARIANTS, logits_of, over, promised
from tiny import routed, token_ids
from torch import nn

import mixdepth

CASES = [("llama", variant) for variant in (DENSE, "predictor", "random", "token_choice")]
OTHERS = [("llama", "aux_loss"), ("llama", "threshold"), ("llama", "early_exit"), ("gpt2", "predictor")]
EXPERTS = [("mixtral", "experts-token_choice"), ("mixtral", "experts-expert_choice")]


class Logits(nn.Module):
    """The model as a function from tokens to logits, which is what can be recorded."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def trace(model, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every number that it takes for a constant
        return torch.jit.trace(Logits(model), (ids,), check_trace=False)


def export(model, ids):
    return torch.export.export(Logits(model), (ids,), strict=False).module()


WAYS = {"torch.jit.trace": trace, "torch.export": export}
by_every_way = pytest.mark.parametrize("way", WAYS)


@by_every_way
@over(CASES)
def test_a_record_of_training_or_look_ahead_computes_what_the_model_does(architecture, variant, way):
    model = promised(architecture, variant)
    first, second = token_ids(seed=1), token_ids(seed=2)
    with torch.no_grad():
        if variant == DENSE:
            recorded = WAYS[way](model, first)
            expected = model(second).logits
        elif way == "torch.export":
            recorded = WAYS[way](model.train(), first)
            expected = model(second).logits
        else:
            with mixdepth.lookahead(model):
                recorded = WAYS[way](model, first)
                expected = model(second).logits
        assert (recorded(second) - expected).abs().max() <= 1e-5


@by_every_way
@over([case for case in CASES + OTHERS + EXPERTS if case[1] != DENSE])
def test_a_record_of_evaluation_is_refused_and_changes_nothing(architecture, variant, way):
    model = promised(architecture, variant)
    model.set_experts_implementation("eager")
    expected = logits_of(model)
    with torch.no_grad(), pytest.raises(ValueError, match=f"{way} .*: do so in training mode or within") as error:
        WAYS[way](model, token_ids(seed=1))
    assert "\n" not in str(error.value)
    assert torch.equal(logits_of(model), expected)


@by_every_way
def test_experts_that_take_every_token_are_not_recorded_either(way):
    """Their number of tokens is known, but the program looks for them one by one."""
    model = routed("mixtral", torch.float32, experts="expert_choice", expert_capacity=1.0, layers=())
    with torch.no_grad(), pytest.raises(ValueError, match=f"{way} .*: do so in training mode or within"):
        WAYS[way](model, token_ids())


@by_every_way
@pytest.mark.parametrize("name", RULES)
def test_a_block_of_the_users_own_is_recorded_with_look_ahead_only(name, way):
    config = mixdepth.DepthConfig(capacity=0.5, **VARIANTS[name])
    block = mixdepth.Routed(nn.Linear(8, 8), width=8, config=config)
    with torch.no_grad():
        nn.init.normal_(block.router.projection.weight)
        block.router.threshold.zero_()
    record = {
        "torch.jit.trace": lambda x: torch.jit.trace(block, (x,), check_trace=False),
        "torch.export": lambda x: torch.export.export(block, (x,), strict=False).module(),
    }[way]
    first, second = torch.randn(2, 3, 10, 8)
    with torch.no_grad():
        with mixdepth.lookahead(block.eval()):
            recorded = record(first)
            expected = block(second)
        assert torch.allclose(recorded(second), expected, atol=1e-6)
        with pytest.raises(ValueError, match=f"{way} "):
            record(first)
