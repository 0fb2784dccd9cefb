"""What a pass gives besides logits: attentions, hidden states and tuples, asked for by keyword or by the config."""

import pytest
import torch
from promised import DENSE, every_model, every_routed_model, over, promised
from tiny import NUM_LAYERS, token_ids

import mixdepth
from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.layer import RoutedLayer
from mixdepth.routes import slots

NEEDS_EVERY_LAYER = r"output_attentions needs every layer to run: evaluate within mixdepth.lookahead\(model\)"


def eager(architecture, variant):
    """Kernels other than eager attention give no attentions, in dense models neither."""
    model = promised(architecture, variant)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def numbers_of_slots(model, num_tokens):
    """How many tokens each layer can take with look-ahead; a layer behind an exit takes what the exit took."""
    lengths, before_exit = [], num_tokens
    for layer in decoder_layers(model):
        length = before_exit
        if isinstance(layer, RoutedLayer) and layer.depth_router is not None:
            length = slots(layer.depth_router.capacity, num_tokens)
        if model.depth_config.scheme == "early_exit":
            before_exit = length
        lengths.append(length)
    return lengths


def check_attentions(attentions, lengths):
    assert [attention.shape[2:] for attention in attentions] == [(length, length) for length in lengths]
    for attention in attentions:
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))
        assert not attention.triu(1).any()  # no slot sees a later one


@every_routed_model
def test_attentions_within_look_ahead_are_those_among_the_slots_of_each_layer(architecture, variant):
    model = eager(architecture, variant)
    with mixdepth.lookahead(model), torch.no_grad():
        out = model(token_ids(), output_attentions=True)
    check_attentions(out.attentions, numbers_of_slots(model, 20))


@every_routed_model
def test_attentions_of_training_are_those_of_look_ahead(architecture, variant):
    model = eager(architecture, variant)
    if model.depth_config.scheme == "random":  # training draws other noise than evaluation
        pytest.skip("its choice in training is another")
    with mixdepth.lookahead(model), torch.no_grad():
        expected = model(token_ids(), output_attentions=True).attentions
    with torch.no_grad():
        attentions = model.train()(token_ids(), output_attentions=True).attentions
    assert all(torch.equal(a, b) for a, b in zip(attentions, expected, strict=True))


@every_routed_model
def test_attentions_of_an_evaluation_that_skips_are_refused(architecture, variant):
    model = eager(architecture, variant)
    with pytest.raises(ValueError, match=NEEDS_EVERY_LAYER):
        model(token_ids(), output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=NEEDS_EVERY_LAYER):
        model(token_ids())
    assert model(token_ids(), output_attentions=False).attentions is None


@every_model
def test_hidden_states_are_those_of_all_tokens_after_each_layer(architecture, variant):
    model = eager(architecture, variant)
    with torch.no_grad():
        out = model(token_ids(), output_hidden_states=True)
        head = model.get_output_embeddings()(out.hidden_states[-1])
    assert [state.shape for state in out.hidden_states] == [(2, 20, 32)] * (NUM_LAYERS + 1)
    if architecture != "gemma2":  # it bends its logits
        assert torch.equal(head, out.logits)


@every_model
def test_a_tuple_holds_what_the_output_has_by_name(architecture, variant):
    model = eager(architecture, variant)
    ids = token_ids()
    with torch.no_grad():
        by_name = model(ids, labels=ids, output_hidden_states=True, use_cache=False)
        values = model(ids, labels=ids, output_hidden_states=True, use_cache=False, return_dict=False)
    assert isinstance(values, tuple)
    assert len(values) == len(by_name.to_tuple())
    assert torch.equal(values[0], by_name.loss)
    assert torch.equal(values[1], by_name.logits)


@every_model
def test_the_last_logits_alone_can_be_asked_for(architecture, variant):
    model = eager(architecture, variant)
    with torch.no_grad():
        expected = model(token_ids()).logits[:, -3:]
        logits = model(token_ids(), logits_to_keep=3).logits
    torch.testing.assert_close(logits, expected)


@over([("llama", DENSE), ("llama", "predictor")])
def test_a_batch_without_a_row_or_a_token_fails_as_in_a_dense_model(architecture, variant):
    model = eager(architecture, variant)
    for shape in ((0, 5), (2, 0)):
        with pytest.raises(RuntimeError, match="0 elements"):
            model(torch.zeros(shape, dtype=torch.long))
