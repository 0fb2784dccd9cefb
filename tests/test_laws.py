"""The laws, over every variant on Llama (with experts: Mixtral) and over every supported architecture on the default
variant.

The full cross product carries the marker `slow`. Comparisons are exact where the computation is the
same; where sums are reordered they are made in float64, to 1e-10.
"""

import contextlib
import functools

import pytest
import torch
from oracle import oracle
from tiny import NUM_LAYERS, decisions, dense, routed, token_ids
from transformers import AutoModelForCausalLM

import mixdepth
from mixdepth.hf.architectures import EXPERTS, HALVES
from mixdepth.hf.layer import RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.routes import Route, WholeRoute, slots

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


def dense_and_routed(architecture, variant, dtype):
    """A dense model, and the same routed at capacity 1 with weight 1. Where no dense model has such experts, it is
    the model in which the experts alone are routed."""
    settings = {**ALL_VARIANTS[variant], "capacity": 1.0, "gate": "one", "layers": None, "every": 1}
    model = dense(architecture, dtype)
    if settings.get("experts") == "expert_choice" or {"num_noop_experts", "expert_capacity"} & settings.keys():
        kept = ("experts", "expert_capacity", "num_noop_experts")
        reference = routed(model, dtype, layers=(), **{name: settings[name] for name in kept if name in settings})
    else:
        reference = model
    model_routed = routed(model, dtype, **settings)
    model_routed.load_state_dict(reference.state_dict(), strict=False)  # no-op experts and thresholds
    return reference, model_routed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@every_case
def test_1_full_capacity_at_weight_one_is_the_model_itself_to_the_bit(architecture, variant, dtype, monkeypatch):
    model, model_routed = dense_and_routed(architecture, variant, dtype)
    blends = []
    for kind in (Route, WholeRoute):
        monkeypatch.setattr(kind, "blend", counting(kind.blend, blends))
    ids = token_ids()
    for training in (False, True):
        torch.manual_seed(0)  # PhiMoE draws its experts in training
        expected = model.train(training)(ids).logits
        torch.manual_seed(0)
        blends.clear()
        assert torch.equal(model_routed.train(training)(ids).logits, expected)
        assert len(blends) == NUM_LAYERS  # it took the way of every other capacity
    with mixdepth.lookahead(model_routed.eval()), lookahead_if_routed(model.eval()):
        assert torch.equal(model_routed(ids).logits, model(ids).logits)


def counting(blend, blends):
    return lambda self, x, y: blends.append(1) or blend(self, x, y)


def lookahead_if_routed(model):
    return mixdepth.lookahead(model) if isinstance(model, RoutedCausalLM) else contextlib.nullcontext()


@every_case
def test_1_full_capacity_at_weight_one_is_the_model_itself_behind_padding(architecture, variant):
    dtype, tolerance = precision(architecture)
    model, model_routed = dense_and_routed(architecture, variant, dtype)
    ids, mask = left_padded()
    expected = model(ids, attention_mask=mask).logits[mask == 1]
    assert_close(model_routed(ids, attention_mask=mask).logits[mask == 1], expected, tolerance)


@every_case
def test_2_exactly_k_tokens_are_processed_and_the_others_are_left_to_the_bit(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    streams = {}
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, kwargs, out: streams.update({layer.depth_index: (args[0], out)}), with_kwargs=True
        )
        for layer in model.modules()
        if isinstance(layer, RoutedLayer)
    ]
    with mixdepth.lookahead(model):
        out = model(ids, attention_mask=mask, output_routes=True)
    deciding = model.depth_config.routed_layers(NUM_LAYERS)
    routes = dict(zip(deciding, out.routes, strict=True))
    routers = dict(zip(deciding, model.depth_routers, strict=True))
    for hook in hooks:
        hook.remove()
    for index, (before, after) in streams.items():
        last = max(i for i in model.depth_config.routed_layers(NUM_LAYERS) if i <= index)  # the last exit, or itself
        route, router = routes[last], routers[last]
        k = [slots(router.capacity, length) for length in mask.sum(1).tolist()]
        if router.scheme == "token_choice":
            k = torch.minimum(torch.tensor(k), (route.real & (route.logits > router.cutoff)).sum(1)).tolist()
        assert route.count.tolist() == k
        assert not (route.mask & (mask == 0)).any()
        if model.depth_config.target == "block":
            assert torch.equal(after[~route.mask], before[~route.mask])
            assert (after != before).any(-1)[route.mask].all()


