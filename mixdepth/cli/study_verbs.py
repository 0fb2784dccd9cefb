"""The comparison at equal FLOPs: plan, run, fit, plot."""

import sys
from typing import Any

from mixdepth.cli.flags import add_settings
from mixdepth.runs.settings import NOT_COMMON, STUDY_DEFAULTS, TrainConfig
from mixdepth.text import parse_value


def add_isoflop(verbs: Any) -> None:
    isoflop = verbs.add_parser(
        "isoflop",
        help="compare variants at equal training FLOPs: plan, run, fit, plot",
        description="The comparison at equal training FLOPs. `plan` writes a grid of runs and the hypotheses that they "
        "test to a folder, `run` trains them (and goes on where it was stopped), `fit` finds optima, intervals and "
        "tests, `plot` draws them.",
    )
    steps = isoflop.add_subparsers(dest="step", metavar="step", required=True)
    plan = steps.add_parser(
        "plan",
        help="write down which runs it takes, what they cost and what they are to show",
        description="Writes a study's plan, or adds to one: for each budget and variant a ladder of sizes around the "
        "optimum, each with as many steps as the budget pays. Prints a table with an estimate of the time.",
        epilog="example: mixdepth isoflop plan --budgets 1e13,3e13 --variants dense,mod,random --seeds 3 --out study/",
    )
    plan.add_argument("--out", required=True, help="the study's folder")
    plan.add_argument("--budgets", required=True, type=_list, help="training FLOPs, as in 1e13,3e13")
    plan.add_argument(
        "--variants",
        required=True,
        type=lambda text: [part for part in text.split(",") if part],
        help="dense, mod, or a scheme of routing such as random; with settings of the routing or of the run after "
        "colons: dense,mod,mod:capacity=0.5,mod:every=1,random:capacity=0.5,dense:learning_rate=2e-3. aspect is "
        "the width per layer (default: 32 for dense, 16 for routed models)",
    )
    plan.add_argument("--seeds", type=parse_value, default=3, help="a number, or a list (default: %(default)s)")
    plan.add_argument("--sizes", type=int, default=5, help="rungs of each ladder, half an octave apart (default: 5)")
    plan.add_argument(
        "--centre",
        type=float,
        help="FLOPs of a forward pass, for each token, in the middle of the ladders (default: 5.5e5 at a budget of "
        "1e13, growing with its root)",
    )
    plan.add_argument(
        "--goal",
        type=float,
        default=0.015,
        help="the gain over dense models that is aimed at, as a share of the loss (default: %(default)s)",
    )
    common = plan.add_argument_group("settings of every run")
    add_settings(common, TrainConfig, without=NOT_COMMON, defaults=STUDY_DEFAULTS)
    plan.set_defaults(run=_isoflop_plan)
    run = steps.add_parser(
        "run",
        help="train what is not finished",
        description="Trains a study's cells, each in a process and a folder of its own. The same command goes on where "
        "it was stopped; finished cells are never done again; a cell that fails says why and the others go on.",
    )
    run.add_argument("folder", help="the study's folder")
    run.add_argument("--workers", type=int, help="cells side by side (default: one for each core)")
    run.add_argument("--engine", default="local", help="local, or ray for the machines of a cluster (default: local)")
    run.add_argument("--cell", help="run this one alone, in this process: for a scheduler of your own")
    run.set_defaults(run=_isoflop_run)
    fit = steps.add_parser(
        "fit",
        help="optima, intervals and tests",
        description="Fits a parabola in the logarithm of the size to each curve, and tests the hypotheses of the plan. "
        "Losses are held-out losses with causal routing. Writes fit.json.",
    )
    fit.add_argument("folder", help="the study's folder")
    fit.add_argument(
        "--split",
        default="validation",
        help="`test` opens the test text, once all is finished and decided, and writes fit-test.json (default: "
        "%(default)s)",
    )
    fit.set_defaults(run=_isoflop_fit)
    plot = steps.add_parser(
        "plot",
        help="draw the curves, as PNG and SVG",
        description="Draws loss against size at each budget (as Fig. 3 and 4 of the paper), from fit.json.",
    )
    plot.add_argument("folder", help="the study's folder")
    plot.add_argument("--split", default="validation", help="validation or test (default: %(default)s)")
    plot.set_defaults(run=_isoflop_plot)


def _list(text: str) -> list[Any]:
    value = parse_value(text)
    return list(value) if isinstance(value, tuple) else [value]


def _isoflop_plan(step: str, seeds: Any, **options: Any) -> None:
    from mixdepth import isoflop
    from mixdepth.isoflop.launching import default_workers
    from mixdepth.isoflop.planning import table

    say = (lambda line: print(f"mixdepth: {line}", file=sys.stderr)) if sys.stderr.isatty() else (lambda line: None)
    study = isoflop.plan(**options, seeds=list(seeds) if isinstance(seeds, tuple) else seeds, tell=say)
    print(table(study, default_workers()))


def _isoflop_run(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    study = isoflop.run(**options)
    if options["cell"] is None:
        finished = sum(study.is_finished(cell) for cell in study.cells)
        print(f"{finished} of {len(study.cells)} runs are finished; next: mixdepth isoflop fit {study.folder}")
        failed = sum(not study.is_settled(cell) for cell in study.cells)
        if failed:
            raise ValueError(
                f"{failed} of {len(study.cells)} cells failed; each says why in its .failed.json "
                "and .log, and the same command tries them again"
            )


def _isoflop_fit(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    print(isoflop.fit(**options))


def _isoflop_plot(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    for path in isoflop.plot(**options):
        print(path)
