"""SmolLM2-135M made cheaper: what conversion and tuning cost in loss, against all it must be compared with.

Every variant starts from the same weights, is tuned on the same text for the same FLOPs, and is evaluated causally on
held-out text of two domains: English prose (Debian's handbook and the Jargon File, which `--prepare` fetches with
apt-get) and Python source (of the standard library). One line of JSON for each variant goes to smollm.jsonl; finished
variants are not done again.

    python smollm.py --prepare text/          # once: text/train, text/prose, text/python
    python smollm.py text/ --flops 5e13 [--only NAME ...]
    python smollm.py text/ --speed             # decode tokens/s and cache bytes, models taking turns
    python smollm.py text/ --table
    python smollm.py text/ --plot docs/pictures    # loss against tokens/s: smollm-1.svg, smollm-8.svg

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import gzip
import hashlib
import re
import statistics
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from machine import describe, header, record, recorded, row

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", type=Path, help="the folder of texts")
parser.add_argument("--prepare", action="store_true", help="make that folder")
parser.add_argument("--flops", type=float, default=5e13, help="tuning budget of each variant (default: %(default)g)")
parser.add_argument("--only", nargs="+", help="these variants")
parser.add_argument("--models", type=Path, default=Path("models/smollm"), help="where models go (default: %(default)s)")
parser.add_argument("--speed", action="store_true", help="time decoding of what is tuned")
parser.add_argument("--table", action="store_true", help="print what was measured")
parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw loss against tokens/s")

PACKAGES = ("debian-handbook", "jargon-text")
HELD_OUT = 0.1
CONTEXT, WINDOWS, FITTED_ON = 512, 24, 16
DOMAINS = ("prose", "python")
RESULTS = Path(__file__).with_name("smollm.jsonl")
TUNING = {"batch_size": 2, "context": CONTEXT, "learning_rate": 2e-4, "router_learning_rate": 2.0}
TUNING |= {"predictor_learning_rate": 5.0, "eval_windows": 8, "log_every": 5, "bf16": True}
ROUTED = {"gate": "unit", "router_input": "normed", "causal": "threshold"}
UNTUNED = {"gate": "one", "scheme": "random"}  # a router that never learned knows no better


def blocks(number: int, capacity: float, depth: dict[str, Any] = ROUTED, **tune: Any) -> dict[str, Any]:
    """The `number` blocks that can best be spared, at this capacity."""
    return {"choose": number, "target": "block", "depth": {**depth, "capacity": capacity}, "tune": tune}


def fitted(number: int, capacity: float, **tune: Any) -> dict[str, Any]:
    """Those blocks, with routers that start where they rank tokens by how far they are moved."""
    return {**blocks(number, capacity, {**ROUTED, "gate": "straight"}, **tune), "fit": True}


def removed(number: int) -> dict[str, Any]:
    """Those blocks taken out."""
    return {"choose": number, "target": "block", "remove": True, "tune": {}}


VARIANTS: dict[str, dict[str, Any]] = {
    "original": {"tune": None},
    "original, tuned": {"tune": {}},
    **{f"blocks, {c:.0%}": blocks(12, c) for c in (0.75, 0.5, 0.25)},
    **{f"MLPs, {c:.0%}": {**blocks(20, c), "target": "mlp"} for c in (0.75, 0.5, 0.25)},
    "blocks removed": removed(12),
    # other shapes that skip as much for each token: six blocks' worth, as 50 % of twelve, and three, as 75 %
    "8 blocks, 25%": blocks(8, 0.25),
    "6 blocks removed": removed(6),
    "3 blocks removed": removed(3),
    # other ways to choose and to tune
    "8 blocks, 25%, fitted": fitted(8, 0.25),
    "8 blocks, 25%, fitted, down at once": fitted(8, 0.25, capacity_steps=0.1),
    "8 blocks, 25%, fitted, distilled": fitted(8, 0.25, capacity_steps=0.1, distill=0.5),
    # eight blocks' worth, which is 1.27 times fewer bytes for each token
    "9 blocks, 10%, fitted, down at once": fitted(9, 0.1, capacity_steps=0.1),
    "8 blocks removed": removed(8),
    "20 attentions, 25%, fitted": {**fitted(20, 0.25, capacity_steps=0.1), "target": "attention"},
    "blocks, 50%, random": blocks(12, 0.5, {"gate": "unit", "router_input": "normed", "scheme": "random"}),
    "blocks, 50%, predictor": blocks(12, 0.5, {**ROUTED, "causal": "predictor"}),
    "blocks, 50%, distilled": blocks(12, 0.5, distill=0.5),
    "blocks, 50%, routers only": blocks(12, 0.5, method="router"),
    "blocks, 50%, not calibrated": blocks(12, 0.5, calibrate=0),
    "blocks, 50%, down at once": blocks(12, 0.5, capacity_steps=0.1),
    # what is lost before any tuning
    **{f"{n} blocks, {c:.0%}, not tuned": {**blocks(n, c, UNTUNED), "tune": None} for n, c in ((8, 0.25), (24, 0.75))},
    "blocks, 50%, not tuned": {**blocks(12, 0.5, UNTUNED), "tune": None},
    "6 blocks removed, not tuned": {**removed(6), "tune": None},
}


# --- text ---


class Prose(HTMLParser):
    """The text of a page, a line for each paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("head", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("head", "script", "style")
        if tag in ("p", "li", "h1", "h2", "h3", "h4", "div", "dd", "dt", "tr", "pre"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def prose() -> list[str]:
    """The documents of Debian's packages, fetched and unpacked in a folder that is then deleted."""
    texts = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        for page in sorted(Path(folder).rglob("en-US/*.html")):
            reader = Prose()
            reader.feed(page.read_text())
            texts.append(re.sub(r"\s*\n\s*\n\s*", "\n\n", "".join(reader.parts)).strip() + "\n")
        (jargon,) = Path(folder).rglob("jargon.txt.gz")
        entries = re.split(r"\n(?=\n)", gzip.decompress(jargon.read_bytes()).decode(errors="replace"))
        for start in range(0, len(entries), 60):
            texts.append("\n".join(entries[start : start + 60]) + "\n")
    return texts


def prepare(folder: Path) -> None:
    from mixdepth.data.sources import stdlib_files

    domains = {"prose": prose(), "python": [path.read_text() for path in stdlib_files()]}
    limit = sum(map(len, domains["prose"]))  # as much of each
    for name, texts in domains.items():
        ordered = sorted({hashlib.sha256(text.encode()).hexdigest(): text for text in texts if text.strip()}.items())
        size = 0
        for digest, text in ordered:
            side = name if size < HELD_OUT * limit else "train"
            size += len(text)
            if size <= limit:
                (folder / side).mkdir(parents=True, exist_ok=True)
                (folder / side / f"{name}-{digest[:12]}.txt").write_text(text)


# --- models ---


def layers_to_route(text: Path, models: Path, target: str, number: int) -> tuple[int, ...]:
    """The layers that cost least, measured once on the training text."""
    import mixdepth
    from mixdepth.conversion.importance import cheapest
    from mixdepth.files import read_json, write_json

    file = RESULTS.with_name(f"smollm-{target}.json")
    if not file.exists():
        model, *_ = mixdepth.load(str(models / "original"))
        windows = mixdepth.load_corpus(str(text / "train"), str(models / "original")).train.windows(CONTEXT).spread(4)
        write_json(file, mixdepth.layer_costs(model, windows.batches(4), 0.5, target))
    return cheapest({int(index): cost for index, cost in read_json(file).items()}, number)


def without(model: Any, layers: tuple[int, ...]) -> Any:
    """The model without these layers."""
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in layers]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = type(model.model.layers)(kept)
    model.config.num_hidden_layers = len(kept)
    return model


def make(name: str, text: Path, models: Path, flops: float) -> Path:
    """The variant's model, converted and tuned."""
    import mixdepth

    settings = VARIANTS[name]
    original = models / "original"
    if not original.exists():
        mixdepth.convert("smollm2", original)
    start = models / (re.sub(r"\W+", "-", name) + "-start")
    layers = layers_to_route(text, models, settings["target"], settings["choose"]) if "choose" in settings else ()
    if settings.get("remove"):
        if not start.exists():
            model, tokenizer, *_ = mixdepth.load(str(original))
            without(model, layers).save_pretrained(start)
            tokenizer.save_pretrained(start)
    elif "depth" in settings:
        if not start.exists():
            depth = mixdepth.DepthConfig(layers=layers, target=settings["target"], **settings["depth"])
            fit = {"fit": True, "corpus": str(text / "train"), "windows": FITTED_ON} if "fit" in settings else {}
            mixdepth.convert(str(original), start, depth, **fit)
    else:
        start = original
    if settings["tune"] is None:
        return start
    run = models / (re.sub(r"\W+", "-", name) + f"-tuned-{flops:g}")
    if not (run / "result.json").exists():
        mixdepth.tune(start, run, corpus=str(text / "train"), flops=flops, **{**TUNING, **settings["tune"]})
    return run


def held_out(model: Any, tokenizer_of: Path, text: Path, domain: str) -> Any:
    """The evaluation on windows of a held-out folder, all of which is used."""
    import numpy as np

    import mixdepth
    from mixdepth.data.corpus import Windows

    corpus = mixdepth.load_corpus(str(text / domain), str(tokenizer_of))
    tokens = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
    return mixdepth.evaluate(model, Windows(tokens, CONTEXT).spread(WINDOWS).batches(4))


def measure(name: str, text: Path, models: Path, flops: float) -> dict[str, Any]:
    import mixdepth

    folder = make(name, text, models, flops)
    model, *_ = mixdepth.load(str(folder))
    depth = VARIANTS[name].get("depth")
    if VARIANTS[name]["tune"] is None and depth is not None:  # brought down at once
        mixdepth.set_capacity(model, depth["capacity"])
    run = None if VARIANTS[name]["tune"] is None else mixdepth.Run(folder)
    spent = {} if run is None else {"flops": run.result["flops"], "tokens": run.result["tokens"]}
    line: dict[str, Any] = {"name": name, "budget": flops, **spent}
    for domain in DOMAINS:
        found = held_out(model, models / "original", text, domain)
        line[domain] = {
            "loss": found.loss,
            "lookahead_loss": found.lookahead_loss,
            "rows": [row.loss for row in found.rows],
            "capacity": [round(layer.capacity, 4) for layer in found.layers.values()],
        }
    return line


# --- speed ---


def speed(names: list[str], text: Path, models: Path, flops: float, repeats: int = 15, new_tokens: int = 32) -> None:
    """Sample from all models in turn, after prompts of 64 held-out tokens."""
    import numpy as np
    import torch

    import mixdepth
    from mixdepth.bench import Spread, decode_in_turns

    loaded = {name: mixdepth.load(str(make(name, text, models, flops))).model for name in names}
    corpus = mixdepth.load_corpus(str(text / "prose"), str(models / "original"))
    lines: dict[str, dict[str, Any]] = {name: {} for name in names}
    for batch_size in (1, 8):
        ids = torch.from_numpy(np.asarray(corpus.train.tokens[: batch_size * 64]).astype(np.int64)).view(batch_size, 64)
        texts = decode_in_turns(loaded, ids, new_tokens, repeats)
        speeds = {name: [text.tokens_per_second for text in found] for name, found in texts.items()}
        for name in names:
            lines[name][f"cache bytes at {batch_size}"] = texts[name][-1].cache.held
            lines[name][f"tokens/s at {batch_size}"] = Spread.of(speeds[name]).median
            lines[name][f"speed-up at {batch_size}"] = [*Spread.of_ratios(speeds[name], speeds[names[0]])]
    for name, line in lines.items():
        append({"name": name, "budget": flops, "speed": line})


# --- what was measured ---


def append(line: dict[str, Any]) -> None:
    record(RESULTS, {**line, "machine": describe()})


def table() -> None:
    """The losses, against the original and against the original with the same tuning, and the speeds."""
    from mixdepth.evaluation.intervals import interval

    losses = {(line["name"], line["budget"]): line for line in recorded(RESULTS) if "prose" in line}
    speeds = {(line["name"], line["budget"]): line["speed"] for line in recorded(RESULTS) if "speed" in line}
    header(
        *("variant", "FLOPs", "prose", "Python", "prose, to the original", "Python, to the original"),
        *("both, to the original with the same tuning", "realised", "tokens/s at 1", "at 8", "cache"),
    )
    original = next(line for (name, _), line in losses.items() if name == "original")
    for (name, budget), line in losses.items():
        cells: list[str] = [f"{budget:.0e}" if "flops" in line else ""]
        cells += [f"{line[domain]['loss']:.4f}" for domain in DOMAINS]
        cells += [f"{line[domain]['loss'] / original[domain]['loss'] - 1:+.1%}" for domain in DOMAINS]
        tuned = losses.get(("original, tuned", budget))
        if tuned is None:
            cells.append("")
        else:
            both = [line[domain]["loss"] / tuned[domain]["loss"] - 1 for domain in DOMAINS]
            pairs = [
                b / t - 1
                for domain in DOMAINS
                for b, t in zip(line[domain]["rows"], tuned[domain]["rows"], strict=True)
            ]
            span = interval(pairs, [1.0] * len(pairs))
            cells.append(f"{sum(both) / 2:+.1%}" + ("" if span.low is None else f" (± {span.mean - span.low:.1%})"))
        shares = [statistics.mean(line[domain]["capacity"]) for domain in DOMAINS if line[domain]["capacity"]]
        cells.append(", ".join(f"{share:.0%}" for share in shares))
        quick = speeds.get((name, budget))
        if quick is None:
            cells += ["", "", ""]
        else:
            for size in (1, 8):
                middle, low, high = quick[f"speed-up at {size}"]
                cells.append(f"{quick[f'tokens/s at {size}']:.1f}, x {middle:.2f} ({low:.2f} to {high:.2f})")
            cells.append(f"{quick['cache bytes at 1'] / speeds['original', budget]['cache bytes at 1']:.0%}")
        row(name, *cells)


def plot(folder: Path) -> None:
    """Loss, the mean of both texts, against tokens/s, at batches of 1 and 8."""
    from mixdepth.report.figures import save
    from mixdepth.report.tradeoff import Row, draw_speed

    losses = {(line["name"], line["budget"]): line for line in recorded(RESULTS) if "prose" in line}
    speeds = {(line["name"], line["budget"]): line["speed"] for line in recorded(RESULTS) if "speed" in line}
    first = next(key for key in speeds if key[0] == "original")
    for size in (1, 8):
        base, rows = speeds[first][f"tokens/s at {size}"], []
        for key, speed in speeds.items():
            name, budget = key
            if name == "original" and key != first:
                continue
            untuned = next(line for (other, _), line in losses.items() if other == name)  # at whatever budget
            loss = sum(losses.get(key, untuned)[domain]["loss"] for domain in DOMAINS) / 2
            # each was timed in turns with the original: its ratio to that holds, on whatever day
            group = f"{budget:.0e} FLOPs" if VARIANTS[name]["tune"] is not None else "not tuned"
            median, low, high = (base * ratio for ratio in speed[f"speed-up at {size}"])
            rows.append(Row(name=name, loss=loss, tokens_per_second=median, low=low, high=high, group=group))
        save(draw_speed(rows, "original"), folder, f"smollm-{size}")


def main(text: Path, flops: float, only: list[str] | None, models: Path) -> None:
    for name in only or VARIANTS:
        if not any(line["name"] == name and line["budget"] == flops and "prose" in line for line in recorded(RESULTS)):
            line = measure(name, text, models, flops)
            append(line)
            print(name, {domain: round(line[domain]["loss"], 4) for domain in DOMAINS}, flush=True)


if __name__ == "__main__":
    options = parser.parse_args()
    if options.prepare:
        prepare(options.text)
    elif options.table:
        table()
    elif options.plot:
        plot(options.plot)
    elif options.speed:
        speed(options.only or [*VARIANTS], options.text, options.models, options.flops)
    else:
        main(options.text, options.flops, options.only, options.models)
