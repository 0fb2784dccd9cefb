"""Plan a study: ladders of sizes around the optimum of each budget, steps from exact FLOPs, and the claims to test.

A ladder's rungs are FLOPs of a forward pass, half an octave apart, around a centre that grows with the root of the
budget. A variant's layers follow from its width per layer (`aspect`) at the centre: a routed model has twice the layers
of the dense model of its FLOPs, not more width. Along a ladder the width alone changes.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from mixdepth.config import check_integer, is_number
from mixdepth.data.corpus import Corpus
from mixdepth.data.sources import absolute, absolute_tokenizer
from mixdepth.files import writing
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.isoflop.hypotheses import hypotheses
from mixdepth.isoflop.ladder import ladder, shapes_near
from mixdepth.isoflop.study import FITS, STUDY, Cell, Study
from mixdepth.isoflop.variants import Variant, parse_variant
from mixdepth.machine import one_thread
from mixdepth.models.flops import count_flops
from mixdepth.models.fresh import make_model
from mixdepth.models.shape import default_heads
from mixdepth.modes import update_routers
from mixdepth.runs.run import corpus_of
from mixdepth.runs.settings import MAY_DIFFER, NOT_COMMON, STUDY_DEFAULTS, TrainConfig
from mixdepth.text import columns, short
from mixdepth.training import schedule
from mixdepth.training.job import check_windows
from mixdepth.training.schedule import default_learning_rate

CENTRE = 5.5e5
"""FLOPs of a forward pass, for each token, of the best models at 1e13 training FLOPs: LOG.md, section 5."""
CENTRE_BUDGET = 1e13
LINES = 200
"""Lines of metrics.jsonl that a cell writes, unless told otherwise."""


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
    """Write a study's plan to the folder `out`, or add to the one that is there.

    `budgets` are training FLOPs, `variants` as in `parse_variant`; seeds are a number or a list. A ladder has `sizes`
    rungs around `centre`, in FLOPs of a forward pass for each token (by default a rule for text in bytes). `goal` is
    the gain over dense models that is aimed at, as a share of the loss. The other settings are those of `TrainConfig`,
    the same for all cells. Cells that are there already stay as they are.
    """
    known = [field.name for field in fields(TrainConfig) if field.name not in NOT_COMMON]
    wrong = [name for name in settings if name not in known]
    if wrong:
        raise ValueError(f"a study's runs have no common setting {wrong[0]!r}; there are {', '.join(known)}")
    parsed = _parsed(budgets, variants, sizes, centre)
    if not is_number(goal) or not 0 <= goal < 1:
        raise ValueError(f"goal must be a share of the loss in [0, 1), not {goal!r}")
    seeds = _seeds(seeds)
    common = TrainConfig.from_dict({"steps": 1, "depth": None, **STUDY_DEFAULTS, **settings})
    common = replace(common, corpus=absolute(common.corpus), tokenizer=absolute_tokenizer(common.tokenizer))
    corpus = corpus_of(common)
    _check_text(corpus, common)
    folder = Path(out)
    if (folder / FITS["test"]).exists():
        raise ValueError(f"the test text of the study in {str(out)!r} has been opened: choose another --out")
    new = []
    for budget, variant in itertools.product(dict.fromkeys(map(float, budgets)), parsed):
        middle = centre or CENTRE * math.sqrt(budget / CENTRE_BUDGET)
        new += _cells(budget, variant, ladder(sizes), middle, seeds, common, corpus, "log_every" in settings)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        old = Study.read(folder) if (folder / STUDY).exists() else Study(folder, corpus.digest, [], [], [])
        if old.corpus_digest != corpus.digest:
            raise ValueError(
                f"the study in {str(out)!r} is on another text than {common.corpus!r}: choose another --out"
            )
        _check_common(old, common)
        added = _timed(_added(old.cells, new), corpus, tell)
        asked = {"budgets": list(budgets), "variants": list(variants), "seeds": seeds, "sizes": sizes, "goal": goal}
        asked |= {"centre": centre, "finished_before": sum(map(old.is_finished, old.cells)), **settings}
        study = old._replace(plans=[*old.plans, asked], cells=[*old.cells, *added])
        study = study._replace(hypotheses=hypotheses(study, [variant.name for variant in parsed], goal))
        with writing(folder):
            study.write()
    return study


def _parsed(budgets: Sequence[float], variants: Sequence[str], sizes: int, centre: float | None) -> list[Variant]:
    for budget in budgets:
        if not is_number(budget) or not 0 < budget < math.inf:
            raise ValueError(f"a budget must be a positive number of FLOPs, not {budget!r}")
    if not budgets or not variants:
        raise ValueError(f"a study needs at least one of {'variants' if budgets else 'budgets'}")
    check_integer("sizes", sizes, minimum=1)
    if centre is not None and (not is_number(centre) or not 0 < centre < math.inf):
        raise ValueError(f"centre must be a positive number of FLOPs, not {centre!r}")
    parsed = {variant.name: variant for variant in (parse_variant(text.strip()) for text in variants)}
    return list(parsed.values())


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        check_integer("seeds", seeds, minimum=1)
        return list(range(seeds))
    for seed in seeds:
        check_integer("seeds", seed, minimum=0)
    if not seeds:
        raise ValueError("seeds must be a number of at least 1, or a list of seeds")
    return list(dict.fromkeys(seeds))


def _check_text(corpus: Corpus, common: TrainConfig) -> None:
    check_windows(corpus, common)
    if not len(corpus.test.windows(common.context)):
        raise ValueError(
            f"test={common.test} of corpus {corpus.name!r} is less than one window of context={common.context}: a "
            "study holds text out to the end; raise --test"
        )


def _check_common(old: Study, common: TrainConfig) -> None:
    """Losses compare only between cells that share text, context and schedule."""
    for cell in old.cells:
        may_differ = (*NOT_COMMON, *MAY_DIFFER, *parse_variant(cell.variant).training, "learning_rate", "log_every")
        for name, value in common.to_dict().items():
            if name not in may_differ and cell.settings.get(name, value) != value:
                raise ValueError(
                    f"the study in {str(old.folder)!r} has {name}={cell.settings[name]!r}, not {value!r}: choose "
                    "another --out"
                )


def _cells(
    budget: float,
    variant: Variant,
    rungs: Sequence[float],
    middle: float,
    seeds: Sequence[int],
    common: TrainConfig,
    corpus: Corpus,
    keeps_lines: bool,
) -> list[Cell]:
    vocab_size = len(corpus.tokenizer)
    cells = []
    shapes = shapes_near([middle * rung for rung in rungs], middle, variant, common, vocab_size)
    for (layers, width), rung in zip(shapes, rungs, strict=True):
        config = _config(common, variant, budget, layers, width)
        with torch.device("meta"):
            model = make_model(config, vocab_size)
        course = schedule.plan(model, config)
        if not keeps_lines:
            config = replace(config, log_every=max(1, course.steps // LINES))
        flops_per_token = count_flops(model, config.context).total / config.context
        epochs = course.steps * config.batch_size / len(corpus.train.windows(config.context))
        cost = (model.num_parameters(), flops_per_token, course.steps, course.flops, epochs, 0.0)
        for seed in seeds:
            depth = config.depth
            if depth is not None and depth.scheme == "random":
                depth = replace(depth, seed=seed)  # of its noise
            about = replace(config, seed=seed, depth=depth).to_dict()
            name = f"{short(budget)}/{variant.name.replace(':', ',')}/{layers}x{width}/seed{seed}"
            cells.append(Cell(name, budget, variant.name, seed, rung, about, *cost))
    return cells


def _config(common: TrainConfig, variant: Variant, budget: float, layers: int, width: int) -> TrainConfig:
    settings = {**common.to_dict(), **variant.training, "steps": None, "flops": budget, "depth": variant.depth}
    config = TrainConfig.from_dict(settings | {"layers": layers, "width": width, "heads": default_heads(width)})
    return replace(config, learning_rate=config.learning_rate or default_learning_rate(config))


def _added(old: list[Cell], new: list[Cell]) -> list[Cell]:
    """Those that are not there yet. A curve has one depth, and a point on it one of all settings but the seed."""
    layers = {(cell.budget, cell.variant): cell.settings["layers"] for cell in old}
    points = {(cell.budget, cell.variant, cell.shape): cell for cell in old}
    for cell in new:
        before = layers.get((cell.budget, cell.variant), cell.settings["layers"])
        if before != cell.settings["layers"]:
            raise ValueError(
                f"the curve of {cell.variant!r} at {short(cell.budget)} is planned with {before} layers, not "
                f"{cell.settings['layers']}: choose another --centre or --out"
            )
        planned = _of_a_point(points.get((cell.budget, cell.variant, cell.shape), cell))
        for name, value in _of_a_point(cell).items():
            if planned.get(name, value) != value:  # an older version may not know it
                raise ValueError(
                    f"{cell.variant!r} of {cell.shape} at {short(cell.budget)} is planned already with "
                    f"{name}={planned[name]!r}, not {value!r}: choose another --out"
                )
    known = {cell.name for cell in old}
    return [cell for cell in new if cell.name not in known]


def _of_a_point(cell: Cell) -> dict[str, Any]:
    """The settings that its losses depend on, but for chance."""
    settings = {name: value for name, value in cell.settings.items() if name not in (*MAY_DIFFER, "seed", "log_every")}
    return settings if settings["depth"] is None else {**settings, "depth": {**settings["depth"], "seed": None}}


def _timed(cells: list[Cell], corpus: Corpus, tell: Callable[[str], None]) -> list[Cell]:
    """With the seconds that each is expected to take."""
    times: dict[tuple[str, str], float] = {}
    for cell in cells:
        key = (cell.variant, cell.shape)
        if key not in times:
            tell(f"timing {cell.variant} {cell.shape}")
            times[key] = seconds_per_step(TrainConfig.from_dict(cell.settings), len(corpus.tokenizer))
    return [
        cell._replace(seconds=(cell.steps + steps_of_evaluation(cell, corpus)) * times[cell.variant, cell.shape])
        for cell in cells
    ]


def seconds_per_step(config: TrainConfig, vocab_size: int, repeats: int = 5) -> float:
    """Of a training step on one core, or on the accelerator, without compilation: the median of a few."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = make_model(config, vocab_size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(vocab_size, (config.batch_size, config.context), device=device)
    times = []
    with one_thread():
        for _ in range(repeats + 2):
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(model, RoutedCausalLM):
                update_routers(model)
            loss.item()  # waits for the device
            times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def steps_of_evaluation(cell: Cell, corpus: Corpus) -> float:
    """What its end costs, in training steps: passes over both held-out texts, of routed models with look-ahead too."""
    context = cell.settings["context"]
    sides = [side.windows(context).spread(cell.settings["eval_windows"]) for side in (corpus.validation, corpus.test)]
    passes = sum(map(len, sides)) * (1 if cell.settings["depth"] is None else 2)
    batch_size: int = cell.settings["batch_size"]
    return passes / (3 * batch_size)  # a step is three passes of its batch


