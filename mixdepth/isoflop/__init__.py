"""The comparison at equal training FLOPs: plan a grid of runs, run it, fit it, plot it.

```
from mixdepth import isoflop

isoflop.plan("study", budgets=[1e13], variants=["dense", "mod", "random"], seeds=3)
isoflop.run("study")
print(isoflop.fit("study"))
isoflop.plot("study")
```
"""

from mixdepth.isoflop.fit import Fit, fit
from mixdepth.isoflop.plan import plan
from mixdepth.isoflop.plot import plot
from mixdepth.isoflop.runner import run
from mixdepth.isoflop.study import Cell, Hypothesis, Study

__all__ = ["Cell", "Fit", "Hypothesis", "Study", "fit", "plan", "plot", "run"]
