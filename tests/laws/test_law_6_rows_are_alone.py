"""Law 6: a row of a padded batch equals the row by itself, and packed documents do not see each other."""

import pytest
import torch
from tiny import decisions, routed, token_ids
from variants import assert_close, every_case, left_padded, shared


@pytest.mark.parametrize("lookahead", [False, True], ids=["causal", "top-k"])
@every_case
def test_a_row_of_a_padded_batch_equals_the_row_by_itself(architecture, variant, lookahead):
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


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_packed_documents_do_not_see_each_other(architecture):
    model = routed(architecture)
    first, second = token_ids(1, 9), token_ids(1, 11, seed=1)
    packed = torch.cat([first, second], 1)
    position_ids = torch.cat([torch.arange(9), torch.arange(11)])[None]
    together = model(packed, position_ids=position_ids, use_cache=False).logits
    alone = torch.cat([model(first).logits, model(second).logits], 1)
    assert (together - alone).abs().max() <= 1e-10
    embeddings = model.get_input_embeddings()(packed).detach().requires_grad_()
    logits = model.train()(inputs_embeds=embeddings, position_ids=position_ids).logits
    (gradient,) = torch.autograd.grad(logits[:, 9:].sum(), embeddings)
    assert not gradient[:, :9].any()
    assert gradient[:, 9:].any()