def table(study: Study, workers: int) -> str:
    """The plan as a table, one line for each variant and size."""
    rows = [["budget", "variant", "layers x width", "parameters", "FLOPs/token", "rate", "steps", "epochs"]]
    rows[0] += ["seeds", "minutes"]
    groups: dict[tuple[float, str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.budget, cell.variant, cell.shape), []).append(cell)
    for (budget, variant, _), cells in groups.items():
        cell = cells[0]
        layers, width, rate = (cell.settings[name] for name in ("layers", "width", "learning_rate"))
        row = [short(budget), variant, f"{layers} x {width}", f"{cell.parameters:,}", f"{cell.flops_per_token:,.0f}"]
        row += [f"{rate:.2g}", f"{cell.steps:,}", f"{cell.epochs:.2f}", f"{len(cells)}", f"{cell.seconds / 60:.1f}"]
        rows.append(row)
    repeated = sorted({cell.variant for cell in study.cells if cell.epochs > 1})
    done = sum(study.is_finished(cell) for cell in study.cells)
    left = sum(cell.seconds for cell in study.cells if not study.is_finished(cell))
    lines = [
        columns(rows, left=(1,)),
        f"{len(study.cells)} runs of {sum(cell.flops for cell in study.cells):.3g} FLOPs in all, {done} finished; "
        f"about {left / 3600 / workers:.1f} hours for the rest with {workers} side by side, one core each",
    ]
    if repeated:
        lines.append(f"note: {', '.join(repeated)} read some text more than once (epochs above 1)")
    return "\n".join(lines)
