"""Print a digest of the losses, weights, logits and routes of seeded runs, one line for each variant.

    python tests/fingerprint.py > before.txt     # at one commit
    python tests/fingerprint.py | diff before.txt -     # at another one, on the same machine

A change of structure leaves every line as it was. It uses public names alone, so that it runs at any commit.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the order of sums depends on the number of threads

import torch

import mixdepth

SETTINGS = {
    "layers": 4,
    "width": 32,
    "context": 64,
    "batch_size": 4,
    "steps": 12,
    "log_every": 4,
    "save_every": 6,
    "eval_windows": 8,
    "learning_rate": 4e-3,
}
VARIANTS = {
    "dense": None,
    "predictor": {"capacity": 0.25},
    "aux_loss": {"capacity": 0.25, "causal": "aux_loss"},
    "threshold": {"capacity": 0.25, "causal": "threshold"},
    "every layer, tanh": {"capacity": 0.5, "every": 1, "gate": "tanh"},
    "token_choice": {"capacity": 0.5, "scheme": "token_choice"},
    "early_exit": {"capacity": (0.75, 0.5), "scheme": "early_exit"},
    "random": {"capacity": 0.5, "scheme": "random"},
    "soft": {"scheme": "soft"},
    "attention alone": {"capacity": 0.25, "target": "attention"},
    "mlp alone": {"capacity": 0.25, "target": "mlp"},
    "gate on the MLP": {"capacity": 0.25, "gate_on": "mlp"},
    "experts, token choice": {"capacity": 0.5, "experts": "token_choice", "num_noop_experts": 1},
    "experts, expert choice": {"capacity": 0.5, "experts": "expert_choice"},
}


def digest_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def fingerprint(folder: Path, corpus: Path, routing: dict | None) -> dict[str, str]:
    """Train a small model, and hash what it logged, its weights, logits, routes and greedy answer."""
    make_config = getattr(mixdepth.DepthConfig, "from_flat", mixdepth.DepthConfig)  # 0.1 had flat settings alone
    depth = None if routing is None else make_config(**routing)
    experts = {"num_experts": 4} if routing is not None and "experts" in routing else {}
    run = mixdepth.train(folder, **SETTINGS, **experts, corpus=str(corpus), depth=depth)
    model = mixdepth.load(str(folder)).model
    tokens = torch.arange(2 * 48).reshape(2, 48) % 200 + 1  # (2, 48)
    with torch.no_grad():
        out = model(tokens)
    answer = model.generate(tokens[:, :8], max_new_tokens=16, do_sample=False, pad_token_id=0)
    weights = [name.encode() + bytes_of(tensor) for name, tensor in sorted(model.state_dict().items())]
    routes = []
    if depth is not None and getattr(model, "depth_routers", None):
        with torch.no_grad():
            routes = [bytes_of(route.mask) for route in model(tokens, output_routes=True).routes]
    return {
        "losses": digest_of(json.dumps(run.metrics).encode(), json.dumps(run.result).encode()),
        "weights": digest_of(*weights),
        "logits": digest_of(bytes_of(out.logits)),
        "routes": digest_of(*routes),
        "answer": digest_of(bytes_of(answer)),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "text.txt"
        words = [f"def f{number}(x): return x * {number * number % 97}\n" for number in range(4000)]
        corpus.write_text("\x0c".join(words))
        for number, (name, routing) in enumerate(VARIANTS.items()):
            values = fingerprint(Path(folder) / str(number), corpus, routing)
            print(f"{name:24}", *(f"{key} {value}" for key, value in values.items()), flush=True)


if __name__ == "__main__":
    main()
