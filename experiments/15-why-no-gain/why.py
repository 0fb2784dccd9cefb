"""Why routing gains no more at equal FLOPs: how much of the gain of two further layers routed layers catch.

All models have width 64 and take the 6,510 steps that 1e13 FLOPs pay for a model of 4 layers with a quarter of the
tokens in every second. Two dense layers are the start, four are the most that could be reached, at twice the FLOPs:
how far do routed layers get? Two rows cannot be used in practice: *entropy* chooses the tokens of which a trained
model of 2 layers is least certain, the same in both layers, and *all keys* lets the chosen tokens attend to all
earlier ones (its FLOPs count as if they did not, and keys and values learn at the rate of the layer).

    python why.py             # resumes; results in why.jsonl, models in runs/why
    python why.py --shard 0/2 & python why.py --shard 1/2
    python why.py --table     # why.md

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe, header, record, recorded, row
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import mixdepth
from mixdepth.hf.layer import RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.routes import Route
from mixdepth.runs.run import corpus_of

RESULTS = Path(__file__).with_suffix(".jsonl")
RUNS = Path("runs/why")
STEPS, CONTEXT = 6510, 256
COMMON = {"corpus": "python", "validation": 0.02, "test": 0.02, "context": CONTEXT, "width": 64, "heads": 4}
COMMON |= {"batch_size": 4, "warmup": 0.3, "beta2": 0.99, "eval_windows": 4096, "steps": STEPS, "compile": True}
SHALLOW, DEEP, LEARNED = "2 dense layers", "4 dense layers", "learned, 25 %"
MODELS: dict[str, dict[str, Any]] = {
    SHALLOW: {"layers": 2, "depth": None},
    DEEP: {"layers": 4, "depth": None},
    "learned, 12.5 %": {"capacity": 0.125, "causal": "threshold"},
    LEARNED: {"capacity": 0.25, "causal": "threshold"},
    "learned, 50 %": {"capacity": 0.5, "causal": "threshold"},
    "random, 25 %": {"capacity": 0.25, "scheme": "random"},
    "random, 50 %": {"capacity": 0.5, "scheme": "random"},
    "entropy, 25 %": {"capacity": 0.25, "scheme": "random"},
    "entropy, 25 %, gate 1": {"capacity": 0.25, "scheme": "random", "gate": "one"},
    "learned, 25 %, all keys": {"capacity": 0.25, "causal": "threshold"},
    "entropy, 25 %, gate 1, all keys": {"capacity": 0.25, "scheme": "random", "gate": "one"},
}
SHARES = (0.125, 0.25, 0.5)


def choose_by_entropy(model: Any, capacity: float) -> None:
    """Give random routing the entropy of this model's predictions of the next byte, in place of its noise.

    A run makes its own model, so this changes the forward of the class, and must come before any routed model is made.
    A model that is loaded again has its noise.
    """
    windows = corpus_of(mixdepth.TrainConfig(**COMMON, depth=None)).train.windows(CONTEXT).spread(256)
    cut = torch.cat([uncertainty(model, ids) for ids in windows.batches(16)]).flatten().quantile(1 - capacity)
    shift = NormalDist().inv_cdf(1 - capacity) - cut  # where the causal rule of `random` cuts
    forward = RoutedCausalLM.routed_forward

    def forward_with_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        scores = uncertainty(model, ids) + shift  # (B, T)
        with mixdepth.given_scores(self, dict.fromkeys(self.deciding_layers, scores)):
            return forward(self, *args, **kwargs)

    RoutedCausalLM.routed_forward = forward_with_scores


@torch.no_grad()
def uncertainty(model: Any, ids: Tensor) -> Tensor:
    """(B, T), in nats"""
    logits = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return -(logits.exp() * logits).sum(-1)


def keep_all_keys() -> None:
    """Chosen tokens attend to all earlier tokens, whose keys and values are made of the stream as it is."""

    def process(self: Any, x: Tensor, route: Route, kwargs: Any, depth: Any, write: Any = None) -> Tensor:
        attention, (cos, sin) = self.self_attn, kwargs["position_embeddings"]
        h = self.input_layernorm(x)
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (layer(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for layer in layers)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q = route.gather(q.transpose(1, 2).flatten(2)).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        earlier = torch.arange(x.shape[1]) <= route.index[:, None, :, None]  # (B, 1, K, T)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=earlier)
        tokens = route.gather(x)
        tokens = tokens + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return route.blend(x, tokens + self.mlp(self.post_attention_layernorm(tokens)))

    RoutedLayer._process = process


def folder_of(name: str, seed: int) -> Path:
    return RUNS / f"{name.replace(' ', '-').replace(',', '').replace('%', '')}-seed{seed}"


def trained(name: str, seed: int) -> Any:
    if find(name, seed) is None:
        sys.exit(f"'{name}' of seed {seed} is not trained yet: python {sys.argv[0]} --one '{name}' {seed}")
    return mixdepth.load(str(folder_of(name, seed))).model.eval()


def run(name: str, seed: int) -> dict[str, Any]:
    settings = MODELS[name]
    if "depth" not in settings:
        settings = {"layers": 4, "depth": mixdepth.DepthConfig(**settings)}
    if name.startswith("entropy"):
        choose_by_entropy(trained(SHALLOW, seed), settings["depth"].capacity)
        settings = {**settings, "compile": False}  # there are two models in a pass
    if name.endswith("all keys"):
        keep_all_keys()
    done = mixdepth.train(folder_of(name, seed), seed=seed, **{**COMMON, **settings})
    return {"name": name, "seed": seed, **done.result}


def find(name: str, seed: int) -> dict[str, Any] | None:
    return next((found for found in recorded(RESULTS) if (found["name"], found["seed"]) == (name, seed)), None)


def table(seed: int) -> None:
    """Losses, and which share of the way from two dense layers to four each goes, for which share of its FLOPs."""
    ends = find(SHALLOW, seed), find(DEEP, seed)

    def share(key: str, value: float) -> str:
        shallow, deep = (end[key] for end in ends)
        return f"{(value - shallow) / (deep - shallow):z.0%}"

    header("model", "loss", "with look-ahead", "of the worth of depth", "with look-ahead", "of its FLOPs", "chosen")
    for name in MODELS:
        found = find(name, seed)
        if found is not None:
            losses = [found["validation_loss"], found.get("validation_lookahead_loss")]
            shown = ["" if loss is None else f"{loss:.4f}" for loss in losses]
            shown += ["" if loss is None else share("validation_loss", loss) for loss in losses]
            shown.append("" if name.endswith("all keys") else share("flops", found["flops"]))
            row(name, *shown, " ".join(f"{chosen:.1%}" for chosen in found.get("validation_capacities", ())))


@torch.no_grad()
def where(seed: int) -> None:
    """Print the share of the gain of four dense layers over two that lies on the tokens of each choice."""
    models = {name: trained(name, seed) for name in (SHALLOW, DEEP, LEARNED)}
    windows = corpus_of(mixdepth.TrainConfig(**COMMON, depth=None)).validation.windows(CONTEXT).spread(1024)
    ids = torch.stack([windows[index] for index in range(len(windows))])
    inputs, labels = ids[:, :-1], ids[:, 1:]

    def losses(name: str) -> Tensor:
        logits = torch.cat([models[name](input_ids=some, use_cache=False).logits for some in inputs.split(64)])
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # (B, T)

    shallow = losses(SHALLOW)
    worth = shallow - losses(DEEP)
    (fit, _), (fit_worth, worth), (_, shallow), (_, test) = (some.chunk(2) for some in (inputs, worth, shallow, inputs))
    sums = torch.zeros(256).index_add(0, fit.flatten(), fit_worth.flatten())
    by_byte = (sums / (torch.bincount(fit.flatten(), minlength=256) + 50))[test]  # rare bytes say little
    scores = {
        "the shallow model is least certain": torch.cat(
            [uncertainty(models[SHALLOW], some) for some in test.split(64)]
        ),
        "are the bytes on which depth gains most": by_byte + 1e-9 * torch.rand_like(by_byte),
    }
    with mixdepth.lookahead(models[LEARNED]):
        outs = [models[LEARNED](input_ids=some, use_cache=False, output_routes=True) for some in test.split(64)]
    for number, routes in enumerate(zip(*(out.routes for out in outs), strict=True), start=1):
        scores[f"routed layer {number} of '{LEARNED}' would choose"] = torch.cat([route.logits for route in routes])
    header("those of a window that", *(f"{share:.1%} of the tokens" for share in SHARES), "of the loss, at 25 %")
    for name, score in scores.items():
        picks = [score.topk(round(share * score.shape[1])).indices for share in SHARES]
        held = [worth.gather(1, pick).sum() / worth.sum() for pick in picks]
        row(name, *(f"{share:.0%}" for share in held), f"{shallow.gather(1, picks[1]).sum() / shallow.sum():.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the results so far")
    parser.add_argument("--shard", default="0/1", help="I/N: run every N-th model, from the I-th")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SEED"), help="train this one alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        print(describe())
        table(seed=0)
        print()
        if all(folder_of(name, 0).exists() for name in (SHALLOW, DEEP, LEARNED)):
            where(seed=0)
    elif options.one:
        record(RESULTS, run(options.one[0], int(options.one[1])))
    else:
        shard, num_shards = map(int, options.shard.split("/"))
        for seed in range(options.seeds):
            for index, name in enumerate(MODELS):
                if index % num_shards == shard and find(name, seed) is None:  # what one changes, no other sees
                    subprocess.run([sys.executable, __file__, "--one", name, str(seed)], check=True)
