"""Copies, pickles, other vocabularies and checkpointed activations: the same numbers in another shape."""

import copy
import io
import pickle

import pytest
import torch
from promised import (
    DENSE,
    VARIANTS,
    every_model,
    logits_of,
    promised,
)
from tiny import VOCAB, dense, routed, token_ids


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("way", COPIES)
@every_model
def test_a_copy_computes_the_same_and_shares_nothing(architecture, variant, way):
    model = promised(architecture, variant)
    expected = logits_of(model)
    twin = COPIES[way](model)
    assert type(twin) is type(model)
    assert torch.equal(logits_of(twin), expected)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
    twin.config.use_cache = False
    twin.generation_config.max_length = 3
    assert torch.equal(logits_of(model), expected)
    assert model.config.use_cache is True
    assert model.generation_config.max_length != 3


@every_model
def test_a_copy_trains_as_the_original_does(architecture, variant):
    model = promised(architecture, variant).train()
    twin = copy.deepcopy(model)
    ids = token_ids()
    losses = [m(ids, labels=ids).loss for m in (model, twin)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def vocabulary_of(model):
    return model.get_input_embeddings().weight.shape[0]


def with_head(architecture, variant, tied):
    model = dense(architecture, torch.float32, tie_word_embeddings=tied)
    return model if variant == DENSE else routed(model, torch.float32, **VARIANTS[variant])


HEADS = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@pytest.mark.parametrize("size", [VOCAB + 11, VOCAB - 11], ids=["up", "down"])
@HEADS
@every_model
def test_a_resized_vocabulary_keeps_the_logits_of_its_tokens(architecture, variant, tied, size, tmp_path):
    model = with_head(architecture, variant, tied)
    ids = token_ids().clamp(max=size - 1)
    kept = min(size, VOCAB)
    expected = logits_of(model, ids)[..., :kept]
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size == vocabulary_of(model) == model.get_output_embeddings().weight.shape[0]
    assert torch.equal(logits_of(model, ids)[..., :kept], expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert vocabulary_of(loaded) == size
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    one_tensor = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert one_tensor == tied


@HEADS
@every_model
def test_tying_weights_makes_the_head_the_embedding_or_leaves_it_alone(architecture, variant, tied):
    model = with_head(architecture, variant, tied)
    before = logits_of(model)
    model.tie_weights()
    assert torch.equal(logits_of(model), before)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


@every_model
def test_parameters_are_counted_each_once(architecture, variant):
    model = promised(architecture, variant)
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert model.num_parameters(only_trainable=True) == sum(trained)
    routing = [parameter.numel() for name, parameter in model.named_parameters() if ".depth_router." in name]
    assert model.num_parameters() - sum(routing) == promised(architecture, DENSE).num_parameters()


@every_model
def test_embeddings_are_found_and_replaced(architecture, variant):
    model = promised(architecture, variant)
    embeddings, expected = model.get_input_embeddings(), logits_of(model)
    assert embeddings.weight.shape == (VOCAB, 32)
    assert torch.equal(logits_of(model, None, inputs_embeds=None), expected)
    twin = copy.deepcopy(embeddings)
    model.set_input_embeddings(twin)
    assert model.get_input_embeddings() is twin
    assert torch.equal(logits_of(model), expected)
    assert model.get_decoder() is model.base_model


def loss_and_gradients(model):
    torch.manual_seed(0)
    model.zero_grad()
    ids = token_ids()
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


def assert_equal_steps(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        assert torch.equal(gradient, expected[1][name]), name


@pytest.mark.parametrize("settings", [{}, {"use_reentrant": False}], ids=["default", "not-reentrant"])
@every_model
def test_checkpointed_activations_give_the_same_gradients(architecture, variant, settings):
    model = promised(architecture, variant)
    expected = loss_and_gradients(promised(architecture, variant))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None)
    assert model.is_gradient_checkpointing
    assert_equal_steps(loss_and_gradients(model), expected)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert_equal_steps(loss_and_gradients(model), expected)


@every_model
def test_reentrant_checkpointing_gives_the_same_gradients_or_is_refused(architecture, variant):
    """It would lose the losses of routing, where there are any."""
    model = promised(architecture, variant).train()
    ids = token_ids()
    out = model(ids, labels=ids)
    expected = loss_and_gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    if getattr(out, "routing_loss", None) is None:
        assert_equal_steps(loss_and_gradients(model), expected)
        return
    with pytest.raises(ValueError, match="use_reentrant"):
        model(ids, labels=ids)
    model.gradient_checkpointing_disable()
    assert_equal_steps(loss_and_gradients(model), expected)
