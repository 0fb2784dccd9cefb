"""Experts inside layers: load, balance, limits, no-op experts, expert choice. Laws are in laws/."""

import ast
import inspect
import textwrap

import pytest
import torch
from tiny import dense, routed, tiny_config, token_ids
from transformers import AutoModelForCausalLM
from variants import EXPERT_VARIANTS, every_expert_case, left_padded

import mixdepth
from mixdepth.experts import ExpertLoad, balance_loss
from mixdepth.hf.architectures import EXPERTS, HALVES, decoder_layers

every_architecture = pytest.mark.parametrize("architecture", EXPERTS)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@every_expert_case
def test_fused_kernels_compute_what_the_eager_experts_do(architecture, variant, implementation):
    model = routed(architecture, torch.float32, **EXPERT_VARIANTS[variant])
    ids, mask = left_padded()
    results = []
    for name in ("eager", implementation):
        model.set_experts_implementation(name)
        for training in (True, False):
            model.train(training)
            model.zero_grad()
            loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append((loss, torch.cat([g.flatten() for g in gradients])))
    for (loss, gradient), (loss_0, gradient_0) in zip(results[2:], results[:2], strict=True):
        assert abs(loss - loss_0) < 1e-5
        assert (gradient - gradient_0).abs().max() < 1e-5


@every_architecture
def test_loads_say_who_took_what(architecture):
    model = routed(architecture, experts="token_choice")
    ids, mask = left_padded()
    out = model(ids, attention_mask=mask, output_routes=True)
    assert len(out.loads) == 4
    dense_load, routed_load = out.loads[1], out.loads[0]
    assert torch.equal(dense_load.used, mask.bool())
    assert dense_load.load.sum() == 2  # experts per token
    assert dense_load.unserved == 0
    best = dense_load.logits.topk(2).indices
    expected = torch.zeros_like(dense_load.processed).scatter(2, best, True) & mask.bool()[..., None]
    assert torch.equal(dense_load.processed, expected)
    assert routed_load.used.sum() == out.routes[0].count.sum()  # only chosen tokens reach the experts


def test_the_balance_loss_is_that_of_the_switch_transformer_over_tokens_in_use():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 3).double()
    used = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
    taken = torch.zeros(2, 5, 3, dtype=torch.bool).scatter(2, logits.topk(2).indices, True) & used[..., None]
    shares, probabilities = torch.zeros(3).double(), torch.zeros(3).double()
    for row, token in used.nonzero().tolist():
        probability = torch.exp(logits[row, token]) / torch.exp(logits[row, token]).sum()
        probabilities += probability / 7
        shares += taken[row, token].double() / 7
    load = ExpertLoad(logits, taken, used, torch.zeros(3))
    torch.testing.assert_close(balance_loss([load, load]), 3 * (shares * probabilities).sum())
    dropping = ExpertLoad(logits, taken & (torch.arange(5) < 3)[:, None], used, torch.tensor([2, 1, 3]))
    shares = (
        dropping.processed.sum((0, 1)) / 7 + torch.tensor([2, 1, 3]) / 7
    )  # a token that found it full had chosen it
    torch.testing.assert_close(balance_loss([dropping]), 3 * (shares * probabilities).sum())
    uniform = ExpertLoad(torch.zeros(1, 6, 3), torch.ones(1, 6, 3).bool(), torch.ones(1, 6).bool(), torch.zeros(3))
    assert balance_loss([uniform]).item() == pytest.approx(3)


@every_architecture
def test_the_balance_loss_takes_an_attention_mask_in_routed_layers(architecture):
    model = routed(architecture, experts="token_choice").train()
    ids, mask = left_padded()
    out = model(ids, attention_mask=mask, labels=ids, output_routes=True)
    torch.testing.assert_close(out.balance_loss, balance_loss(list(out.loads)))
    torch.testing.assert_close(out.routing_loss, 0.01 * out.predictor_loss + 0.01 * out.balance_loss)
    out.balance_loss.backward()
    gates = [layer.mlp.gate.weight.grad for layer in decoder_layers(model)]
    assert all(gate is not None and gate.any() for gate in gates)


