"""Plan a study: ladders of sizes around the optimum of each budget, steps from exact FLOPs, and the claims to test.

A ladder's rungs are FLOPs of a forward pass, half an octave apart, around a centre that grows with the root of the
budget. Each variant has the shape that comes nearest to a rung and to its width per layer (`aspect`): a routed model
has twice the layers of the dense model of its rung, not more width.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from mixdepth import schedule
from mixdepth.config import DepthConfig, check_integer, is_number
from mixdepth.flops import count_flops
from mixdepth.hf import RoutedCausalLM
from mixdepth.isoflop.study import STUDY, Cell, Hypothesis, Study, short
from mixdepth.isoflop.table import columns
from mixdepth.isoflop.variants import DENSE, Variant, parse_variant
from mixdepth.router import update_routers
from mixdepth.settings import PLANNED, STUDY_DEFAULTS, TrainConfig
from mixdepth.sources import absolute
from mixdepth.training import check_windows, corpus_of, default_learning_rate, make_model

CENTRE = 4.5e5
"""FLOPs of a forward pass, for each token, of the best models at 1e13 training FLOPs: LOG.md, section 5."""
CENTRE_BUDGET = 1e13
OCTAVE = 0.5
"""Between two rungs, in octaves of FLOPs."""
ASPECT_WEIGHT = 0.25
"""What an octave from the aspect counts, against an octave from the rung."""
LINES = 200
"""Lines of metrics.jsonl that a cell writes, unless told otherwise."""
LOSS_GOAL, EQUAL = 0.015, 0.003
"""The gain over the dense model that we aim at, and what we call equal, as shares of the loss."""


def plan(
    out: str | Path,
    *,
    budgets: Sequence[float],
    variants: Sequence[str],
    seeds: int | Sequence[int] = 3,
    sizes: int = 5,
    centre: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Study:
    """Write a study's plan to the folder `out`, or add to the one that is there.

    `budgets` are training FLOPs, `variants` as in `parse_variant`; seeds are a number or a list. A ladder has `sizes`
    rungs around `centre`, in FLOPs of a forward pass for each token (by default a rule for text in bytes). The other
    settings are those of `TrainConfig`, the same for all cells. Cells that are there already stay as they are.
    """
    known = [field.name for field in fields(TrainConfig) if field.name not in PLANNED]
    wrong = [name for name in settings if name not in known]
    if wrong:
        raise ValueError(f"a study's runs have no common setting {wrong[0]!r}; there are {', '.join(known)}")
    parsed = _checked(budgets, variants, sizes, centre)
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    if not seeds:
        raise ValueError("seeds must be a number of at least 1, or a list")
    common = TrainConfig.from_dict({"steps": 1, "depth": None, **STUDY_DEFAULTS, **settings})
    common = replace(common, corpus=absolute(common.corpus))
    corpus = corpus_of(common)
    check_windows(corpus, common)
    old = Study.read(out) if (Path(out) / STUDY).exists() else Study(Path(out), corpus.digest, [], [], [])
    if old.corpus_digest != corpus.digest:
        raise ValueError(f"the study in {str(out)!r} is on another text than {common.corpus!r}: choose another --out")
    num_windows = len(corpus.train.windows(common.context))
    vocab_size = len(corpus.tokenizer)

    found: list[Cell] = []
    for budget, variant in itertools.product(budgets, parsed):
        middle = centre or CENTRE * math.sqrt(budget / CENTRE_BUDGET)
        rungs = ladder(sizes)
        shapes = shapes_near([middle * rung for rung in rungs], variant, common, vocab_size)
        for (layers, width), rung in zip(shapes, rungs, strict=True):
            config = _config(common, variant, budget, layers, width)
            if "log_every" not in settings:
                config = _with_lines(config, vocab_size)
            with torch.device("meta"):
                model = make_model(config, vocab_size)
            course = schedule.plan(model, config)
            tell(f"timing {variant.name}, {layers} layers of width {width}")
            seconds = course.steps * seconds_per_step(config, vocab_size)
            for seed in seeds:
                name = f"{short(budget)}/{_folder(variant.name)}/{layers}x{width}/seed{seed}"
                about = replace(config, seed=seed).to_dict()
                tokens = count_flops(model, config.context).total / config.context
                epochs = course.steps * config.batch_size / num_windows
                size = model.num_parameters()
                cost = (size, tokens, course.steps, course.flops, epochs, seconds)
                found.append(Cell(name, budget, variant.name, seed, rung, about, *cost))
    _check_same(old, found)
    asked = {"budgets": list(budgets), "variants": list(variants), "seeds": list(seeds), "sizes": sizes}
    asked |= {"centre": centre, **settings, "threads": torch.get_num_threads()}
    study = old._replace(
        plans=[*old.plans, asked],
        cells=_merged(old.cells, found, key=lambda cell: cell.name),
        hypotheses=_merged(old.hypotheses, _hypotheses(old, found, parsed), key=lambda claim: claim.name),
    )
    study.write()
    return study


def _checked(budgets: Sequence[float], variants: Sequence[str], sizes: int, centre: float | None) -> list[Variant]:
    for budget in budgets:
        if not is_number(budget) or not 0 < budget < math.inf:
            raise ValueError(f"a budget must be a positive number of FLOPs, not {budget!r}")
    if not budgets or not variants:
        raise ValueError(f"a study needs at least one of {'variants' if budgets else 'budgets'}")
    check_integer("sizes", sizes, minimum=1)
    if centre is not None and (not is_number(centre) or not 0 < centre < math.inf):
        raise ValueError(f"centre must be a positive number of FLOPs, not {centre!r}")
    return [parse_variant(text) for text in dict.fromkeys(variants)]


def _merged(old: list[Any], new: list[Any], key: Callable[[Any], str]) -> list[Any]:
    """Both, those of `old` as they are."""
    known = {key(item) for item in old}
    return [*old, *(item for item in new if key(item) not in known)]


def _check_same(old: Study, found: list[Cell]) -> None:
    cells = {cell.name: cell for cell in old.cells}
    for cell in found:
        before = cells.get(cell.name, cell).settings
        for name, value in cell.settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"cell {cell.name!r} is planned already with {name}={before.get(name)!r}, not {value!r}: choose "
                    "another --out"
                )


def _config(common: TrainConfig, variant: Variant, budget: float, layers: int, width: int) -> TrainConfig:
    settings = {**common.to_dict(), **variant.training, "steps": None, "flops": budget}
    settings |= {"layers": layers, "width": width, "depth": variant.depth}
    config = TrainConfig.from_dict(settings)
    return replace(config, learning_rate=config.learning_rate or default_learning_rate(config))


def _with_lines(config: TrainConfig, vocab_size: int) -> TrainConfig:
    with torch.device("meta"):
        steps = schedule.plan(make_model(config, vocab_size), config).steps
    return replace(config, log_every=max(1, steps // LINES))


def _folder(variant: str) -> str:
    return variant.replace(":", ",")


def ladder(sizes: int) -> list[float]:
    """Multiples of the centre.

    >>> [round(rung, 2) for rung in ladder(3)]
    [0.71, 1.0, 1.41]
    """
    return [2 ** (OCTAVE * (i - (sizes - 1) / 2)) for i in range(sizes)]


def shapes_near(
    rungs: Sequence[float], variant: Variant, common: TrainConfig, vocab_size: int
) -> list[tuple[int, int]]:
    """For each of the rungs, in FLOPs of a forward pass for each token, the layers and width nearest to it and to the
    variant's aspect; no shape twice."""
    costs: dict[tuple[int, int], float] = {}
    for width in itertools.count(16, 16):
        period, logits = _cost(variant, common, width, vocab_size)
        if period + logits > 2 * max(rungs) and costs:
            break
        for number in range(1, max(1, math.ceil(2 * max(rungs) / period)) + 1):
            costs[number * variant.every, width] = number * period + logits
    chosen: list[tuple[int, int]] = []
    for rung in rungs:
        left = [shape for shape in costs if shape not in chosen]
        chosen.append(min(left, key=lambda shape: _distance(shape, costs[shape], rung, variant.aspect)))
    return chosen


