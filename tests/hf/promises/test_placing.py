"""Where weights lie changes nothing: offloaded, made on the meta device, or quantised as the model runs."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from promised import (
    CASES,
    DENSE,
    RULES,
    VARIANTS,
    every_model,
    every_routed_model,
    every_rule_on_llama,
    logits_of,
    over,
    promised,
)
from tiny import dense, tiny_config, token_ids
from torch import nn
from transformers import AutoModelForCausalLM

import mixdepth
from mixdepth.encoder import CausalBlock

GENERATE = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def is_on_meta(model):
    return [name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"]


def load_with_little_memory(model, folder):
    """Load the model with most of its layers on disk, as a machine with too little memory does."""
    model.save_pretrained(folder, max_shard_size="20KB")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    options = {"device_map": "auto", "max_memory": {"cpu": size // 2}, "offload_folder": folder / "offloaded"}
    loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert "disk" in loaded.hf_device_map.values()
    return loaded


@every_model
def test_layers_that_memory_has_no_room_for_compute_the_same_from_disk(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    loaded = load_with_little_memory(model, tmp_path)
    if variant != DENSE:
        assert any(".depth_router." in name for name in is_on_meta(loaded))
    for seed in range(3):
        ids = token_ids(seed=seed)
        assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert torch.equal(loaded.generate(token_ids(), **GENERATE), model.generate(token_ids(), **GENERATE))


@every_model
def test_a_model_that_is_offloaded_to_memory_computes_the_same(architecture, variant):
    model = promised(architecture, variant)
    expected = logits_of(model)
    cpu_offload(model)
    assert is_on_meta(model)
    assert torch.equal(logits_of(model), expected)


@every_model
def test_a_model_that_is_offloaded_to_disk_computes_the_same(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    expected = logits_of(model)
    disk_offload(model, tmp_path)
    assert is_on_meta(model)
    assert torch.equal(logits_of(model), expected)


@every_routed_model
def test_routers_whose_buffers_are_offloaded_are_not_evaluated(architecture, variant):
    """A buffer is no module, so that nothing brings it in when it is asked for."""
    model = promised(architecture, variant)
    cpu_offload(model, offload_buffers=True)
    with pytest.raises(ValueError, match="the buffers of routers hold no numbers: offload with offload_buffers=False"):
        logits_of(model)


@over([case for case in CASES if case[0] != "mixtral"])  # whose folder holds its experts one by one
def test_an_empty_model_that_a_checkpoint_is_dispatched_into_computes_the_same(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model.config)
    empty.tie_weights()
    loaded = load_checkpoint_and_dispatch(empty, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    assert torch.equal(logits_of(loaded), logits_of(model))


@every_rule_on_llama
def test_a_pass_with_look_ahead_computes_the_same_when_offloaded(architecture, variant):
    model = promised(architecture, variant)
    offloaded = copy.deepcopy(model)
    cpu_offload(offloaded)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(offloaded.train()(ids, labels=ids).loss, model.train()(ids, labels=ids).loss)


class Unrouted(nn.Module):
    """A layer of an encoder that processes every timestep."""

    def __init__(self, width):
        super().__init__()
        self.block = CausalBlock(width, num_heads=2, dropout=0.0)

    def forward(self, x, mask):
        return self.block(x, used=mask)


def encoder(kind):
    torch.manual_seed(0)
    if kind == DENSE:
        layers = [Unrouted(16) for _ in range(3)]
        return mixdepth.MixtureOfDepths(layers, embed_dim=6, hidden_size=16, window_size=12).eval()
    options = {"embed_dim": 6, "hidden_size": 16, "num_heads": 2, "num_layers": 3, "window_size": 12}
    return mixdepth.MixtureOfDepths.build(**options, soft=kind == "soft").eval()


@pytest.mark.parametrize("kind", [DENSE, "hard", "soft"])
def test_an_encoder_that_is_offloaded_computes_the_same(kind):
    """torch's attention reads a projection's weights past its module, so its block is loaded as a whole."""
    model = encoder(kind)
    x = torch.randn(3, 12, 6)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 5:] = False
    with torch.no_grad():
        expected = model(x, mask)
        cpu_offload(model, preload_module_classes=["CausalBlock"])
        assert set(is_on_meta(model)) == {name for name, _ in model.named_parameters()}
        assert torch.equal(model(x, mask), expected)


class Block(nn.Module):
    """A block of the user's own."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks():
    torch.manual_seed(0)
    yield DENSE, Block().eval()
    for name in (*RULES, "random", "token_choice"):
        config = mixdepth.DepthConfig(capacity=0.5, **VARIANTS[name])
        block = mixdepth.Routed(Block(), width=16, config=config)
        nn.init.normal_(block.router.projection.weight)
        if block.router.estimates:
            block.train()(torch.randn(4, 10, 16))
            mixdepth.update_routers(block)
        yield name, block.eval()


