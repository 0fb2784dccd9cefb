"""Losses, routing statistics and calibration of routed language models."""

import pytest
import torch
from tiny import dense, routed, token_ids
from variants import left_padded

import mixdepth

RULES = ["predictor", "aux_loss", "threshold"]


def batches():
    """Make three batches of four rows that all begin differently. Equal beginnings would have equal scores."""
    windows = [token_ids(4, 30, seed=seed) for seed in range(3)]
    for index, ids in enumerate(windows):
        ids[:, 0] = torch.arange(3 + 4 * index, 7 + 4 * index)
    return windows


def test_losses_are_means_over_label_tokens_causal_and_with_look_ahead():
    model = routed()
    ids, mask = left_padded()
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = mixdepth.evaluate(model, [padded, token_ids(1, 9)])
    with torch.no_grad():
        sums = torch.zeros(2)
        for inputs, count in ((padded, 33), ({"input_ids": token_ids(1, 9), "labels": token_ids(1, 9)}, 8)):
            sums[0] += count * model(**inputs).loss
            with mixdepth.lookahead(model):
                sums[1] += count * model(**inputs).loss
    assert found.loss == pytest.approx(sums[0].item() / 41, rel=1e-6)
    assert found.lookahead_loss == pytest.approx(sums[1].item() / 41, rel=1e-6)
    assert found.loss != found.lookahead_loss


@pytest.mark.parametrize("causal", RULES)
def test_the_rule_is_compared_with_top_k_on_the_same_scores(causal):
    model = routed(causal=causal)
    found = mixdepth.evaluate(model, batches())
    chosen, best, both = (torch.zeros(3) for _ in range(3))
    for ids in batches():
        for layer, route in enumerate(model(ids, output_routes=True).routes):
            for row in range(4):
                top = set(route.logits[row].argsort(descending=True)[:12].tolist())  # 40 % of 30
                picked = set(route.mask[row].nonzero()[:, 0].tolist())
                chosen[layer] += len(picked)
                best[layer] += len(top)
                both[layer] += len(top & picked)
    for layer, routing in enumerate(found.layers.values()):
        assert routing.capacity == pytest.approx(chosen[layer].item() / 360)
        assert routing.precision == pytest.approx((both / chosen)[layer].item())
        assert routing.recall == pytest.approx((both / best)[layer].item())
        assert routing.f1 == pytest.approx((2 * both / (chosen + best))[layer].item())
    assert list(found.layers) == [0, 2, 3]


def test_evaluation_leaves_the_model_in_its_mode():
    model = routed().train()
    mixdepth.evaluate(model, batches())
    assert model.training
    mixdepth.calibrate(model, batches())
    assert model.training


@pytest.mark.parametrize("capacity", [None, 0.2, [0.1, 0.5, 0.9]])
@pytest.mark.parametrize(
    "settings",
    [
        *({"causal": rule} for rule in RULES),
        {"scheme": "token_choice"},
        {"target": "mlp"},
        {"gate_on": "mlp", "causal": "threshold"},
    ],
)
def test_calibration_meets_the_capacity_to_the_token(settings, capacity):
    model = routed(**settings, layers=(1, 2, 3))  # in layer 0 equal tokens have equal scores
    result = mixdepth.calibrate(model, batches(), capacity)
    wanted = capacity if isinstance(capacity, list) else [capacity or 0.4] * 3
    assert [round(360 * layer.capacity) for layer in result.after.layers.values()] == [round(360 * c) for c in wanted]
    assert result.after == mixdepth.evaluate(model, batches())
    assert result.cost == result.after.loss - result.before.loss
    assert model.depth_config.capacity == (tuple(wanted) if isinstance(capacity, list) else capacity or 0.4)


def test_calibrated_thresholds_are_saved_with_the_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = routed(dtype=torch.float32)
    expected = mixdepth.calibrate(model, batches(), 0.2).after
    model.save_pretrained(tmp_path)
    assert mixdepth.evaluate(AutoModelForCausalLM.from_pretrained(tmp_path), batches()) == expected


def test_the_exits_of_early_exit_are_calibrated_one_after_the_other():
    model = routed(scheme="early_exit", layers=(1, 2), capacity=(0.7, 0.4))
    result = mixdepth.calibrate(model, batches())
    assert [layer.capacity for layer in result.after.layers.values()] == [0.7, 0.4]


def test_expert_choice_is_calibrated_for_each_expert_even_before_its_first_update():
    model = mixdepth.route(dense("mixtral", torch.float64), experts="expert_choice", layers=(1,), capacity=0.5).double()
    result = mixdepth.calibrate(model, batches())
    assert result.before is None
    assert result.cost == result.after.loss - result.after.lookahead_loss
    assert result.after.layers[1].capacity == 0.5
    for load in result.after.loads.values():
        assert load == [0.5] * 4


def test_padding_and_batches_without_labels_do_not_count():
    model = routed()
    ids, mask = left_padded()
    given = {"input_ids": ids, "attention_mask": mask}
    nothing = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    labels = ids.masked_fill(mask == 0, -100)
    assert mixdepth.evaluate(model, [given, nothing]) == mixdepth.evaluate(model, [{**given, "labels": labels}])


def test_an_interrupted_calibration_leaves_the_model_as_it_was():
    model = routed().train()
    before = [router.threshold.clone() for router in model.depth_routers]
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) > 12:
            raise KeyboardInterrupt

    model.model.layers[3].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        mixdepth.calibrate(model, batches(), 0.2)
    assert all(torch.equal(r.threshold, t) for r, t in zip(model.depth_routers, before, strict=True))
    assert model.depth_config.capacity == 0.4
    assert model.training


def test_look_ahead_at_top_k_agrees_with_itself():
    found = mixdepth.evaluate(routed(capacity=1.0), batches())
    for layer in found.layers.values():
        assert (layer.capacity, layer.precision, layer.recall, layer.f1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixdepth.calibrate(dense(), batches()), "LlamaForCausalLM is not a routed language model"),
        (
            lambda: mixdepth.calibrate(routed(scheme="random"), batches()),
            "no router of the model has a threshold to set .scheme='random'",
        ),
        (
            lambda: mixdepth.calibrate(routed(scheme="soft", capacity=1.0), batches()),
            "no router of the model has a threshold to set",
        ),
        (lambda: mixdepth.calibrate(routed(), []), "batches is empty"),
        (lambda: mixdepth.evaluate(routed(), [{"inputs_embeds": torch.zeros(1, 2, 32)}]), "needs labels"),
        (
            lambda: mixdepth.calibrate(routed("mixtral", experts="token_choice", layers=()), batches()),
            "no router of the model has a threshold",
        ),
        (
            lambda: mixdepth.calibrate(routed("mixtral", experts="expert_choice", layers=()), batches(), 0.2),
            "no layer of the model is routed, its experts alone",
        ),
        (lambda: mixdepth.evaluate(routed(), []), "there is nothing to evaluate on"),
    ],
)
def test_a_wrong_call_is_answered_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