@every_architecture
def test_the_balance_loss_evens_out_the_load(architecture):
    torch.manual_seed(0)
    model = routed(architecture, torch.float32, experts="token_choice", layers=(), expert_balance_coef=1.0)

    def spread():
        loads = model.eval()(token_ids(8, 32), output_routes=True).loads
        return max((load.load - 0.5).abs().max().item() for load in loads)

    before = spread()
    optimizer = torch.optim.Adam([layer.mlp.gate.weight for layer in decoder_layers(model)], lr=1e-2)
    for step in range(60):
        ids = token_ids(8, 32, seed=step)
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert spread() < before / 2


def test_a_full_expert_drops_later_tokens_in_training_and_none_in_evaluation():
    model = routed("mixtral", experts="token_choice", layers=(), expert_capacity=0.3)
    ids = token_ids(2, 30)
    wanted = [load.processed for load in model.eval()(ids, output_routes=True).loads]
    loads = model.train()(ids, output_routes=True).loads
    kept = wanted[0].cumsum(1) <= 9  # of 30
    assert torch.equal(loads[0].processed, wanted[0] & kept)
    assert torch.equal(loads[0].dropped, (wanted[0] & ~kept).sum((0, 1)))
    assert loads[0].dropped.sum() > 0
    assert loads[0].unserved > 0
    assert wanted[0].sum() == 2 * 60  # evaluation kept them all


def test_a_no_op_expert_is_never_full():
    model = routed("mixtral", experts="token_choice", layers=(), expert_capacity=0.1, num_noop_experts=2)
    for load in model.train()(token_ids(2, 30), output_routes=True).loads:
        assert (load.processed.sum(1)[:, :4] <= 3).all()
        assert (load.processed.sum(1)[:, 4:] > 3).any()
        assert load.dropped[:4].sum() > 0
        assert not load.dropped[4:].any()


def test_a_token_at_no_op_experts_alone_is_left_as_it_is_and_the_experts_see_the_index_of_none():
    model = routed("mixtral", experts="token_choice", layers=(), num_noop_experts=3)
    seen = []
    block = decoder_layers(model)[0].mlp
    block.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    serve = type(block).serve
    x = torch.randn(2, 30, 32).double()
    y, load = serve(block, x, None, False)
    only_noop = ~load.processed[..., :4].any(-1)
    assert only_noop.any()
    assert not y[only_noop].any()
    assert y[~only_noop].any(-1).all()
    assert seen[0].max() == 4  # exactly the number of experts: a larger index breaks the eager path
    assert load.processed.sum() == 2 * 60