@pytest.mark.parametrize("lookahead", [False, True], ids=["causal", "top-k"])
@every_case
def test_3_forward_and_gradients_equal_the_oracle(architecture, variant, lookahead):
    model, tolerance = shared(architecture, variant)
    reference = oracle(model)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # the first token would be predicted from padding
    results = []
    for m in (model, reference):
        m.train(lookahead)
        out = m(ids, attention_mask=mask, labels=labels, use_cache=False)
        trained = [parameter for parameter in m.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(out.loss, trained, allow_unused=True)
        results.append((out.logits[mask == 1], out.loss, gradients))
        m.eval()
    (logits, loss, gradients), (logits_0, loss_0, gradients_0) = results
    assert_close(logits, logits_0, tolerance)
    assert_close(loss, loss_0, tolerance)
    for gradient, expected in zip(gradients, gradients_0, strict=True):
        gradient = torch.zeros(()) if gradient is None else gradient
        expected = torch.zeros(()) if expected is None else expected
        # Norms in transformers sum their gradients in float32.
        assert (gradient - expected).abs().max() <= max(1e-7 * (1 + expected.abs().max()), 10 * tolerance)


@every_case
def test_4_no_logit_depends_on_a_later_token(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids, now = token_ids(), 11
    changed = ids.clone()
    changed[:, now + 1 :] = token_ids(seed=1)[:, now + 1 :]
    decisions(model, ids), decisions(model, changed)
    before, after = model(ids).logits, model(changed).logits
    assert_close(after[:, : now + 1], before[:, : now + 1], tolerance)
    assert (after[:, now + 1 :] != before[:, now + 1 :]).any()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeddings, use_cache=False).logits[:, now].sum(), embeddings)
    assert not gradient[:, now + 1 :].any()
    assert gradient[:, : now + 1].any()


@every_case
def test_5_any_split_of_a_sequence_gives_the_logits_of_one_pass(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=position_ids).logits
    for lengths in ([9, 4, *[1] * 7], [1] * 20, [13, 7]):
        cache, start, logits = None, 0, []
        for end in torch.tensor(lengths).cumsum(0).tolist():
            inputs = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, start:end]}
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs)
            cache, start = out.past_key_values, end
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1)[mask == 1], whole[mask == 1], tolerance)
        assert cache.get_seq_length() == 20


