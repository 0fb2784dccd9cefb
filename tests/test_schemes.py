"""What is particular to each scheme and causal rule; what they share is in laws/."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import dense, routed, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mixdepth
from mixdepth import DepthConfig, Route, Routed, Router
from mixdepth.hf.layer import RoutedLayer
from mixdepth.losses import capacity_loss
from mixdepth.routes import gaussian, slots

ROOT = Path(__file__).parents[1]
EARLY_EXIT = {"scheme": "early_exit", "layers": (0, 2), "capacity": (0.7, 0.4)}


def routes_of(model, ids, **kwargs):
    return model(ids, output_routes=True, **kwargs).routes


# Token choice


def test_tokens_over_capacity_are_dropped_in_stream_order_and_counted_in_training_only():
    model = routed(scheme="token_choice")
    ids = token_ids(3, 40)
    (route, *_) = routes_of(model.train(), ids)
    wanted = route.logits > 0
    assert (wanted.sum(1) > 16).any()  # more than the capacity of 40 %
    for row in range(3):
        first = wanted[row].nonzero()[:16, 0]
        assert route.mask[row].nonzero()[:, 0].tolist() == first.tolist()
        assert route.dropped[row] == wanted[row].sum() - len(first)
    (route, *_) = routes_of(model.eval(), ids)
    assert torch.equal(route.mask, wanted)
    assert not route.dropped.any()


def test_a_score_of_exactly_zero_does_not_choose_the_block():
    router = Router(4, DepthConfig(scheme="token_choice", init_std=0.0), capacity=0.5)
    for training in (True, False):
        route = router.train(training)(torch.randn(2, 6, 4))
        assert not route.logits.any()
        assert route.count.tolist() == [0, 0]


def test_the_capacity_loss_pulls_the_share_of_tokens_to_the_capacity_and_rests_there():
    def pull(share, capacity):
        scores = torch.linspace(-1, 1, 40)[None].double().requires_grad_()
        chosen = torch.arange(40)[None] >= 40 - round(40 * share)
        route = Route.choose(chosen, scores, scores, None, torch.ones_like(chosen), 40)
        (gradient,) = torch.autograd.grad(capacity_loss([route], [capacity]), scores)
        return gradient.sum().item()

    assert pull(0.25, 0.25) == pytest.approx(0, abs=1e-12)
    assert pull(0.5, 0.25) > 0  # scores fall
    assert pull(0.1, 0.25) < 0
    assert pull(1.0, 1.0) == 0


def test_dropped_tokens_count_as_having_chosen_the_block():
    scores = torch.ones(1, 10).double().requires_grad_()
    chosen = torch.arange(10)[None] < 5  # full at half of what wants in
    route = Route.choose(chosen, scores, scores, None, torch.ones_like(chosen), 5, dropped=torch.tensor([5]))
    (gradient,) = torch.autograd.grad(capacity_loss([route], [0.5]), scores)
    assert (gradient > 0).all()


def test_token_choice_learns_its_capacity():
    torch.manual_seed(0)
    model = routed(scheme="token_choice", capacity=0.25, dtype=torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        ids = token_ids(8, 32, seed=step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [route.capacity.item() for route in routes_of(routed(scheme="token_choice"), token_ids(8, 32))]
    after = [route.capacity.item() for route in routes_of(model.eval(), token_ids(8, 32))]
    assert max(before) > 0.4
    assert max(after) < 0.35


# Random


def test_noise_is_standard_normal_and_depends_on_every_key():
    positions = torch.arange(100_000)
    noise = gaussian(positions, 0, 3, 7)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert noise.isfinite().all()
    assert abs((noise > 1.1503).float().mean() - 0.125) < 0.005
    for keys in ((1, 3, 7), (0, 4, 7), (0, 3, 8)):
        correlation = torch.corrcoef(torch.stack([noise, gaussian(positions, *keys)]))[0, 1]
        assert abs(correlation) < 0.02
    assert abs(torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1]) < 0.02


def test_random_routing_changes_with_the_step_in_training_and_never_in_evaluation():
    model = routed(scheme="random")
    ids = token_ids(2, 40)
    masks = []
    for mode in (True, True, False):
        masks.append([route.mask for route in routes_of(model.train(mode), ids)])
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))  # the same step
    mixdepth.update_routers(model)
    after = [route.mask for route in routes_of(model.train(), ids)]
    assert not any(torch.equal(a, b) for a, b in zip(masks[0], after, strict=True))
    evaluated = [route.mask for route in routes_of(model.eval(), ids)]
    assert all(torch.equal(a, b) for a, b in zip(masks[2], evaluated, strict=True))
    assert not torch.equal(evaluated[0], evaluated[1])  # layers differ


def test_random_routing_in_evaluation_is_the_same_at_every_step_even_with_look_ahead():
    model = routed(scheme="random")
    found = []
    for _ in range(2):
        with mixdepth.lookahead(model):
            found.append([route.mask for route in routes_of(model, token_ids(2, 40))])
        mixdepth.update_routers(model)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_random_routing_does_not_look_at_the_tokens_and_resumes_where_it_was(tmp_path):
    model = routed(scheme="random", dtype=torch.float32)
    for _ in range(3):
        mixdepth.update_routers(model)
    expected = [route.mask for route in routes_of(model.train(), token_ids())]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    for route, mask in zip(routes_of(loaded, token_ids(seed=3)), expected, strict=True):
        assert torch.equal(route.mask, mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_the_noise_is_that_of_a_position_whatever_integer_holds_it(dtype):
    """The hash of a position takes 64 bits, and would overflow in fewer."""
    positions = torch.arange(3000)[None]
    expected = gaussian(positions, 0, 3, 7)
    assert torch.equal(gaussian(positions.to(dtype), 0, 3, 7), expected)


def test_random_routing_chooses_the_same_by_positions_in_32_bits():
    model = routed(scheme="random")
    ids = token_ids(2, 40)
    positions = torch.arange(40)[None]
    expected = model(ids, output_routes=True, position_ids=positions).routes
    routes = model(ids, output_routes=True, position_ids=positions.int()).routes
    assert all(torch.equal(a.mask, b.mask) for a, b in zip(routes, expected, strict=True))


def test_random_routing_follows_its_seed():
    masks = []
    for seed in (0, 1):
        model = mixdepth.route(dense(), scheme="random", seed=seed).eval()
        masks.append(routes_of(model, token_ids(2, 40))[0].mask)
    assert not torch.equal(*masks)


# Soft


def test_soft_is_the_gate_times_the_block_plus_the_rest_of_the_input():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True).double()
    model = Routed(block, width=16, config=DepthConfig(scheme="soft")).double()
    x = torch.randn(2, 9, 16).double()
    gate = torch.sigmoid(x @ model.router.projection.weight[0].double())[..., None]
    for mode in (True, False):
        assert torch.allclose(model.train(mode)(x), gate * block(x) + (1 - gate) * x, atol=1e-12)


# Early exit


def test_who_left_at_an_exit_is_in_no_later_layer():
    model = routed(**EARLY_EXIT)
    ids = token_ids(3, 30)
    for mode in (True, False):
        first, second = routes_of(model.train(mode), ids)
        assert torch.equal(second.candidates, first.mask)
        assert not (second.mask & ~first.mask).any()
        assert not second.mask.all()
    first, second = routes_of(model.train(), ids)
    assert first.count.tolist() == [slots(0.7, 30)] * 3
    assert second.count.tolist() == [slots(0.4, 30)] * 3


def test_decoding_skips_the_rest_of_the_stack_for_a_token_that_left():
    model = routed(**EARLY_EXIT)
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
    cache = model(token_ids(1, 8), use_cache=True).past_key_values
    for token in range(3, 60):
        calls.clear()
        lengths = [list(layer.lengths) for layer in cache.layers]
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True, output_routes=True)
        first, second = (bool(route.count) for route in out.routes)
        assert calls == [0, 1] * first + [2, 3] * (first and second)
        grown = [layer.lengths[0] - before[0] for layer, before in zip(cache.layers, lengths, strict=True)]
        assert grown == [first, first, first and second, first and second]
        assert {layer.seen for layer in cache.layers} == {cache.get_seq_length()}
    assert cache.get_seq_length() == 65


def test_an_exit_that_nobody_reaches_asks_nobody():
    model = routed(**EARLY_EXIT)
    with torch.no_grad():
        for parameter in model.depth_routers[0].predictor.parameters():
            parameter.zero_()
        model.depth_routers[0].predictor.down.bias.fill_(-1)
    asked = []
    model.depth_routers[1].predictor.register_forward_hook(lambda *_: asked.append(1))
    model(token_ids())
    assert not asked


def test_the_weight_of_an_exit_is_that_of_all_layers_behind_it():
    model = routed(**EARLY_EXIT, gate="sigmoid")
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight.zero_()  # weight 1/2
    streams = []
    model.model.layers[1].register_forward_hook(lambda layer, args, out: streams.append((args[0], out)))
    with mixdepth.lookahead(model):
        (route, _) = routes_of(model, token_ids(1))
    before, after = streams[0]
    layer = model.model.layers[1]
    columns = route.index[0]
    positions = model.model.rotary_emb(before, torch.arange(20)[None])
    chosen = tuple(part[:, columns] for part in positions)
    full = super(RoutedLayer, layer).forward(before[:, columns], position_embeddings=chosen)
    assert torch.allclose(after[:, columns], (before[:, columns] + full) / 2, atol=1e-12)


def test_early_exit_by_the_base_model_is_refused():
    with pytest.raises(ValueError, match="early exit needs the whole model"):
        routed(**EARLY_EXIT).model(token_ids())


# The running threshold


def test_the_first_update_takes_the_edge_of_the_choice_and_later_ones_move_towards_it():
    model = routed(causal="threshold", threshold_momentum=0.75).train()
    router = model.depth_routers[0]
    router.threshold.fill_(torch.nan)
    edges = []
    for seed in range(3):
        rows = []
        for micro_batch in token_ids(4, 30, seed=seed).split(2):  # of one optimizer step
            (route, *_) = routes_of(model, micro_batch)
            ranked = route.logits.sort(1, descending=True).values
            rows.append((ranked[:, 11] + ranked[:, 12]) / 2)  # k = 12 of 30
        edges.append(torch.cat(rows).mean().item())
        mixdepth.update_routers(model)
    expected = 0.75 * (0.75 * edges[0] + 0.25 * edges[1]) + 0.25 * edges[2]
    assert router.threshold.item() == pytest.approx(expected, rel=1e-12)


def test_a_threshold_moves_in_updates_alone():
    model = routed(causal="threshold").train()
    before = model.depth_routers[0].threshold.clone()
    for _ in range(2):
        model(token_ids(), labels=token_ids()).loss.backward()
    model.eval()(token_ids())
    assert torch.equal(model.depth_routers[0].threshold, before)
    mixdepth.update_routers(model)
    assert not torch.equal(model.depth_routers[0].threshold, before)
    with pytest.raises(ValueError, match="needs a training pass since the last call"):
        mixdepth.update_routers(model)


def test_a_threshold_that_was_never_estimated_is_refused():
    model = mixdepth.route(dense(), causal="threshold").eval()
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=r"thresholds were never estimated: call mixdepth\.update_routers"):
            call(token_ids())
    block = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(causal="threshold"))
    with pytest.raises(ValueError, match="never estimated"):
        block.eval()(torch.randn(1, 4, 8))


def test_a_threshold_is_not_needed_at_full_capacity():
    model = mixdepth.route(dense(), causal="threshold", capacity=1.0).eval()
    assert all(route.mask.all() for route in routes_of(model, token_ids()))


def test_a_threshold_just_admits_all_where_all_were_chosen():
    model = routed(causal="threshold", capacity=0.95, threshold_momentum=0.0).train()
    ids = token_ids(1, 12)  # ceil(0.95 x 12) is 12
    model(ids)
    mixdepth.update_routers(model)
    (route, *_) = routes_of(model.eval(), ids)
    assert route.mask.all()


@pytest.mark.parametrize("causal", ["threshold", "aux_loss"])
def test_a_score_at_the_threshold_itself_is_not_chosen(causal):
    router = Router(4, DepthConfig(causal=causal), capacity=0.5).eval()
    x = torch.randn(1, 8, 4)
    scores = router.score(x)[0]
    router.threshold.copy_(scores[3])
    route = router(x)
    assert torch.equal(route.mask[0], scores > scores[3])
    assert not route.mask[0, 3]


class Unchanged(nn.Module):
    """A block that is told which slots are in use."""

    def forward(self, x, used):
        return x


def test_a_row_of_padding_alone_has_no_part_in_the_threshold():
    config = DepthConfig(causal="threshold", capacity=0.5, threshold_momentum=0.0, init_std=1.0)
    block = Routed(Unchanged(), width=4, config=config, slot_mask="used")
    x = torch.randn(3, 8, 4)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1] = False
    thresholds = []
    for rows in ([0, 1, 2], [0, 2]):
        block.train()(x[rows], mask=mask[rows])
        mixdepth.update_routers(block)
        thresholds.append(block.router.threshold.item())
    assert thresholds[0] == thresholds[1]
    assert math.isfinite(thresholds[0])


def test_a_threshold_stays_in_float32_in_a_model_of_half_precision(tmp_path):
    model = routed(causal="threshold", dtype=torch.float32)
    exact = [router.threshold.clone() for router in model.depth_routers]
    model.save_pretrained(tmp_path)
    for cast in (model.to(torch.bfloat16), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        for router, threshold in zip(cast.depth_routers, exact, strict=True):
            assert router.threshold.dtype == torch.float32
            assert torch.equal(router.threshold, threshold)


def test_random_routing_trains_in_a_model_of_half_precision(tmp_path):
    model = routed(scheme="random", dtype=torch.float32)
    mixdepth.update_routers(model)
    expected = [route.mask for route in routes_of(model.train(), token_ids())]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    for route, mask in zip(routes_of(loaded, token_ids()), expected, strict=True):
        assert torch.equal(route.mask, mask)


def test_the_base_model_refuses_unknown_thresholds_and_knows_positions():
    with pytest.raises(ValueError, match="never estimated"):
        mixdepth.route(dense(), causal="threshold").eval().model(token_ids())
    model = routed(scheme="random")
    ids = token_ids(1, 20)
    whole = model.model(ids).last_hidden_state
    cache, parts = None, []
    for part in ids.split(5, dim=1):
        out = model.model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.last_hidden_state)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-10)


def test_a_folder_from_before_there_were_thresholds_still_loads(tmp_path):
    from safetensors.torch import load_file, save_file

    model = routed(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(".threshold")}
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(token_ids()).logits, model(token_ids()).logits)


def test_the_trainer_updates_the_routers_once_for_each_optimizer_step(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 16).tolist()]
    arguments = TrainingArguments(
        **{"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        **{"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
    )
    model = routed(scheme="random", dtype=torch.float32)
    Trainer(model, arguments, train_dataset=rows, callbacks=[mixdepth.UpdateRouters()]).train()
    assert model.depth_routers[0].step == 2


def test_all_ranks_of_a_distributed_run_share_their_thresholds(tmp_path):
    import torch.multiprocessing as mp

    mp.start_processes(rank_main, (str(tmp_path),), nprocs=2, start_method="forkserver")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["threshold"], second["threshold"])
    total, num_rows = first["observed"] + second["observed"]
    assert first["threshold"].item() == pytest.approx((total / num_rows).item(), rel=1e-12)
    assert not first["observed"].equal(second["observed"])
    assert first["gradient"].equal(second["gradient"])


def rank_main(rank, folder):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    model = mixdepth.route(dense(dtype=torch.float64), causal="threshold", capacity=0.4).double().train()
    parallel = nn.parallel.DistributedDataParallel(model)
    ids = token_ids(2, 30, seed=rank)
    parallel(ids, labels=ids).loss.backward()
    observed = model.depth_routers[0].observed.clone()
    mixdepth.update_routers(parallel)
    router = model.depth_routers[0]
    found = {"threshold": router.threshold, "observed": observed, "gradient": router.projection.weight.grad}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # taking DDP down, torch can wait for itself: gloo's thread wants the GIL that the destructor holds


# Blocks of the user's own


@pytest.mark.parametrize("scheme", ["token_choice", "random", "soft"])
def test_a_block_of_the_users_own_takes_every_scheme_of_one_layer(scheme):
    torch.manual_seed(0)
    model = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(scheme=scheme))
    x = torch.randn(2, 16, 8)
    model(x).sum().backward()
    loss = mixdepth.routing_loss(model)
    assert loss.isfinite()
    assert bool(loss) == (scheme == "token_choice")
    mixdepth.update_routers(model)
    model.eval()(x)
    with pytest.raises(ValueError, match="call train"):
        mixdepth.routing_loss(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "mlp"}, "target='mlp' is for language models"),
        ({"gate_on": "mlp"}, "gate_on='mlp' is for language models"),
        ({"experts": "token_choice", "layers": ()}, "experts='token_choice' is for language models"),
        ({"scheme": "early_exit"}, "scheme='early_exit' skips all later layers"),
    ],
)
def test_a_block_of_the_users_own_refuses_what_needs_a_model(settings, message):
    with pytest.raises(ValueError, match=message):
        Routed(nn.Linear(8, 8), width=8, config=DepthConfig.from_flat(**settings))


# The example of the documentation


def test_the_scheme_of_the_documentation_is_added_by_changing_one_module(tmp_path):
    # 1. Read the changes and the example from the page.
    page = (ROOT / "docs" / "family.md").read_text()
    (changes,) = re.findall(r"^```diff\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (example,) = re.findall(r"^```py\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    # 2. Make the changes in a copy of the package.
    shutil.copytree(ROOT / "mixdepth", tmp_path / "mixdepth")
    module = tmp_path / "mixdepth" / "schemes.py"
    source = module.read_text()
    for change in changes.split("\n\n"):
        lines = change.splitlines()
        before = "\n".join(line[1:] for line in lines if line[0] != "+")
        after = "\n".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module.write_text(source)
    # 3. Run the example with that copy.
    script = f"{example}\nprint(mixdepth.__file__)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert str(tmp_path) in ran.stdout