def _distance(shape: tuple[int, int], cost: float, rung: float, aspect: float) -> float:
    """In octaves."""
    layers, width = shape
    return abs(math.log2(cost / rung)) + ASPECT_WEIGHT * abs(math.log2(width / layers / aspect))


def _cost(variant: Variant, common: TrainConfig, width: int, vocab_size: int) -> tuple[float, float]:
    """FLOPs for each token, of as many layers as the routing repeats after, and of the logits."""
    own = {**variant.training, "capacity_steps": 0, "depth": variant.depth}
    with torch.device("meta"):
        model = make_model(replace(common, **own, layers=variant.every, width=width), vocab_size)
        count = count_flops(model, common.context)
    logits = count.logits / common.context
    return count.total / common.context - logits, logits


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


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _hypotheses(old: Study, cells: list[Cell], variants: list[Variant]) -> list[Hypothesis]:
    """What the cells can test: the first learned variant against the dense model is the primary question."""
    claims = []
    learned = [v for v in variants if v.depth is not None and v.depth.scheme != "random"]
    for budget in dict.fromkeys(cell.budget for cell in cells):
        finished = sum(old.is_finished(cell) for cell in old.cells if cell.budget == budget)

        def claim(kind: str, variant: str, against: str, margin: float, primary: bool, words: str) -> Hypothesis:
            name = f"{short(budget)}: {variant} {kind} {against}"  # noqa: B023
            family = "primary" if primary else "exploratory"
            return Hypothesis(name, words, kind, budget, variant, against, margin, family, finished)  # noqa: B023

        for variant in learned:
            mine, first = variant.name, variant is learned[0]
            if any(v.name == DENSE for v in variants):
                words = f"the best {mine} has another loss than the best dense model; goal: {LOSS_GOAL:.1%} below"
                claims.append(claim("differs", mine, DENSE, LOSS_GOAL, first, words))
                words = f"the best {mine} has more parameters than the best dense model"
                claims.append(claim("larger", mine, DENSE, 0.0, first, words))
            words = f"causal routing costs {mine} less than {EQUAL:.1%} of its loss, or gains less"
            claims.append(claim("equivalent", mine, mine, EQUAL, first, words))
        for one, other in itertools.permutations([v for v in variants if v.depth is not None], 2):
            differing = _differing(one, other)
            if differing == "scheme" and other.depth and other.depth.scheme == "random":
                words = f"learned routing ({one.name}) has a lower loss than random routing ({other.name})"
                claims.append(claim("less", one.name, other.name, 0.0, True, words))
            elif differing == "every" and one.every > other.every:
                words = f"routing every {one.every} layers has a lower loss than every {other.every}"
                claims.append(claim("less", one.name, other.name, 0.0, False, words))
            elif differing not in (None, "scheme", "every") and variants.index(one) > variants.index(other):
                words = f"{one.name} has another loss than {other.name}"
                claims.append(claim("differs", one.name, other.name, 0.0, False, words))
    return claims


