"""Law 6: A row of a padded batch equals the row by itself."""

import pytest
from tiny import decisions
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
