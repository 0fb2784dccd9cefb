"""Speed next to quality: the best dense and the best routed model of each budget of a study.

Training: a step of the study's batch on one core, compiled as its cells are, times the steps of the run. Decoding:
transformers' own generate() on the trained models, from 64 bytes of validation text, 128 new tokens sampled, without
the prompt's time. Models take turns; medians, with the spread of the ratios. And whether two cells side by side, on one
core each, beat one after the other on two.

    python benchmarks/study.py STUDY
    python benchmarks/study.py STUDY --workers
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe, header, row

PROMPT, NEW_TOKENS, STEPS, VOCABULARY = 64, 128, 60, 256


def best_cells(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """For each budget, a cell of the best dense and of the best learned size whose weights are there."""
    from mixdepth.isoflop import Study

    study, curves = Study.read(folder), json.loads((folder / "fit.json").read_text())["curves"]
    found = []
    for budget in dict.fromkeys(curve["budget"] for curve in curves):
        here = [curve for curve in curves if curve["budget"] == budget and not curve["variant"].startswith("random")]
        kinds = {"dense": [], "routed": []}
        for curve in here:
            kinds["dense" if curve["variant"].startswith("dense") else "routed"].append(curve)
        pair = {}
        for kind, group in kinds.items():
            if group:
                curve = min(group, key=lambda curve: curve["best"]["loss"])
                key = (budget, curve["variant"], curve["best"]["shape"])
                same = [cell for cell in study.cells if (cell.budget, cell.variant, cell.shape) == key]
                trained = [cell for cell in same if any(study.run_of(cell).folder.glob("*.safetensors"))]
                if trained:
                    pair[kind] = (trained[0], curve["best"]["loss"])
                else:
                    print(f"the weights of {same[0].name} are gone: train it again", file=sys.stderr)
        if len(pair) == 2:
            found.append((budget, pair))
    if not found:
        sys.exit(2)
    return found


def stepper(cell: Any) -> Any:
    """A function that takes a training step of the cell."""
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
        cells = {kind: cell for kind, (cell, _) in pair.items()}
        seconds = interleave({kind: stepper(cell) for kind, cell in cells.items()}, repeats * 5)
        minutes = {kind: Spread.of(seconds[kind]).median * cells[kind].steps / 60 for kind in cells}
        models = {kind: mixdepth.load(str(study.run_of(cell).folder)).model for kind, cell in cells.items()}
        text = corpus_of(mixdepth.TrainConfig.from_dict(cells["dense"].settings)).validation.windows(PROMPT)
        for batch in (1, 8):
            prompt = torch.stack([text[index] for index in range(batch)])
            texts = decode_in_turns(models, prompt, NEW_TOKENS, repeats, same_text=False, top_k=0)
            speeds = {kind: [text.tokens_per_second for text in found] for kind, found in texts.items()}
            speed_up = Spread.of_ratios(speeds["routed"], speeds["dense"])
            for kind, (cell, loss) in pair.items():
                ratio = f"{speed_up:.2f}" if kind == "routed" else ""
                name = f"{cell.variant} {cell.shape}"
                values = [f"{budget:.0e}", name, f"{loss:.4f}", f"{minutes[kind]:.1f}", batch]
                row(*values, f"{Spread.of(speeds[kind]).median:.0f}", ratio, f"{texts[kind][-1].cache.held / 1024:.0f}")


def workers(folder: Path, repeats: int) -> None:
    """Two cells of 60 steps: side by side on one core each, against one after the other on two."""
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
            name = f"{budget:.0e} {kind} {pair[kind][0].shape}"
            row(name, f"{both:.2f}", f"{turns:.2f}", f"{Spread.of_ratios(times['both'], times['turns']):.2f}")


def take_steps(folder: Path, index: int) -> None:
    """Print how long 60 steps take, after five."""
    pairs = [cell for _, pair in best_cells(folder) for cell, _ in pair.values()]
    step = stepper(pairs[index])
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
