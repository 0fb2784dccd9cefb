"""The demo: train dense and routed models with the same FLOPs on the standard library's source, and compare them."""

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
from mixdepth.runs.run import Run
from mixdepth.sampling.generation import generate
from mixdepth.text import tell
from mixdepth.training.job import train

RESULTS = "results.json"
REPORT = "report.html"

COMMON: dict[str, Any] = {"corpus": "stdlib", "batch_size": 4, "context": 256, "width": 64}
"""Settings of training that all models share."""

LAYERS = {"dense": 4, "shallow": 2, "routed": 4}
"""The models and their layers. `dense` is the routed model without routing; `shallow` is a dense model that costs about
as much for each token as the routed one."""

NAMES = {"dense": "dense", "shallow": "dense, shallow", "routed": "routed"}

OTHERS = ("dense", "shallow")
"""The models that the routed one is compared with."""

PROMPT = "def get_"

NUM_WINDOWS = 512
"""How many windows of held-out text the models are evaluated on."""

NUM_TRACED_TOKENS = 4 * COMMON["context"]
"""How many tokens of held-out text the report shows the routes of."""


@one_thread()
def run(
    out: str | Path = "demo", flops: float = 2.5e12, capacity: float = 0.125, every: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Train the models, compare them, and write a report; return the numbers.

    The folder `out` keeps all results. A call resumes what an earlier call has left unfinished, and does nothing twice.
    """
    # 1. Check the settings before anything takes time.
    check_matplotlib()
    depth = DepthConfig(capacity=capacity, every=every)
    depth.routed_layers(LAYERS["routed"])  # refuses layers that the model does not have
    folder = Path(out)
    # 2. Train each model with the same FLOPs.
    runs = {}
    for kind, layers in LAYERS.items():
        tell(f"training the {kind} model ({layers} layers, {flops:.3g} FLOPs)")
        runs[kind] = train(
            folder / kind,
            **COMMON,
            layers=layers,
            depth=depth if kind == "routed" else None,
            flops=flops,
            seed=seed,
            log_every=20,
            eval_windows=64,
        )
    # 3. Evaluate them, time them, and sample from them.
    results = _Results(folder / RESULTS, runs)
    results.once("comparison", partial(_compare, runs))
    for kind in OTHERS:
        results.once(f"speed against {kind}", partial(_measure_speeds, runs[kind], runs["routed"]))
    results.once("samples", partial(_sample, runs))
    # 4. Print the results, and write the report.
    values = results.values
    models = [_column(kind, runs[kind], values) for kind in runs]
    verdict = [_verdict(kind, values) for kind in OTHERS]
    print(summary(models))
    print(f"\na sample of the routed model:\n{values['samples']['routed']}\n")
    report = write_report(folder / REPORT, models, verdict, values, list(runs.values()), traced(runs["routed"]))
    print("\n".join([*verdict, f"the report: {report}"]))
    return values


class _Results:
    """The results so far of these runs, in a file that grows. Results of other runs in that file are dropped."""

    def __init__(self, path: Path, runs: dict[str, Run]) -> None:
        self.path = path
        models = {kind: {"settings": run.settings.to_dict(), "result": run.result} for kind, run in runs.items()}
        as_in_file = json.loads(json.dumps(models))  # tuples are lists there
        self.values: dict[str, Any] = {"runs": as_in_file}
        if path.exists():
            earlier = read_json(path)
            if earlier.get("runs") == as_in_file:
                self.values = earlier

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """Make the result of this name, unless it is there already."""
        if name in self.values:
            return
        self.values[name] = make()
        with writing(self.path):
            write_json(self.path, self.values)


def _compare(runs: dict[str, Run]) -> dict[str, Any]:
    tell("evaluating all, causally, on held-out text")
    comparison = evaluate_runs([str(run.folder) for run in runs.values()], windows=NUM_WINDOWS)
    entries = dict(zip(runs, comparison.entries, strict=True))
    differences = {}
    for kind in OTHERS:
        pair = Comparison(entries=[entries[kind], entries["routed"]])
        difference = pair.difference(entries["routed"])
        assert difference is not None  # all are evaluated on the same windows
        differences[kind] = difference.to_dict()
    return {**comparison.to_dict(), "routed_minus": differences}


def _measure_speeds(dense: Run, routed: Run) -> dict[str, Any]:
    tell(f"timing {routed.folder.name} against {dense.folder.name}: a training step, a prompt, decoding")
    speeds = measure_speed(
        load(str(dense.folder)).model,
        load(str(routed.folder)).model,
        torch.tensor(dense.corpus().validation.tokens[: 2**16].tolist()),  # (tokens,)
        prompts=(64,),
        new_tokens=64,
        train_batch_size=COMMON["batch_size"],
        train_context=COMMON["context"],
    )
    return {**speeds.to_dict(), "table": str(speeds)}


def _sample(runs: dict[str, Run]) -> dict[str, str]:
    options: dict[str, Any] = {"max_new_tokens": 200, "do_sample": True, "temperature": 0.8, "seed": 0}
    samples = {}
    for kind, run in runs.items():
        (text,) = generate(str(run.folder), PROMPT, **options)
        samples[kind] = text.prompt + text.completion
    return samples


def traced(run: Run) -> Trace:
    """Return the routes of some held-out text."""
    loaded = load(str(run.folder))
    ids = run.corpus().validation.tokens[:NUM_TRACED_TOKENS].tolist()
    return trace_tokens(loaded.model, ids, loaded.tokenizer, context=COMMON["context"], name="the routed model")


def _measurements(speeds: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of `measure_speed` by what was measured and by batch size."""
    return {(row["what"], row["batch_size"]): row for row in speeds["rows"]}


def _verdict(kind: str, values: dict[str, Any]) -> str:
    """Compare the routed model with another one, in a sentence."""
    models = dict(zip(LAYERS, values["comparison"]["models"], strict=True))
    ratio = models["routed"]["loss"] / models[kind]["loss"]
    direction = "lower" if ratio < 1 else "higher"
    difference = values["comparison"]["routed_minus"][kind]
    interval = "{mean:+.4f} nats per byte, from {low:+.4f} to {high:+.4f} over windows".format(**difference)
    decoding = _measurements(values[f"speed against {kind}"])["decode", 1]
    cache = decoding["cache"]
    return (
        f"Against {NAMES[kind]} ({LAYERS[kind]} layers), with the same training FLOPs: the loss with causal routing is "
        f"{abs(ratio - 1):.2%} {direction} ({interval}), one text is decoded at "
        f"{Spread(**decoding['speed_up']):.2f} times the speed, and its cache takes "
        f"{cache['routed'] / cache['dense']:.2f} times the bytes."
    )


def _column(kind: str, run: Run, values: dict[str, Any]) -> Column:
    """Collect one model's numbers."""
    models = dict(zip(LAYERS, values["comparison"]["models"], strict=True))
    model = models[kind]
    # The routed model was timed against both others; these are its numbers against the dense one.
    other = "shallow" if kind == "shallow" else "dense"
    speeds = _measurements(values[f"speed against {other}"])
    side = "routed" if kind == "routed" else "dense"
    result = run.result
    assert result is not None
    capacities = [layer["capacity"] for layer in model["layers"].values()]
    decode = {size: speeds["decode", size][side]["median"] for size in (1, 8)}
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
        capacities=capacities,
        training=speeds["training step", COMMON["batch_size"]][side]["median"],
        decode=decode,
        cache_bytes=speeds["decode", 1]["cache"][side],
    )
