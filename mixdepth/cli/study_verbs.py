"""Verbs of the comparison at equal training FLOPs: isoflop plan, run, fit, plot."""

import sys
from typing import Any

from mixdepth.cli.flags import add_run_settings, add_verb
from mixdepth.runs.settings import NOT_COMMON, STUDY_DEFAULTS
from mixdepth.text import parse_value


def add_verbs(verbs: Any, *, shows_all: bool) -> None:
    isoflop = add_verb(
        verbs,
        "isoflop",
        summary="compare variants at equal training FLOPs: plan, run, fit, plot",
        usage="mixdepth isoflop {plan,run,fit,plot} ...",
        description="Compare variants at equal training FLOPs. `plan` writes a grid of runs, and the hypotheses that "
        "they test, to a folder. `run` trains them and resumes where it was stopped. `fit` finds optima, intervals "
        "and tests. `plot` draws them.",
    )
    steps = isoflop.add_subparsers(dest="step", metavar="STEP", title="steps", required=True)
    _add_plan(steps, shows_all)
    _add_run(steps)
    _add_fit(steps)
    _add_plot(steps)


def _add_plan(steps: Any, shows_all: bool) -> None:
    plan = add_verb(
        steps,
        "plan",
        summary="write down the runs, their cost, and the hypotheses",
        usage="mixdepth isoflop plan --out FOLDER --budgets LIST --variants LIST [settings]",
        description="Write the plan of a study, or add to one. Each budget and variant gets a ladder of model sizes "
        "around the optimum, and each size as many steps as the budget pays for. Prints a table with an estimate of "
        "the time.",
        example="mixdepth isoflop plan --budgets 1e13,3e13 --variants dense,mod,random --seeds 3 --out study/",
        has_help_all=True,
    )
    plan.add_argument("--out", required=True, metavar="FOLDER", help="Folder of the study.")
    plan.add_argument(
        "--budgets", required=True, type=_list, metavar="X,X,...", help="Training FLOPs, for example 1e13,3e13."
    )
    plan.add_argument(
        "--variants",
        required=True,
        type=_variants,
        metavar="NAME,NAME,...",
        help="`dense`, `mod`, or a routing scheme such as `random`. Settings of the routing or of the run follow after "
        "colons, as in mod:capacity=0.5 or dense:learning_rate=2e-3. `aspect` is the width per layer (default: 32 for "
        "dense, 16 for routed models).",
    )
    plan.add_argument(
        "--seeds", type=parse_value, default=3, metavar="N", help="A number, or a list of seeds. (default: %(default)s)"
    )
    plan.add_argument(
        "--sizes", type=int, default=5, metavar="N", help="Sizes in each ladder, half an octave apart. (default: 5)"
    )
    plan.add_argument(
        "--centre",
        type=float,
        metavar="X",
        help="Forward FLOPs per token in the middle of the ladders. (default: 5.5e5 at a budget of 1e13, growing with "
        "its square root)",
    )
    plan.add_argument(
        "--goal",
        type=float,
        default=0.015,
        metavar="X",
        help="Gain over dense models that the study looks for, as a share of the loss. (default: %(default)s)",
    )
    add_run_settings(plan, without=NOT_COMMON, defaults=STUDY_DEFAULTS, shows_all=shows_all)
    plan.set_defaults(run=_isoflop_plan)


def _list(text: str) -> list[Any]:
    value = parse_value(text)
    if isinstance(value, tuple):
        return list(value)
    return [value]


def _variants(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _isoflop_plan(step: str, seeds: Any, **options: Any) -> None:
    from mixdepth import isoflop
    from mixdepth.isoflop.launching import default_workers
    from mixdepth.isoflop.plan_table import table

    if isinstance(seeds, tuple):
        seeds = list(seeds)
    study = isoflop.plan(**options, seeds=seeds, tell=_report_progress)
    print(table(study, default_workers()))


def _report_progress(line: str) -> None:
    """Print what the planner is doing, for a user who watches."""
    if sys.stderr.isatty():
        print(f"mixdepth: {line}", file=sys.stderr)


def _add_run(steps: Any) -> None:
    run = add_verb(
        steps,
        "run",
        summary="train the cells that are not finished",
        description="Train the cells of a study, each in its own process and folder. The same command resumes a "
        "stopped study and never repeats a finished cell. A cell that fails records the reason, and the others "
        "continue.",
    )
    run.add_argument("folder", metavar="FOLDER", help="Folder of the study.")
    run.add_argument("--workers", type=int, metavar="N", help="Cells at the same time. (default: one for each core)")
    run.add_argument(
        "--engine",
        default="local",
        metavar="{local,ray}",
        help="`ray` uses the machines of a Ray cluster. (default: %(default)s)",
    )
    run.add_argument(
        "--cell", metavar="NAME", help="Train only this cell, in this process, for a scheduler of your own."
    )
    run.set_defaults(run=_isoflop_run)


def _isoflop_run(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    study = isoflop.run(**options)
    if options["cell"] is not None:
        return
    num_cells = len(study.cells)
    num_finished = len([cell for cell in study.cells if study.is_finished(cell)])
    num_failed = len([cell for cell in study.cells if not study.is_settled(cell)])
    print(f"{num_finished} of {num_cells} runs are finished; next: mixdepth isoflop fit {study.folder}")
    if num_failed:
        raise ValueError(
            f"{num_failed} of {num_cells} cells failed; each says why in its .failed.json and .log, and the same "
            "command tries them again"
        )


def _add_fit(steps: Any) -> None:
    fit = add_verb(
        steps,
        "fit",
        summary="find optima, intervals and tests",
        description="Fit a parabola in the logarithm of the size to each curve, and test the hypotheses of the plan. "
        "Losses are held-out losses with causal routing. Writes fit.json.",
    )
    fit.add_argument("folder", metavar="FOLDER", help="Folder of the study.")
    fit.add_argument(
        "--split",
        default="validation",
        metavar="{validation,test}",
        help="`test` opens the test text, once everything is finished and decided, and writes fit-test.json. "
        "(default: %(default)s)",
    )
    fit.set_defaults(run=_isoflop_fit)


def _isoflop_fit(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    print(isoflop.fit(**options))


def _add_plot(steps: Any) -> None:
    plot = add_verb(
        steps,
        "plot",
        summary="draw the curves as PNG and SVG",
        description="Draw loss against size at each budget (as in Fig. 3 and 4 of the paper), from fit.json.",
    )
    plot.add_argument("folder", metavar="FOLDER", help="Folder of the study.")
    plot.add_argument(
        "--split", default="validation", metavar="{validation,test}", help="Text of the losses. (default: %(default)s)"
    )
    plot.set_defaults(run=_isoflop_plot)


def _isoflop_plot(step: str, **options: Any) -> None:
    from mixdepth import isoflop

    for path in isoflop.plot(**options):
        print(path)
