"""Law 3: The forward pass and all gradients equal those of the slow reference in oracle.py."""

import pytest
import torch
from oracle import oracle
from tiny import decisions
from variants import assert_close, every_case, left_padded, shared


@pytest.mark.parametrize("lookahead", [False, True], ids=["causal", "top-k"])
@every_case
def test_forward_and_gradients_equal_the_oracle(architecture, variant, lookahead):
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
