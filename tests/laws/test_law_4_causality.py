"""Law 4: No logit depends on a later token."""

import torch
from tiny import decisions, token_ids
from variants import assert_close, every_case, shared


@every_case
def test_no_logit_depends_on_a_later_token(architecture, variant):
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
