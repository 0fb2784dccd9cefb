"""The comparison at equal training FLOPs: plan a grid of runs, run it, fit it, plot it.

```
from mixdepth import isoflop

isoflop.plan("study", budgets=[1e13], variants=["dense", "mod", "random"], seeds=3)
isoflop.run("study")
print(isoflop.fit("study"))
isoflop.plot("study")
```
"""

from typing import TYPE_CHECKING

from mixdepth.lazy import lazily

if TYPE_CHECKING:
    from mixdepth.isoflop.drawing import plot as plot
    from mixdepth.isoflop.fitting import fit as fit
    from mixdepth.isoflop.launching import run as run
    from mixdepth.isoflop.planning import plan as plan
    from mixdepth.isoflop.results import Fit as Fit
    from mixdepth.isoflop.study import Cell as Cell
    from mixdepth.isoflop.study import Hypothesis as Hypothesis
    from mixdepth.isoflop.study import Study as Study

PLACES = {
    "Cell": "mixdepth.isoflop.study",
    "Fit": "mixdepth.isoflop.results",
    "Hypothesis": "mixdepth.isoflop.study",
    "Study": "mixdepth.isoflop.study",
    "fit": "mixdepth.isoflop.fitting",
    "plan": "mixdepth.isoflop.planning",
    "plot": "mixdepth.isoflop.drawing",
    "run": "mixdepth.isoflop.launching",
}

__all__ = [*PLACES]
__getattr__, __dir__ = lazily(PLACES, globals())