def _differing(one: Variant, other: Variant) -> str | None:
    """The one setting of the routing in which two variants differ; None if there is not exactly one."""
    if one.depth is None or other.depth is None or (one.training, one.aspect) != (other.training, other.aspect):
        return None
    names = [f.name for f in fields(DepthConfig) if getattr(one.depth, f.name) != getattr(other.depth, f.name)]
    return names[0] if len(names) == 1 else None


def table(study: Study, workers: int) -> str:
    """The plan as a table, one line for each variant and size."""
    head = [
        "budget",
        "variant",
        "layers x width",
        "parameters",
        "FLOPs/token",
        "rate",
        "steps",
        "epochs",
        "seeds",
        "minutes",
    ]
    rows = [head]
    groups: dict[tuple[float, str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.budget, cell.variant, cell.shape), []).append(cell)
    for (budget, variant, _), cells in groups.items():
        cell = cells[0]
        layers, width, rate = (cell.settings[name] for name in ("layers", "width", "learning_rate"))
        row = [short(budget), variant, f"{layers} x {width}", f"{cell.parameters:,}", f"{cell.flops_per_token:,.0f}"]
        row += [f"{rate:.2g}", f"{cell.steps:,}", f"{cell.epochs:.2f}", f"{len(cells)}", f"{cell.seconds / 60:.1f}"]
        rows.append(row)
    text = columns(rows, left=(1,))
    repeated = sorted({cell.variant for cell in study.cells if cell.epochs > 1})
    done = sum(study.is_finished(cell) for cell in study.cells)
    left = sum(cell.seconds for cell in study.cells if not study.is_finished(cell))
    lines = [
        text,
        f"{len(study.cells)} runs of {sum(cell.flops for cell in study.cells):.3g} FLOPs in all, {done} finished; "
        f"about {left / 3600 / workers:.1f} hours for the rest with {workers} side by side, one core each",
    ]
    if repeated:
        lines.append(f"note: {', '.join(repeated)} read some text more than once (epochs above 1)")
    return "\n".join(lines)
