"""One training step of each variant, in numbers: a refactoring changes none of them.

If you meant to change the numerics, print the new ones with `python tests/test_golden.py` and say why
in the CHANGELOG.
"""

import pytest
import torch
from test_laws import VARIANTS
from tiny import routed, token_ids

GOLDEN = {
    "default": (4.615408897399902, 4.292019420471665, 4.241880416870117),
    "sigmoid": (4.654102325439453, 4.350563516563462, 4.260631561279297),
    "tanh": (4.601436614990234, 4.3415564516025755, 4.231144905090332),
    "unit": (4.654383182525635, 4.038842897921387, 4.40762186050415),
    "one": (4.640894412994385, 4.042500592440125, 4.404470443725586),
    "aux_loss": (4.407934188842773, 0.5118718729487676, 3.911449670791626),
    "aux_loss-unit": (4.4705047607421875, 0.578162799042052, 3.970385789871216),
    "linear-predictor": (4.426830768585205, 2.1496898253499768, 4.290896892547607),
    "capacities": (4.630143642425537, 3.6099887601933456, 4.151813507080078),
    "all-layers": (4.505160331726074, 3.1073444631592415, 4.234927177429199),
}


def train_step(variant: str) -> tuple[float, float, float]:
    """Loss and routing loss before a step of SGD, and the causal loss after it."""
    model = routed(**VARIANTS[variant]).train()
    ids = token_ids()
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    routing = out.aux_loss if out.predictor_loss is None else out.predictor_loss
    with torch.no_grad():
        after = model.eval()(ids, labels=ids).loss
    return out.lm_loss.item(), routing.item(), after.item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_step_gives_the_recorded_numbers(variant):
    assert train_step(variant) == pytest.approx(GOLDEN[variant], rel=1e-6)  # transformers takes its loss in float32


if __name__ == "__main__":
    for name in VARIANTS:
        print(f'    "{name}": {train_step(name)},')
