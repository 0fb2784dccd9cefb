"""Plan a study: ladders of sizes around the optimum of each budget, steps from exact FLOPs, and the claims to test.

A ladder's rungs are FLOPs of a forward pass, half an octave apart, around a centre that grows with the root of the
budget. A variant's layers follow from its width per layer (`aspect`) at the centre: a routed model has twice the layers
of the dense model of its FLOPs, not more width. Along a ladder only the width changes.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from mixdepth import schemes
from mixdepth.config import check_integer, is_number
from mixdepth.data.corpus import Corpus
from mixdepth.data.sources import absolute, absolute_tokenizer
from mixdepth.files import writing
from mixdepth.isoflop.cell_times import seconds_per_step, steps_of_evaluation
from mixdepth.isoflop.hypotheses import hypotheses
from mixdepth.isoflop.ladder import Shape, ladder, shapes_near
from mixdepth.isoflop.study import FITS, STUDY, Cell, Study
from mixdepth.isoflop.variants import Variant, parse_variant
from mixdepth.models.flops import count_flops
from mixdepth.models.fresh import make_model
from mixdepth.models.shape import default_heads
from mixdepth.runs.run import corpus_of
from mixdepth.runs.settings import MAY_DIFFER, NOT_COMMON, STUDY_DEFAULTS, TrainConfig
from mixdepth.text import short
from mixdepth.training import schedule
from mixdepth.training.job import check_windows
from mixdepth.training.schedule import default_learning_rate

CENTRE = 5.5e5
"""The FLOPs of a forward pass per token of the best models at 1e13 training FLOPs: experiments/05-study-settings."""
CENTRE_BUDGET = 1e13
NUM_LINES = 200
"""How many lines of metrics.jsonl a cell writes, unless `log_every` is given."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of a call of `plan`, checked."""

    budgets: list[float]
    variants: list[Variant]
    seeds: list[int]
    sizes: int
    centre: float | None
    common: TrainConfig
    """The settings that all cells share."""
    has_log_every: bool
    """Whether `log_every` was given."""


