"""The paper's isoFLOP curves (its Fig. 4), put through the estimator of our study.

The points were read off the figure: training losses under top-k routing, one run each; an error of about 0.002 in the
loss and of 2 % in the parameters.

    python paper.py

The README of experiments/ says which PYTHONPATH a script needs.
"""

import math

from machine import header, row

from mixdepth.isoflop.curves import Curve, Pair, Point

POINTS = {  # millions of parameters: loss
    6e18: (
        "65:3.258 93:3.203 129:3.164 175:3.148 230:3.135 296:3.138 375:3.152 468:3.167 575:3.184 838:3.265",
        "79:3.261 121:3.187 177:3.134 220:3.119 305:3.096 484:3.091 627:3.104 1031:3.155",
    ),
    2e19: (
        "93:3.018 129:2.961 174:2.922 230:2.889 377:2.866 468:2.865 575:2.868 838:2.886 1419:2.959",
        "121:3.026 177:2.948 220:2.923 305:2.878 484:2.845 628:2.835 797:2.834 1030:2.840 1662:2.881",
    ),
    1e20: (
        "230:2.715 375:2.645 724:2.588 1128:2.594 2495:2.638",
        "380:2.664 702:2.591 1094:2.573 1902:2.560 2948:2.587",
    ),
}
SEEDS = [0]


def curve(budget: float, variant: str, points: str) -> Curve:
    found = []
    for point in points.split():
        size, loss = map(float, point.split(":"))
        losses = {0: loss}
        found.append(
            Point(
                shape=f"{size:.0f}M",
                parameters=int(size * 1e6),
                flops_per_token=math.nan,
                losses=losses,
                lookahead_losses=losses,
                capacities={0: None},
            )
        )
    return Curve(budget=budget, variant=variant, points=tuple(found), seeds=SEEDS, num_planned=len(found))


header("FLOPs", "best against best", "by the best sizes", "optimum, parameters", "by the best sizes", "crossing")
for budget, (dense, routed) in POINTS.items():
    pair = Pair.of(curve(budget, "mod", routed), curve(budget, "dense", dense))
    sizes = [math.exp(value(SEEDS)) for value in (pair.relative_size, pair.relative_crossing)]
    best = pair.one.best.parameters / pair.other.best.parameters
    losses = [f"{value(SEEDS):+.2%}" for value in (pair.relative_loss, pair.relative_best)]
    row(f"{budget:.0e}", *losses, f"x {sizes[0]:.2f}", f"x {best:.2f}", f"x {sizes[1]:.2f}")
