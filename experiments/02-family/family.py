"""The whole family at equal training FLOPs: every scheme, causal rule, target, experts and both MoDEs.

All models have width 64 and 4 layers over bytes, and train until the same FLOPs are spent, so that cheaper ones
take more steps: 8 x 256 bytes of the standard library a step, AdamW with a cosine schedule that ends with the
budget, fp32. The script reports the held-out loss with causal routing and with look-ahead. The learning rate is the
same for all and was tuned for none. Results are appended to family.jsonl, and runs that are there are not repeated, so
the script can be stopped and started again, or run in several processes with `--shard 0/2`, `--shard 1/2`.

    python family.py [--table] [--shard I/N]

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from machine import header, record, recorded, row
from small import batches, byte_llama, stdlib_bytes, windows_of
from tqdm import tqdm
from transformers import AutoModelForCausalLM, MixtralConfig

import mixdepth

RESULTS = Path(__file__).with_suffix(".jsonl")
BUDGET = 3e12
BATCH_SIZE, LENGTH, WIDTH, NUM_LAYERS = 8, 256, 64, 4
LEARNING_RATE = 4e-3
SEEDS = range(3)

ROUTED = {"capacity": 0.125, "every": 2}
MOE = {"experts": "token_choice", "layers": ()}
MOE_BY_EXPERTS = {"experts": "expert_choice", "layers": ()}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "dense, 2 layers": None,
    "expert choice, predictor": ROUTED,
    "expert choice, aux loss": {**ROUTED, "causal": "aux_loss"},
    "expert choice, threshold": {**ROUTED, "causal": "threshold"},
    "token choice": {**ROUTED, "scheme": "token_choice"},
    "random": {**ROUTED, "scheme": "random"},
    "early exit": {"scheme": "early_exit", "layers": (1, 2, 3), "capacity": (0.5, 0.25, 0.125)},
    "soft": {"scheme": "soft"},
    "attention only": {**ROUTED, "target": "attention"},
    "MLP only": {**ROUTED, "target": "mlp"},
    "gate on the MLP": {**ROUTED, "gate_on": "mlp"},
    "MoE": MOE,
    "MoE, expert choice": MOE_BY_EXPERTS,
    "staged MoDE": {**ROUTED, "experts": "token_choice"},
    "staged MoDE, expert choice": {**ROUTED, "experts": "expert_choice"},
    "integrated MoDE": {**MOE, "num_noop_experts": 4},
    "integrated MoDE, expert choice": {**MOE_BY_EXPERTS, "num_noop_experts": 4},
    "MoE, lower capacity": {**MOE, "expert_capacity": 0.25},
    "MoE, expert choice, lower capacity": {**MOE_BY_EXPERTS, "expert_capacity": 0.25},
}
"""Settings of `mixdepth.route`; None is left dense."""


def build(name: str) -> Any:
    settings = VARIANTS[name]
    if settings is None or "experts" not in settings:
        model = byte_llama(WIDTH, 2 if name == "dense, 2 layers" else NUM_LAYERS, LENGTH)
    else:  # four experts of half the size, two for each token: the FLOPs of the dense model
        dense = byte_llama(WIDTH, NUM_LAYERS, LENGTH).config
        shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        config = MixtralConfig(
            **{key: getattr(dense, key) for key in shared},
            num_key_value_heads=dense.num_key_value_heads,
            intermediate_size=dense.intermediate_size // 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config)
    return model if settings is None else mixdepth.route(model, **settings)


def train(name: str, seed: int, text: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    torch.manual_seed(seed)
    training, validation = text
    model = build(name)
    is_routed = VARIANTS[name] is not None
    flops = 3 * BATCH_SIZE * mixdepth.count_flops(model, LENGTH).total
    steps = round(BUDGET / flops)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    windows = batches(training, BATCH_SIZE, LENGTH, seed)
    start = time.perf_counter()
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}", mininterval=10):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 40)
            group["lr"] = LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        ids = next(windows)
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_routed:
            mixdepth.update_routers(model)
    seconds = time.perf_counter() - start
    result = {"name": name, "seed": seed, "parameters": model.num_parameters(), "step_flops": flops, "steps": steps}
    held_out = windows_of(validation, LENGTH, 400)
    if is_routed:
        found = mixdepth.evaluate(model, held_out)
        result |= {"loss": found.loss, "lookahead": found.lookahead_loss}
        result["layers"] = {index: [*layer, layer.f1] for index, layer in found.layers.items()}
        result["loads"] = found.loads
    else:
        with torch.no_grad():
            losses = [model.eval()(ids, labels=ids).loss for ids in held_out]
        result["loss"] = result["lookahead"] = torch.stack(losses).mean().item()
    return {**result, "seconds": seconds}


def table() -> None:
    rows = recorded(RESULTS)
    header("variant", "parameters", "steps", "causal loss", "over seeds", "look-ahead", "realised capacity", "F1")
    for name in VARIANTS:
        runs = [run for run in rows if run["name"] == name]
        if not runs:
            continue
        loss, ahead = (torch.tensor([run[key] for run in runs]).mean() for key in ("loss", "lookahead"))
        losses = [run["loss"] for run in runs]
        layers = [torch.tensor(list(run["layers"].values())) for run in runs if run.get("layers")]
        capacity, f1 = "", ""
        if layers:
            mean = torch.stack(layers).mean(0)  # (layers, 4)
            capacity, f1 = " ".join(f"{c:.1%}" for c in mean[:, 0]), " ".join(f"{f:.2f}" for f in mean[:, 3])
        row(
            name,
            f"{runs[0]['parameters'] / 1e6:.2f} M",
            runs[0]["steps"],
            f"{loss:.4f}",
            f"{min(losses):.4f} - {max(losses):.4f} ({len(runs)})",
            f"{ahead:.4f}",
            capacity,
            f1,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the results so far")
    parser.add_argument("--shard", default="0/1", help="I/N: run every N-th run, from the I-th")
    options = parser.parse_args()
    if options.table:
        table()
    else:
        shard, num_shards = map(int, options.shard.split("/"))
        torch.set_num_threads(max(1, torch.get_num_threads() // num_shards))
        done = recorded(RESULTS)
        finished = {(run["name"], run["seed"]) for run in done}
        text = stdlib_bytes()
        for index, (seed, name) in enumerate(itertools.product(SEEDS, VARIANTS)):
            if index % num_shards == shard and (name, seed) not in finished:
                record(RESULTS, train(name, seed, text))
