"""MixtureOfDepths, the encoder of windows."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixdepth
from mixdepth import MixtureOfDepths
from mixdepth.encoder import CausalBlock

FEATURES, WIDTH, LENGTH = 287, 16, 12


def build(**options):
    """A small encoder in float64, with routers that have opinions."""
    small = {"embed_dim": FEATURES, "hidden_size": WIDTH, "num_heads": 2, "num_layers": 3, "dropout": 0.0}
    model = MixtureOfDepths.build(**{**small, "window_size": LENGTH, **options}).double()
    for layer in model.layers:
        nn.init.normal_(layer.router.projection.weight)
    return model


def windows(batch_size=4, length=LENGTH):
    return torch.randn(batch_size, length, FEATURES, dtype=torch.float64)


def streams(model, x, mask=None):
    """What each layer puts out, (B, T, D), first the input of the first one."""
    seen = []
    handles = [model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))]
    handles += [layer.register_forward_hook(lambda _, __, output: seen.append(output)) for layer in model.layers]
    model(x, mask)
    for handle in handles:
        handle.remove()
    return seen


def test_the_usage_of_the_first_design_gives_one_vector_for_each_window():
    model = MixtureOfDepths.build(embed_dim=287, hidden_size=256, num_heads=4, capacity_ratio=0.5, num_layers=4)
    assert isinstance(model, nn.Module)
    assert model(torch.randn(2, 60, 287)).shape == (2, 256)
    assert len(model.layers) == 4
    assert all(isinstance(layer, mixdepth.Routed) for layer in model.layers)
    assert len({id(layer.block) for layer in model.layers}) == 4


def test_the_defaults_are_told_and_build_uses_them():
    defaults = MixtureOfDepths.recommended_defaults()
    assert defaults == {
        "hidden_size": 256,
        "num_heads": 4,
        "capacity_ratio": 0.5,
        "num_layers": 4,
        "dropout": 0.1,
        "window_size": 60,
        "soft": False,
    }
    torch.manual_seed(0)
    model = MixtureOfDepths.build(embed_dim=3)
    torch.manual_seed(0)
    told = MixtureOfDepths.build(embed_dim=3, **defaults)
    x = torch.randn(2, 60, 3)
    assert torch.equal(model.eval()(x), told.eval()(x))


def test_the_output_size_is_told_without_building():
    assert MixtureOfDepths.output_size() == 256
    assert MixtureOfDepths.output_size(embed_dim=287, hidden_size=48, num_layers=2) == 48
    assert build()(windows()).shape[1] == MixtureOfDepths.output_size(hidden_size=WIDTH)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("padding", ["left", "right", "between"])
def test_a_padded_window_gives_what_the_window_by_itself_does(padding, soft):
    model, window = build(soft=soft), windows(1, 7)
    places = {"left": range(5, 12), "right": range(7), "between": [0, 2, 3, 6, 7, 8, 10]}[padding]
    batch, mask = windows(3), torch.ones(3, LENGTH, dtype=torch.bool)
    mask[1] = False
    mask[1, list(places)] = True
    batch[1, mask[1]] = window[0]
    assert (model(batch, mask)[1] - model(window)[0]).abs().max() <= 1e-10
    assert torch.equal(model(batch, torch.ones_like(mask)), model(batch))


@pytest.mark.parametrize("capacity_ratio", [0.5, 1.0])
def test_what_stands_in_padding_has_no_effect_not_even_nan(capacity_ratio):
    model, x = build(capacity_ratio=capacity_ratio), windows()
    mask = torch.arange(LENGTH) < torch.tensor([12, 7, 1, 4])[:, None]
    expected = model(x, mask)
    assert torch.equal(model(x.masked_fill(~mask[..., None], torch.nan), mask), expected)
    model(x.masked_fill(~mask[..., None], torch.inf), mask).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_windows_without_a_real_timestep_give_one_finite_vector():
    mask = torch.ones(4, LENGTH, dtype=torch.bool)
    mask[1:3] = False
    model, x = build(), windows()
    out = model(x, mask)
    assert out.isfinite().all()
    assert torch.equal(out[1], out[2])
    assert (out[[0, 3]] - model(x[[0, 3]])).abs().max() <= 1e-10


@pytest.mark.parametrize("options", [{"capacity_ratio": 1.0}, {"soft": True}])
def test_where_all_timesteps_are_processed_none_knows_of_a_later_one(options):
    model, x = build(**options), windows()
    changed = torch.cat([x[:, :8], windows(length=LENGTH - 8)], dim=1)
    before, after = streams(model, x)[-1], streams(model, changed)[-1]
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])
    for length in range(1, LENGTH + 1):  # so each timestep holds what the window that ends there gives
        assert (model(x[:, :length]) - model.norm(before[:, length - 1])).abs().max() <= 1e-10


def test_a_block_attends_to_all_earlier_slots_and_to_no_later_one():
    block = CausalBlock(WIDTH, 2, dropout=0.0).double()
    jacobian = torch.autograd.functional.jacobian(lambda x: block(x, None)[0].sum(-1), windows(1, 6)[..., :WIDTH])
    reached = jacobian[:, 0].abs().sum(-1) > 0  # (K, K)
    assert torch.equal(reached, torch.ones(6, 6).tril().bool())


def test_a_block_is_causal_attention_and_an_mlp_each_after_a_norm():
    block, x = CausalBlock(WIDTH, num_heads=4, dropout=0.0).double(), windows()[..., :WIDTH]
    attention = block.self_attn
    qkv = F.linear(block.norm1(x), attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = qkv.view(4, LENGTH, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)  # (B, heads, K, head width)
    scores = (q @ k.mT / (WIDTH // 4) ** 0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    y = x + attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    y = y + block.linear2(F.gelu(block.linear1(block.norm2(y))))
    assert block.linear1.out_features == 4 * WIDTH
    assert (block(x, None) - y).abs().max() <= 1e-10


def test_the_soft_encoder_is_gate_times_block_and_the_rest_times_input_in_every_layer():
    model, x = build(soft=True, capacity_ratio=0.1), windows()
    mask = torch.arange(LENGTH) < torch.tensor([12, 7, 1, 12])[:, None]
    stream = model.projection(x * mask[..., None]) + model.positions.weight
    for layer, output in zip(model.layers, streams(model, x, mask)[1:], strict=True):
        gate = torch.sigmoid(stream @ layer.router.projection.weight[0])[..., None]  # (B, T, 1)
        stream = gate * layer.block(stream, mask) + (1 - gate) * stream
        assert (output - stream)[mask].abs().max() <= 1e-10
    last = stream[torch.arange(4), mask.sum(1) - 1]
    assert (model(x, mask) - model.norm(last)).abs().max() <= 1e-10


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity_ratio", [0.125, 0.5, 1.0])
def test_each_layer_processes_the_top_share_of_the_real_timesteps_and_leaves_the_others(capacity_ratio, training):
    model, x = build(capacity_ratio=capacity_ratio).train(training), windows()
    lengths = [12, 7, 1, 4]
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    seen = streams(model, x, mask)
    for layer, before, after in zip(model.layers, seen[:-1], seen[1:], strict=True):
        counts = [math.ceil(capacity_ratio * length) for length in lengths]
        assert layer.route.count.tolist() == counts
        assert layer.route.index.shape[1] == math.ceil(capacity_ratio * LENGTH)
        scores = before @ layer.router.projection.weight[0]
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            chosen = torch.zeros(LENGTH, dtype=torch.bool)
            chosen[scores[row, :length].topk(count).indices] = True
            assert torch.equal((before != after)[row].any(-1), chosen)


def test_processed_timesteps_keep_their_order_and_attend_only_to_processed_ones():
    model, x = build(num_layers=1, capacity_ratio=0.5), windows(1)
    before, after = streams(model, x)
    layer = model.layers[0]
    scores = (before @ layer.router.projection.weight[0])[0]
    chosen = scores.topk(6).indices.sort().values
    gate = scores[chosen].sigmoid()[:, None]
    moved = gate * layer.block(before[:, chosen], None)[0] + (1 - gate) * before[0, chosen]
    assert (after[0, chosen] - moved).abs().max() <= 1e-10


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_reaches_every_parameter(soft):
    model = build(soft=soft)
    model(windows(64)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name
    assert model.positions.weight.grad.any(dim=1).all()


def test_training_and_evaluation_choose_and_compute_alike_without_dropout():
    model, x = build(), windows()
    trained, routes = model.train()(x), [layer.route for layer in model.layers]
    with torch.no_grad():  # where torch has kernels of its own for such layers
        evaluated = model.eval()(x)
    assert (trained - evaluated).abs().max() <= 1e-10
    for layer, route in zip(model.layers, routes, strict=True):
        assert torch.equal(layer.route.index, route.index)


def test_torchs_kernels_for_evaluation_give_the_same_in_single_precision():
    model, x = build(soft=True).float(), windows().float()
    trained = model.train()(x)
    with torch.no_grad():
        assert (trained - model.eval()(x)).abs().max() <= 1e-5


def test_dropout_is_for_training_alone():
    model, x = build(dropout=0.5), windows()
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_saved_weights_come_back_to_the_bit(tmp_path):
    model, other, x = build(), build(), windows()
    assert not torch.equal(model(x), other(x))
    torch.save(model.state_dict(), tmp_path / "encoder.pt")
    other.load_state_dict(torch.load(tmp_path / "encoder.pt"))
    assert torch.equal(model(x), other(x))


def test_an_encoder_can_be_copied_after_a_training_pass():
    model, x = build(), windows()
    expected = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    nn.init.zeros_(twin.projection.weight)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("soft", [False, True])
def test_it_compiles_as_one_graph_with_the_same_gradients(soft):
    model, x = build(soft=soft).train(), windows()
    mask = torch.arange(LENGTH) < torch.tensor([12, 7, 1, 4])[:, None]
    plain = torch.autograd.grad(model(x, mask).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for gradient, expected in zip(
        torch.autograd.grad(compiled(x, mask).square().sum(), list(model.parameters())), plain, strict=True
    ):
        assert (gradient - expected).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": None}, "embed_dim is missing: give the number of features of a timestep"),
        ({"embed_dim": "287"}, "embed_dim must be a whole number of at least 1, not '287'"),
        ({"embed_dim": 28.7}, "embed_dim must be a whole number of at least 1, not 28.7"),
        ({"embed_dim": True}, "embed_dim must be a whole number of at least 1, not True"),
        ({"embed_dim": 0}, "embed_dim must be a whole number of at least 1, not 0"),
        ({"hidden_size": -1}, "hidden_size must be a whole number of at least 1, not -1"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, not 0"),
        ({"hidden_size": 16, "num_heads": 3}, "hidden_size must be a multiple of num_heads=3, not 16"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"window_size": 1.5}, "window_size must be a whole number of at least 1, not 1.5"),
        ({"capacity_ratio": 0}, r"capacity_ratio must be a fraction in \(0, 1\], not 0"),
        ({"capacity_ratio": 1.1}, r"capacity_ratio must be a fraction in \(0, 1\], not 1.1"),
        ({"capacity_ratio": math.nan}, r"capacity_ratio must be a fraction in \(0, 1\], not nan"),
        ({"capacity_ratio": True}, r"capacity_ratio must be a fraction in \(0, 1\], not True"),
        ({"capacity_ratio": "half"}, r"capacity_ratio must be a fraction in \(0, 1\], not 'half'"),
        ({"dropout": 1}, r"dropout must be a fraction in \[0, 1\), not 1"),
        ({"dropout": -0.1}, r"dropout must be a fraction in \[0, 1\), not -0.1"),
        ({"dropout": False}, r"dropout must be a fraction in \[0, 1\), not False"),
        ({"soft": "yes"}, "soft must be True or False, not 'yes'"),
        ({"soft": 1}, "soft must be True or False, not 1"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build(**options)


def test_an_output_size_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="hidden_size must be a whole number of at least 1, not '256'"):
        MixtureOfDepths.output_size(hidden_size="256")


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(5, FEATURES), None, r"x must have shape \(batch, timesteps, embed_dim=287\), not \(5, 287\)"),
        (torch.zeros(1, 5, 286), None, r"x must have shape \(batch, timesteps, embed_dim=287\), not \(1, 5, 286\)"),
        (torch.zeros(1, 13, FEATURES), None, "x must have 1 to window_size=12 timesteps, not 13: cut it, or build"),
        (torch.zeros(1, 0, FEATURES), None, "x must have 1 to window_size=12 timesteps, not 0"),
        (torch.zeros(2, 5, FEATURES), torch.ones(2, 5), "mask must be boolean, True at real timesteps, not torch.flo"),
        (
            torch.zeros(2, 5, FEATURES),
            torch.ones(1, 5, dtype=torch.bool),
            r"mask must have the shape \(2, 5\) of x's timesteps, not \(1, 5\)",
        ),
    ],
)
def test_an_input_that_does_not_fit_is_refused_in_one_sentence(x, mask, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build()(x.double(), mask)