def plan(
    out: str | Path,
    *,
    budgets: Sequence[float],
    variants: Sequence[str],
    seeds: int | Sequence[int] = 3,
    sizes: int = 5,
    centre: float | None = None,
    goal: float = 0.015,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Study:
    """Write a study's plan to the folder `out`, or add to the plan that is there.

    `budgets` are training FLOPs, and `variants` are written as for `parse_variant`. `seeds` is a number or a list. A
    ladder has `sizes` rungs around `centre`, in FLOPs of a forward pass per token; the default is a rule for text in
    bytes. `goal` is the intended gain over dense models, as a share of the loss. The other settings are those of
    `TrainConfig`, and all cells share them. Cells that are planned already stay as they are.
    """
    # 1. Check the arguments, and read the text.
    shared_names = [field.name for field in fields(TrainConfig) if field.name not in NOT_COMMON]
    wrong = [name for name in settings if name not in shared_names]
    if wrong:
        raise ValueError(f"a study's runs have no common setting {wrong[0]!r}; there are {', '.join(shared_names)}")
    parsed = _parse(budgets, variants, sizes, centre)
    if not is_number(goal) or not 0 <= goal < 1:
        raise ValueError(f"goal must be a share of the loss in [0, 1), not {goal!r}")
    seeds = _list_seeds(seeds)
    common = TrainConfig.from_dict({"steps": 1, "depth": None, **STUDY_DEFAULTS, **settings})
    common = replace(common, corpus=absolute(common.corpus), tokenizer=absolute_tokenizer(common.tokenizer))
    corpus = corpus_of(common)
    _check_text(corpus, common)
    folder = Path(out)
    if (folder / FITS["test"]).exists():
        raise ValueError(f"the test text of the study in {str(out)!r} has been opened: choose another --out")

    # 2. Make the cells.
    request = _Request(
        budgets=list(dict.fromkeys(map(float, budgets))),
        variants=parsed,
        seeds=seeds,
        sizes=sizes,
        centre=centre,
        common=common,
        has_log_every="log_every" in settings,
    )
    cells = _cells(request, corpus)

    # 3. Add them to the plan that is there, with the hypotheses that they can test.
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        old = _read_or_new(folder, corpus)
        if old.corpus_digest != corpus.digest:
            raise ValueError(
                f"the study in {str(out)!r} is on another text than {common.corpus!r}: choose another --out"
            )
        _check_common(old, common)
        added = _timed(_added(old.cells, cells), corpus, tell)
        arguments = {
            "budgets": list(budgets),
            "variants": list(variants),
            "seeds": seeds,
            "sizes": sizes,
            "goal": goal,
            "centre": centre,
            "finished_before": sum(map(old.is_finished, old.cells)),
            **settings,
        }
        study = replace(old, plans=[*old.plans, arguments], cells=[*old.cells, *added])
        names = [variant.name for variant in parsed]
        study = replace(study, hypotheses=hypotheses(study, names, goal))
        with writing(folder):
            study.write()
    return study


def _read_or_new(folder: Path, corpus: Corpus) -> Study:
    if (folder / STUDY).exists():
        return Study.read(folder)
    return Study(folder=folder, corpus_digest=corpus.digest, plans=[], cells=[], hypotheses=[])


def _parse(budgets: Sequence[float], variants: Sequence[str], sizes: int, centre: float | None) -> list[Variant]:
    """Check budgets, sizes and centre, and read the variants; one that is named twice is planned once."""
    for budget in budgets:
        if not is_number(budget) or not 0 < budget < math.inf:
            raise ValueError(f"a budget must be a positive number of FLOPs, not {budget!r}")
    if not budgets or not variants:
        raise ValueError(f"a study needs at least one of {'variants' if budgets else 'budgets'}")
    check_integer("sizes", sizes, minimum=1)
    if centre is not None and (not is_number(centre) or not 0 < centre < math.inf):
        raise ValueError(f"centre must be a positive number of FLOPs, not {centre!r}")
    by_name: dict[str, Variant] = {}
    for text in variants:
        variant = parse_variant(text.strip())
        by_name[variant.name] = variant
    return list(by_name.values())


def _list_seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        check_integer("seeds", seeds, minimum=1)
        return list(range(seeds))
    for seed in seeds:
        check_integer("seeds", seed, minimum=0)
    if not seeds:
        raise ValueError("seeds must be a number of at least 1, or a list of seeds")
    return list(dict.fromkeys(seeds))


def _check_text(corpus: Corpus, common: TrainConfig) -> None:
    """Refuse a text whose held-out parts are shorter than a window."""
    check_windows(corpus, common)
    if not len(corpus.test.windows(common.context)):
        raise ValueError(
            f"test={common.test} of corpus {corpus.name!r} is less than one window of context={common.context}: a "
            "study holds text out to the end; raise --test"
        )


def _check_common(old: Study, common: TrainConfig) -> None:
    """Refuse settings that differ from those of earlier cells: losses compare only on the same text and schedule."""
    for cell in old.cells:
        own_settings = parse_variant(cell.variant).training
        may_differ = {*NOT_COMMON, *MAY_DIFFER, *own_settings, "learning_rate", "log_every"}
        for name, value in common.to_dict().items():
            if name not in may_differ and cell.settings.get(name, value) != value:
                raise ValueError(
                    f"the study in {str(old.folder)!r} has {name}={cell.settings[name]!r}, not {value!r}: choose "
                    "another --out"
                )


def _cells(request: _Request, corpus: Corpus) -> list[Cell]:
    """Make the cells of all budgets, variants, sizes and seeds."""
    rungs = ladder(request.sizes)
    cells = []
    for budget, variant in itertools.product(request.budgets, request.variants):
        centre = request.centre or CENTRE * math.sqrt(budget / CENTRE_BUDGET)
        goals = [centre * rung for rung in rungs]
        shapes = shapes_near(goals, centre, variant, request.common, len(corpus.tokenizer))
        for shape, rung in zip(shapes, rungs, strict=True):
            cells += _cells_of_shape(request, corpus, budget, variant, shape, rung)
    return cells


def _cells_of_shape(
    request: _Request, corpus: Corpus, budget: float, variant: Variant, shape: Shape, rung: float
) -> list[Cell]:
    """Make the cells of one size, one for each seed. Their expected time is not known yet."""
    layers, width = shape
    config = _config(request.common, variant, budget, shape)
    with torch.device("meta"):  # shapes are enough to count FLOPs
        model = make_model(config, len(corpus.tokenizer))
    course = schedule.plan(model, config)
    if not request.has_log_every:
        config = replace(config, log_every=max(1, course.steps // NUM_LINES))
    num_windows = len(corpus.train.windows(config.context))
    cells = []
    for seed in request.seeds:
        cell = Cell(
            name=f"{short(budget)}/{variant.name.replace(':', ',')}/{layers}x{width}/seed{seed}",
            budget=budget,
            variant=variant.name,
            seed=seed,
            rung=rung,
            settings=_with_seed(config, seed).to_dict(),
            parameters=model.num_parameters(),
            flops_per_token=count_flops(model, config.context).total / config.context,
            steps=course.steps,
            flops=course.flops,
            epochs=course.steps * config.batch_size / num_windows,
            seconds=0.0,
        )
        cells.append(cell)
    return cells


def _config(common: TrainConfig, variant: Variant, budget: float, shape: Shape) -> TrainConfig:
    """Complete the common settings by those of the variant, the budget and the shape."""
    layers, width = shape
    settings = common.to_dict() | variant.training
    settings |= {"steps": None, "flops": budget, "depth": variant.depth}  # the budget decides the steps
    settings |= {"layers": layers, "width": width, "heads": default_heads(width)}
    config = TrainConfig.from_dict(settings)
    return replace(config, learning_rate=config.learning_rate or default_learning_rate(config))


def _with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """Give a run its seed. The noise of random routing has the same one: it is a part of chance."""
    depth = config.depth
    if depth is not None and schemes.uses_noise(depth.scheme):
        depth = replace(depth, seed=seed)
    return replace(config, seed=seed, depth=depth)


def _added(old: list[Cell], new: list[Cell]) -> list[Cell]:
    """List the new cells that are not planned yet.

    A curve has one number of layers, and the cells of one size share all settings but the seed.
    """
    layers = {(cell.budget, cell.variant): cell.settings["layers"] for cell in old}
    points = {(cell.budget, cell.variant, cell.shape): cell for cell in old}
    for cell in new:
        before = layers.get((cell.budget, cell.variant), cell.settings["layers"])
        if before != cell.settings["layers"]:
            raise ValueError(
                f"the curve of {cell.variant!r} at {short(cell.budget)} is planned with {before} layers, not "
                f"{cell.settings['layers']}: choose another --centre or --out"
            )
        planned = _settings_of_point(points.get((cell.budget, cell.variant, cell.shape), cell))
        for name, value in _settings_of_point(cell).items():
            if planned.get(name, value) != value:  # an older version may not have had the setting
                raise ValueError(
                    f"{cell.variant!r} of {cell.shape} at {short(cell.budget)} is planned already with "
                    f"{name}={planned[name]!r}, not {value!r}: choose another --out"
                )
    old_names = {cell.name for cell in old}
    return [cell for cell in new if cell.name not in old_names]


def _settings_of_point(cell: Cell) -> dict[str, Any]:
    """Select the settings on which the losses of a cell depend, apart from chance."""
    ignored = {*MAY_DIFFER, "seed", "log_every"}
    settings = {name: value for name, value in cell.settings.items() if name not in ignored}
    if settings["depth"] is not None:
        settings["depth"] = {**settings["depth"], "seed": None}  # of random routing
    return settings


def _timed(cells: list[Cell], corpus: Corpus, tell: Callable[[str], None]) -> list[Cell]:
    """Give each cell the seconds that it is expected to take. A shape is measured once."""
    seconds: dict[tuple[str, str], float] = {}
    timed_cells = []
    for cell in cells:
        key = (cell.variant, cell.shape)
        if key not in seconds:
            tell(f"timing {cell.variant} {cell.shape}")
            seconds[key] = seconds_per_step(TrainConfig.from_dict(cell.settings), len(corpus.tokenizer))
        num_steps = cell.steps + steps_of_evaluation(cell, corpus)
        timed_cells.append(replace(cell, seconds=num_steps * seconds[key]))
    return timed_cells