@pytest.mark.parametrize("num_noop_experts", [0, 2])
@every_architecture
def test_each_expert_chooses_its_share_of_every_row(architecture, num_noop_experts):
    model = routed(architecture, experts="expert_choice", layers=(), num_noop_experts=num_noop_experts)
    ids, mask = left_padded()
    loads = model.train()(ids, attention_mask=mask, output_routes=True).loads
    num_all = 4 + num_noop_experts
    for load in loads:
        expected = [[-(-2 * length // num_all)] * num_all for length in (14, 20)]
        assert load.processed.sum(1).tolist() == expected
        assert not load.processed[mask == 0].any()


def test_experts_that_choose_serve_a_row_with_padding_behind_it_as_the_row_by_itself():
    model = routed("mixtral", experts="expert_choice", layers=())
    block = decoder_layers(model)[0].mlp
    serve = type(block).serve
    x = torch.randn(2, 20, 32).double()
    used = torch.ones(2, 20, dtype=torch.bool)
    used[0, 14:] = False
    batch, _ = serve(block, x, used, True)
    for row in range(2):
        alone, _ = serve(block, x[row : row + 1, used[row]], None, True)
        assert (batch[row, used[row]] - alone[0]).abs().max() <= 1e-10


def test_experts_of_full_capacity_take_every_token_in_every_mode():
    model = routed("mixtral", experts="expert_choice", layers=(), expert_capacity=1.0)
    for training in (True, False):
        assert all(load.processed.all() for load in model.train(training)(token_ids(), output_routes=True).loads)


def test_reentrant_checkpointing_which_loses_the_balance_loss_is_refused():
    model = routed("mixtral", torch.float32, experts="token_choice", layers=()).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant"):
        model(token_ids(), labels=token_ids())


def test_expert_choice_samples_by_its_thresholds_and_refuses_without_them():
    model = mixdepth.route(dense("mixtral"), experts="expert_choice", layers=()).eval()
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="never estimated"):
            call(token_ids())
    model.train()(token_ids(4, 30))
    mixdepth.update_routers(model)
    assert model.eval().generate(token_ids(), max_new_tokens=4, pad_token_id=0).shape == (2, 24)
    assert model.depth_expert_routers[0].threshold.shape == (4,)


@every_architecture
def test_a_pretrained_gate_keeps_its_rows_beside_no_op_experts(architecture, tmp_path):
    model = dense(architecture)
    gates = [layer.mlp.gate.weight.clone() for layer in decoder_layers(model)]
    model = mixdepth.route(model, experts="token_choice", layers=(), num_noop_experts=2)
    for layer, gate in zip(decoder_layers(model), gates, strict=True):
        assert torch.equal(layer.mlp.gate.weight[:4], gate)
        assert layer.mlp.gate.weight.shape == (6, 32)
        assert 0 < layer.mlp.gate.weight[4:].std() < 0.1
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(decoder_layers(loaded)[3].mlp.gate.weight, decoder_layers(model)[3].mlp.gate.weight)


@every_architecture
def test_router_logits_are_the_experts(architecture):
    model = routed(architecture, experts="token_choice")
    ids, mask = left_padded()
    for training in (True, False):
        out = model.train(training)(ids, attention_mask=mask, output_router_logits=True, output_routes=True)
        assert len(out.router_logits) == 4
        assert torch.equal(out.router_logits[1], out.loads[1].logits)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("llama", {"experts": "token_choice"}, "needs a mixture of experts .*not 'llama'"),
        ("deepseek_v3", {"experts": "expert_choice"}, "one of mixtral, olmoe, qwen3_moe.*not 'deepseek_v3'"),
        ("gpt2", {"target": "mlp"}, "target='mlp' needs layers whose halves can run alone; those of 'gpt2' cannot"),
        ("gemma2", {"gate_on": "mlp"}, "gate_on='mlp' needs layers"),
    ],
)
def test_settings_that_the_architecture_cannot_have_are_refused_and_leave_it_alone(model, settings, message):
    model = dense(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        mixdepth.route(model, **settings)
    assert [type(module) for module in model.modules()] == classes


def test_jitter_noise_and_transformers_own_balance_loss_behind_a_mask_are_refused():
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral", router_jitter_noise=0.1))
    with pytest.raises(ValueError, match=r"router_jitter_noise=0\.1 cannot be had with experts"):
        mixdepth.route(model, experts="token_choice")
    ids, mask = left_padded()
    with pytest.raises(ValueError, match="route with experts='token_choice', which has its own"):
        routed("mixtral").train()(ids, attention_mask=mask, output_router_logits=True)


def test_layers_that_run_by_halves_are_llamas_to_the_letter():
    def body(layer_class):
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(layer_class.forward)))
        tree = ast.parse(source).body[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                node.keywords = []
        return [ast.unparse(line) for line in tree.body if not ast.unparse(line).startswith(("'", '"'))]

    llama = body(type(decoder_layers(dense("llama"))[0]))
    by_halves = [
        architecture
        for architecture in mixdepth.supported_architectures()
        if all(body(type(layer)) == llama for layer in decoder_layers(dense(architecture)))
    ]
    assert by_halves == sorted(HALVES)
