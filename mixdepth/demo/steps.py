"""The demo: dense and routed models, trained with the same FLOPs on the standard library's source, side by side."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mixdepth.bench import Spread, measure_speed
from mixdepth.config import DepthConfig
from mixdepth.demo.summary import Column, summary, write_report
from mixdepth.evaluation.comparison import Comparison, evaluate_runs
from mixdepth.evaluation.tracing import Trace, trace_tokens
from mixdepth.files import read_json, write_json, writing
from mixdepth.machine import one_thread
from mixdepth.models.loading import load
from mixdepth.report.figures import check_matplotlib
from mixdepth.runs.run import Run, text_of
from mixdepth.sampling.generation import generate
from mixdepth.text import tell
from mixdepth.training.job import train

RESULTS, REPORT = "results.json", "report.html"
COMMON: dict[str, Any] = {"corpus": "stdlib", "batch_size": 4, "context": 256, "width": 64}
LAYERS = {"dense": 4, "shallow": 2, "routed": 4}
"""The same model unrouted, a dense one that costs about as much for each token, and the routed one."""
NAMES = {"dense": "dense", "shallow": "dense, shallow", "routed": "routed"}
OTHERS = ("dense", "shallow")
PROMPT = "def get_"
WINDOWS = 512
TRACED = 4 * COMMON["context"]


@one_thread()
def run(
    out: str | Path = "demo", flops: float = 2.5e12, capacity: float = 0.125, every: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Train the models, or go on where an earlier call was stopped; evaluate, time and weigh them; write the report.

    All is kept in the folder `out`, and what is there is not done again. Returns the numbers.
    """
    check_matplotlib()
    depth, folder = DepthConfig(capacity=capacity, every=every), Path(out)
    depth.routed_layers(LAYERS["routed"])  # says now what is wrong with them
    runs = {}
    for kind, layers in LAYERS.items():
        tell(f"training the {kind} model ({layers} layers, {flops:.3g} FLOPs)")
        settings = {**COMMON, "layers": layers, "depth": depth if kind == "routed" else None}
        settings |= {"flops": flops, "seed": seed}
        runs[kind] = train(folder / kind, **settings, log_every=20, eval_windows=64)
    results = _Results(folder / RESULTS, runs)
    results.once("comparison", partial(_compared, runs))
    for kind in OTHERS:
        results.once(f"speed against {kind}", partial(_timed, runs[kind], runs["routed"]))
    results.once("samples", partial(_sampled, runs))
    columns = [_column(kind, runs[kind], results.found) for kind in runs]
    print(summary(columns))
    print(f"\na sample of the routed model:\n{results.found['samples']['routed']}\n")
    verdict = [_verdict(kind, results.found) for kind in OTHERS]
    report = write_report(folder / REPORT, columns, verdict, results.found, list(runs.values()), traced(runs["routed"]))
    print("\n".join([*verdict, f"the report: {report}"]))
    return results.found


class _Results:
    """What was found so far of these runs, in a file that grows; what was found of others is forgotten."""

    def __init__(self, path: Path, runs: dict[str, Run]) -> None:
        self.path = path
        models = {kind: {"settings": run.settings.to_dict(), "result": run.result} for kind, run in runs.items()}
        self.found: dict[str, Any] = {"runs": json.loads(json.dumps(models))}
        if path.exists() and (before := read_json(path)).get("runs") == self.found["runs"]:
            self.found = before

    def once(self, name: str, make: Callable[[], Any]) -> None:
        if name not in self.found:
            self.found[name] = make()
            with writing(self.path):
                write_json(self.path, self.found)


def _compared(runs: dict[str, Run]) -> Any:
    tell("evaluating all, causally, on held-out text")
    found = evaluate_runs([str(run.folder) for run in runs.values()], windows=WINDOWS)
    entries = dict(zip(runs, found.entries, strict=True))
    differences = {}
    for kind in OTHERS:
        difference = Comparison(entries=[entries[kind], entries["routed"]]).difference(entries["routed"])
        assert difference is not None  # all are evaluated on the same windows
        differences[kind] = difference._asdict()
    return {**found.to_dict(), "routed_minus": differences}


def _timed(dense: Run, routed: Run) -> Any:
    tell(f"timing {routed.folder.name} against {dense.folder.name}: a training step, a prompt, decoding")
    speeds = measure_speed(
        load(str(dense.folder)).model,
        load(str(routed.folder)).model,
        torch.tensor(text_of(dense).validation.tokens[: 2**16].tolist()),
        prompts=(64,),
        new_tokens=64,
        train_batch_size=COMMON["batch_size"],
        train_context=COMMON["context"],
    )
    return {**speeds.to_dict(), "table": str(speeds)}


def _sampled(runs: dict[str, Run]) -> dict[str, str]:
    options: dict[str, Any] = {"max_new_tokens": 200, "do_sample": True, "temperature": 0.8, "seed": 0}
    texts = {kind: generate(str(run.folder), PROMPT, **options)[0] for kind, run in runs.items()}
    return {kind: text.prompt + text.completion for kind, text in texts.items()}


def traced(run: Run) -> Trace:
    """Where the tokens of some held-out text go."""
    model, tokenizer, *_ = load(str(run.folder))
    ids = text_of(run).validation.tokens[:TRACED].tolist()
    return trace_tokens(model, ids, tokenizer, context=COMMON["context"], name="the routed model")


def _verdict(kind: str, found: dict[str, Any]) -> str:
    """The routed model against another, in a sentence."""
    models = dict(zip(LAYERS, found["comparison"]["models"], strict=True))
    loss, other = models["routed"]["loss"], models[kind]["loss"]
    change = "{mean:+.4f} nats per byte, from {low:+.4f} to {high:+.4f} over windows"
    change = change.format(**found["comparison"]["routed_minus"][kind])
    rows = {(row["what"], row["batch_size"]): row for row in found[f"speed against {kind}"]["rows"]}
    cache = rows["decode", 1]["cache"]
    return (
        f"Against {NAMES[kind]} ({LAYERS[kind]} layers), with the same training FLOPs: the loss with causal routing is "
        f"{abs(loss / other - 1):.2%} {'lower' if loss < other else 'higher'} ({change}), one text is decoded at "
        f"{Spread(**rows['decode', 1]['speed_up']):.2f} times the speed, and its cache takes "
        f"{cache['routed'] / cache['dense']:.2f} times the bytes."
    )


def _column(kind: str, run: Run, found: dict[str, Any]) -> Column:
    """One model's numbers."""
    model = found["comparison"]["models"][[*LAYERS].index(kind)]
    measured = found["speed against shallow" if kind == "shallow" else "speed against dense"]["rows"]
    speeds = {(row["what"], row["batch_size"]): row for row in measured}
    side = "routed" if kind == "routed" else "dense"
    result = run.result
    assert result is not None
    return Column(
        name=f"{NAMES[kind]}, {LAYERS[kind]} layers",
        parameters=model["parameters"],
        flops=result["flops"],
        tokens=result["tokens"],
        flops_per_token=model["flops_per_token"],
        loss=model["loss"],
        lookahead_loss=model["lookahead_loss"],
        bits_per_byte=model["bits_per_byte"],
        difference=model["difference_to_first"],
        capacities=[layer["capacity"] for layer in model["layers"].values()],
        training=speeds["training step", COMMON["batch_size"]][side]["median"],
        decode={size: speeds["decode", size][side]["median"] for size in (1, 8)},
        cache_bytes=speeds["decode", 1]["cache"][side],
    )
