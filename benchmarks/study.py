"""Speed and quality: the best dense and the best routed model of each budget of a study.

Training: a step of the study's batch on one core, compiled as its cells are, times the steps of the run.
Decoding: transformers' own generate() on the trained models, from 64 bytes of validation text, 128 new tokens sampled;
the time of the prompt is not counted. Models take turns; the numbers are medians, with the spread of the ratios.
`--workers` measures whether two cells at the same time, on one core each, beat one after the other on two cores.

    python benchmarks/study.py STUDY
    python benchmarks/study.py STUDY --workers
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from machine import describe, header, row

PROMPT, NEW_TOKENS, STEPS, VOCABULARY = 64, 128, 60, 256


class Best(NamedTuple):
    """A cell of the best size of a kind of model, and the mean loss of that size."""

    cell: Any
    loss: float


def best_cells(folder: Path) -> list[tuple[float, dict[str, Best]]]:
    """Find for each budget a cell of the best dense and of the best learned size that has its weights."""
    from mixdepth.isoflop import Study
    from mixdepth.isoflop.results import read_curves

    study = Study.read(folder)
    curves = read_curves(folder / "fit.json", f"mixdepth isoflop fit {folder} makes it again")
    pairs = []
    for budget in dict.fromkeys(curve.budget for curve in curves):
        # 1. The curves of this budget, by kind; random routing is a control and not a competitor.
        kinds: dict[str, list[Any]] = {"dense": [], "routed": []}
        for curve in curves:
            if curve.budget == budget and not curve.variant.startswith("random"):
                kinds["dense" if curve.variant.startswith("dense") else "routed"].append(curve)
        # 2. The best size of each kind, and one of its cells.
        pair = {}
        for kind, group in kinds.items():
            if group:
                best = trained_cell(study, min(group, key=lambda curve: curve.best.loss))
                if best is not None:
                    pair[kind] = best
        if len(pair) == 2:
            pairs.append((budget, pair))
    if not pairs:
        sys.exit(2)
    return pairs


def trained_cell(study: Any, curve: Any) -> Best | None:
    """Find a cell of the best size of a curve whose weights are there."""
    names = []
    for cell in study.cells:
        if (cell.budget, cell.variant, cell.shape) == (curve.budget, curve.variant, curve.best.shape):
            names.append(cell.name)
            if any(study.run_of(cell).folder.glob("*.safetensors")):
                return Best(cell, curve.best.loss)
    print(f"the weights of {names[0]} are gone: delete its line in cells.jsonl and run the study", file=sys.stderr)
    return None


def stepper(cell: Any) -> Any:
    """Make a function that takes a training step of the cell."""
    import torch

    import mixdepth
    from mixdepth.models.fresh import make_model

    config = mixdepth.TrainConfig.from_dict(cell.settings)
    model = make_model(config, VOCABULARY).train()
    compiled = torch.compile(model) if config.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(VOCABULARY, (config.batch_size, config.context))

    def step() -> None:
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if config.depth is not None:
            mixdepth.update_routers(model)

    return step


def compare(folder: Path, repeats: int) -> None:
    """Print the loss and the speeds of the best models."""
    import torch

    import mixdepth
    from mixdepth.bench import Spread, decode_in_turns, interleave
    from mixdepth.isoflop import Study
    from mixdepth.runs.run import corpus_of

    torch.set_num_threads(1)
    print(describe())
    study = Study.read(folder)
    header("budget", "model", "loss", "training, minutes", "batch", "decode tokens/s", "routed / dense", "cache, KiB")
    for budget, pair in best_cells(folder):
        cells = {kind: best.cell for kind, best in pair.items()}
        seconds = interleave({kind: stepper(cell) for kind, cell in cells.items()}, repeats * 5)
        minutes = {kind: Spread.of(seconds[kind]).median * cells[kind].steps / 60 for kind in cells}
        models = {kind: mixdepth.load(str(study.run_of(cell).folder)).model for kind, cell in cells.items()}
        text = corpus_of(mixdepth.TrainConfig.from_dict(cells["dense"].settings)).validation.windows(PROMPT)
        for batch in (1, 8):
            prompt = torch.stack([text[index] for index in range(batch)])
            texts = decode_in_turns(models, prompt, NEW_TOKENS, repeats, same_text=False, top_k=0)
            speeds = {kind: [text.tokens_per_second for text in answers] for kind, answers in texts.items()}
            speed_up = Spread.of_ratios(speeds["routed"], speeds["dense"])
            for kind, best in pair.items():
                row(
                    f"{budget:.0e}",
                    f"{best.cell.variant} {best.cell.shape}",
                    f"{best.loss:.4f}",
                    f"{minutes[kind]:.1f}",
                    batch,
                    f"{Spread.of(speeds[kind]).median:.0f}",
                    f"{speed_up:.2f}" if kind == "routed" else "",
                    f"{texts[kind][-1].cache.held / 1024:.0f}",
                )


def workers(folder: Path, repeats: int) -> None:
    """Time two cells of 60 steps: at the same time on one core each, and one after the other on two cores."""
    from mixdepth.bench import Spread

    def start(index: int, threads: int) -> subprocess.Popen:
        command = [sys.executable, __file__, str(folder), "--steps", str(index)]
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, text=True
        )

    def seconds(process: subprocess.Popen) -> float:
        return float(process.communicate()[0].split()[-1])

    print(describe())
    header("cell", "side by side, s", "one after the other, s", "ratio")
    for index, (budget, pair) in enumerate(best_cells(folder)):
        for offset, kind in enumerate(pair):
            times: dict[str, list[float]] = {"both": [], "turns": []}
            for _ in range(repeats):
                both = [start(2 * index + offset, 1) for _ in range(2)]
                times["both"].append(max(map(seconds, both)))
                times["turns"].append(2 * seconds(start(2 * index + offset, 2)))
            both, turns = (Spread.of(times[name]).median for name in ("both", "turns"))
            name = f"{budget:.0e} {kind} {pair[kind].cell.shape}"
            row(name, f"{both:.2f}", f"{turns:.2f}", f"{Spread.of_ratios(times['both'], times['turns']):.2f}")


def take_steps(folder: Path, index: int) -> None:
    """Print how long 60 steps take, after five that are not counted."""
    cells = []
    for _, pair in best_cells(folder):
        cells += [best.cell for best in pair.values()]
    step = stepper(cells[index])
    for _ in range(5):
        step()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", action="store_true", help="measure whether cells side by side are faster")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps is not None:
        take_steps(options.study, options.steps)
    else:
        (workers if options.workers else compare)(options.study, options.repeats)
