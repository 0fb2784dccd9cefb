"""One training step of each variant, in numbers: a refactoring changes none of them.

If you meant to change the numerics, print the new ones with `python tests/test_golden.py` and say why
in the CHANGELOG.
"""

import pytest
import torch
from tiny import routed, token_ids
from variants import ALL_VARIANTS, EXPERT_VARIANTS

import mixdepth

GOLDEN = {
    "default": (4.615408897399902, 4.292019420471665, 4.241880416870117),
    "sigmoid": (4.654102325439453, 4.350563516563462, 4.260631561279297),
    "normed": (4.513221740722656, 0.0, 4.123928070068359),
    "tanh": (4.601436614990234, 4.3415564516025755, 4.231144905090332),
    "unit": (4.654383182525635, 4.038842897921387, 4.40762186050415),
    "straight": (4.493392467498779, 0.0, 4.0178399085998535),
    "one": (4.640894412994385, 4.042500592440125, 4.404470443725586),
    "aux_loss": (4.407934188842773, 0.5118718729487676, 3.911449670791626),
    "aux_loss-unit": (4.4705047607421875, 0.578162799042052, 3.970385789871216),
    "linear-predictor": (4.426830768585205, 2.1496898253499768, 4.290896892547607),
    "capacities": (4.630143642425537, 3.6099887601933456, 4.151813507080078),
    "all-layers": (4.505160331726074, 3.1073444631592415, 4.234927177429199),
    "threshold": (4.407934188842773, 0.0, 3.9486846923828125),
    "token_choice": (4.44085693359375, 1.1538832254100457, 3.7229702472686768),
    "early_exit": (4.334046363830566, 5.986504172499666, 4.2231974601745605),
    "early_exit-aux_loss": (4.594444751739502, 0.5651267919987475, 4.272894382476807),
    "early_exit-threshold": (4.392025947570801, 0.0, 3.969496011734009),
    "random": (4.618739604949951, 0.0, 4.190578460693359),
    "soft": (4.580332279205322, 0.0, 3.914335250854492),
    "attention": (4.408837795257568, 3.32857546891465, 4.170333385467529),
    "mlp": (4.465810775756836, 4.915851738966975, 3.8637802600860596),
    "mlp-token_choice": (4.582622051239014, 1.1154255331026894, 3.958681583404541),
    "gate_on_mlp": (4.633281707763672, 4.71086708748412, 4.2923359870910645),
    "staged": (4.639001369476318, 5.150546405714439, 4.3811116218566895),
    "staged-limited": (4.721574306488037, 5.360666155222504, 4.4460530281066895),
    "staged-expert_choice": (4.662392616271973, 2.993003020166249, 4.266408920288086),
    "staged-early_exit": (4.582611083984375, 6.312610231404801, 4.257175445556641),
    "staged-mlp": (4.727760314941406, 3.679227110932383, 4.092889785766602),
    "experts": (4.583664894104004, 2.1882906498920542, 3.8787424564361572),
    "experts-limited": (4.627684116363525, 2.2183012280937797, 3.9989864826202393),
    "expert_choice": (4.625508785247803, 0.0, 4.050787925720215),
    "integrated": (4.51569938659668, 2.2808877670038328, 3.897672653198242),
    "integrated-limited": (4.615122318267822, 2.2753017949190744, 4.045163631439209),
    "integrated-expert_choice": (4.593294143676758, 0.0, 4.081851959228516),
    "staged-integrated": (4.5688629150390625, 5.035194908413928, 4.308033466339111),
}


def train_step(variant: str) -> tuple[float, float, float]:
    """Loss and routing loss before a step of SGD, and the causal loss after it."""
    architecture = "mixtral" if variant in EXPERT_VARIANTS else "llama"
    model = routed(architecture, **ALL_VARIANTS[variant]).train()
    ids = token_ids()
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    mixdepth.update_routers(model)
    losses = (out.predictor_loss, out.aux_loss, out.capacity_loss, out.balance_loss)
    routing = sum(loss.item() for loss in losses if loss is not None)
    with torch.no_grad():
        after = model.eval()(ids, labels=ids).loss
    return out.lm_loss.item(), float(routing), after.item()


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_a_training_step_gives_the_recorded_numbers(variant):
    assert train_step(variant) == pytest.approx(GOLDEN[variant], rel=1e-6)  # transformers takes its loss in float32


if __name__ == "__main__":
    for name in ALL_VARIANTS:
        print(f'    "{name}": {train_step(name)},')