@pytest.mark.parametrize(("name", "block"), list(blocks()), ids=[name for name, _ in blocks()])
def test_a_block_that_is_offloaded_computes_the_same(name, block):
    x = torch.randn(3, 10, 16)
    with torch.no_grad():
        expected = block(x)
        assert not torch.equal(expected, x)
        cpu_offload(block)
        assert is_on_meta(block)
        assert torch.equal(block(x), expected)


def routing_weights(model):
    return {name: tensor for name, tensor in model.named_parameters() if ".depth_router." in name}


@every_model
def test_linear_layers_are_quantised_as_the_model_runs(architecture, variant):
    """All but the routers, which compute in full precision."""
    model = promised(architecture, variant)
    expected = logits_of(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    logits = logits_of(quantised)
    assert logits.shape == expected.shape
    assert logits.isfinite().all()
    assert quantised.generate(token_ids(), **GENERATE).shape == (2, 26)
    assert torch.equal(logits_of(model), expected)  # it is a copy that is quantised
    own, theirs = routing_weights(model), routing_weights(quantised)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in own.items())


RAW = 77.0
"""What memory holds before it is written to could be any number."""


def made_on_meta(config):
    """A model whose tensors are made on the meta device, then allocated, then initialised."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(RAW)
    torch.manual_seed(0)
    model.init_weights()
    return model


@every_model
def test_no_tensor_is_left_raw_by_deferred_initialisation(architecture, variant):
    model = made_on_meta(promised(architecture, variant).config)
    raw = [name for name, tensor in model.named_parameters() if (tensor == RAW).any()]
    raw += [name for name, tensor in model.named_buffers() if (tensor == RAW).any()]
    assert raw == []


@every_model
def test_deferred_initialisation_draws_from_the_same_spread_as_a_new_model(architecture, variant):
    """Constants are the same, and what is drawn has the same standard deviation, up to chance."""
    config = promised(architecture, variant).config
    fresh = dict(AutoModelForCausalLM.from_config(config).state_dict())
    for name, tensor in made_on_meta(config).state_dict().items():
        expected = fresh[name].float()
        assert torch.equal(tensor.isnan(), expected.isnan()), name
        if expected.numel() > 8 and expected.std() > 0:
            assert tensor.std() == pytest.approx(expected.std().item(), rel=0.6), name
        else:
            bound = 1.0 if "predictor" in name else 0.0  # a predictor's few biases are drawn
            assert (tensor - expected).nan_to_num().abs().max() <= bound, name


@pytest.mark.parametrize("init_std", [0.0, 0.5])
@pytest.mark.parametrize("causal", RULES)
def test_deferred_initialisation_keeps_to_the_routers_init_std(causal, init_std):
    config = mixdepth.route(dense(), causal=causal, init_std=init_std, every=1).config
    spread = torch.cat([router.projection.weight[0] for router in made_on_meta(config).depth_routers]).std()
    assert spread.item() == pytest.approx(init_std, rel=0.3)


@pytest.mark.parametrize("causal", RULES)
def test_thresholds_after_deferred_initialisation_are_those_of_a_new_model(causal):
    for router in made_on_meta(mixdepth.route(dense(), causal=causal).config).depth_routers:
        assert router.threshold.isnan() if causal == "threshold" else router.threshold == 0


@pytest.mark.parametrize(
    ("architecture", "settings"), [("llama", {"causal": "threshold"}), ("mixtral", {"experts": "expert_choice"})]
)
def test_a_threshold_that_deferred_initialisation_left_unknown_is_not_evaluated_by(architecture, settings):
    model = made_on_meta(mixdepth.route(dense(architecture), capacity=0.5, **settings).config).eval()
    with pytest.raises(ValueError, match="never estimated"):
        model(token_ids())


@every_rule_on_llama
def test_a_model_made_on_the_meta_device_takes_over_weights(architecture, variant):
    model = promised(architecture, variant)
    empty = made_on_meta(model.config)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(empty), logits_of(model))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_dense_model_made_on_the_meta_device_is_routed_after_its_initialisation(architecture):
    model = mixdepth.route(made_on_meta(tiny_config(architecture)), capacity=0.5)
    assert logits_of(model).isfinite().all()
