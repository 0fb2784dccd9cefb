"""Law 3: the forward pass and all gradients equal those of the slow reference in oracle.py."""

import pytest
import torch
from oracle import Oracle
from tiny import decisions
from variants import assert_close, every_case, left_padded, shared


@pytest.mark.parametrize("lookahead", [False, True], ids=["causal", "top-k"])
@every_case
def test_forward_and_gradients_equal_the_oracle(architecture, variant, lookahead):
    model, tolerance = shared(architecture, variant)
    reference = Oracle(model)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # padding would predict the first token

    expected = reference(ids, attention_mask=mask, labels=labels, lookahead=lookahead)
    model.train(lookahead)
    out = model(ids, attention_mask=mask, labels=labels, use_cache=False)
    model.eval()
    assert_close(out.logits[mask == 1], expected.logits[mask == 1], tolerance)
    assert_close(out.loss, expected.loss, max(tolerance, 1e-7))  # the package counts shares of tokens in float32

    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = [reference.weights[name] for name in parameters]
    gradients = torch.autograd.grad(out.loss, list(parameters.values()), allow_unused=True)
    expected_gradients = torch.autograd.grad(expected.loss, weights, allow_unused=True)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_gradients_close(gradient, expected_gradient, tolerance)


def assert_gradients_close(gradient, expected, tolerance):
    """Compare two gradients, of which None is zero."""
    gradient = torch.zeros(()) if gradient is None else gradient
    expected = torch.zeros(()) if expected is None else expected
    # Norms in transformers and shares of tokens in the package are computed in float32.
    allowed = max(5e-7 * (1 + expected.abs().max()), 10 * tolerance)
    assert (gradient - expected).abs().max() <= allowed