@every_case
def test_5_rows_that_chose_different_numbers_of_tokens_step_by_step_give_the_logits_of_one_pass(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids = token_ids(4)
    routes = decisions(model, ids)
    if routes and model.depth_config.scheme not in ("random", "soft"):  # those choose the same in every row
        assert any(route.count.unique().numel() > 1 for route in routes)
    whole = model(ids).logits
    cache, logits = None, []
    for step in ids.split([1] * 10 + [2] * 5, dim=1):  # and no mask: no row is padded
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    assert_close(torch.cat(logits, 1), whole, tolerance)


@every_case
def test_5_batched_generation_equals_recomputation_without_a_cache(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with_cache = model.generate(ids, **settings)
    assert torch.equal(with_cache, model.generate(ids, **settings, use_cache=False))
    assert with_cache.shape == (2, 30)


@pytest.mark.parametrize("lookahead", [False, True], ids=["causal", "top-k"])
@every_case
def test_6_a_row_of_a_padded_batch_equals_the_row_by_itself(architecture, variant, lookahead):
    model, tolerance = shared(architecture, variant)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    model.train(lookahead)
    batch = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
    for row in range(2):
        real = mask[row] == 1
        alone = model(ids[row : row + 1, real], use_cache=False).logits[0]
        assert_close(batch[row, real], alone, tolerance)
    model.eval()


@every_case
def test_7_the_router_learns_from_the_language_model_and_the_predictor_only_from_the_choice(architecture, variant):
    dtype, _ = precision(architecture)
    model = routed(architecture, dtype, **ALL_VARIANTS[variant]).train()
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight *= 0.01  # where a squashed gate is not flat
    ids = token_ids()
    out = model(ids, labels=ids)
    out.lm_loss.backward(retain_graph=True)
    for router in model.depth_routers:
        learns = router.projection.weight.grad is not None and router.projection.weight.grad.any()
        assert learns == (router.gate != "one")
        assert router.predictor is None or all(p.grad is None for p in router.predictor.parameters())
    model.zero_grad()
    if out.predictor_loss is not None:
        out.predictor_loss.backward()
        touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        predictors = {name for name, p in model.named_parameters() if ".depth_router.predictor." in name}
        assert touched == predictors


@every_case
def test_8_the_cache_holds_exactly_what_was_processed(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    routes = decisions(model, ids, attention_mask=mask)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    routes = dict(zip(model.depth_config.routed_layers(NUM_LAYERS), routes, strict=True))
    for index, layer in enumerate(cache.layers):
        last = max((i for i in routes if i <= index), default=None)
        is_routed = index in routes or (last is not None and model.depth_config.scheme == "early_exit")
        if not is_routed or model.depth_config.target == "mlp":
            assert layer.get_seq_length() == ids.shape[1]
            assert not hasattr(layer, "lengths")
            continue
        route = routes[last]
        assert layer.lengths == route.count.tolist()
        for row, length in enumerate(layer.lengths):
            assert length == 0 or layer.columns[row, :length].tolist() == route.mask[row].nonzero()[:, 0].tolist()


@every_case
def test_1_unroute_gives_the_plain_model_back(architecture, variant):
    plain = dense(architecture)
    model = routed(plain, torch.float32, **ALL_VARIANTS[variant])
    back = mixdepth.unroute(model)
    assert type(back) is type(plain)
    assert back.config.to_dict() == {**plain.config.to_dict(), "architectures": [type(plain).__name__]}
    assert list(back.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in back.modules()] == [type(module) for module in plain.modules()]
    assert (back._no_split_modules, back._keep_in_fp32_modules_strict) == (
        plain._no_split_modules,
        plain._keep_in_fp32_modules_strict,
    )
    assert (back._keep_in_fp32_modules, back.loss_type) == (plain._keep_in_fp32_modules, plain.loss_type)
    ids = token_ids()
    assert torch.equal(back(ids).logits, plain(ids).logits)


@every_case
def test_9_a_saved_model_comes_back_to_the_bit_under_the_dense_models_key_names(architecture, variant, tmp_path):
    model = routed(architecture, torch.float32, **ALL_VARIANTS[variant])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.set_experts_implementation("eager")
    assert type(loaded) is type(model)
    assert loaded.depth_config == model.depth_config
    for (name, parameter), (name_0, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert name == name_0
        assert torch.equal(parameter, expected)
    ids = token_ids()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    dense_model = dense(architecture)
    with pytest.raises(Exception, match="routed: import mixdepth and load with AutoModelForCausalLM"):
        type(dense_model).from_pretrained(tmp_path)
    dense_model.save_pretrained(tmp_path / "dense")
    names, names_0 = checkpoint_keys(tmp_path), checkpoint_keys(tmp_path / "dense")
    assert names_0 <= names
    assert all(".depth_router." in name for name in names - names_0)


def checkpoint_keys(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())
