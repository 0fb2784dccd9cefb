"""Draws the pictures of family.md, who passes through what in small models, and writes its table of costs.

python docs/make_family.py
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import mixdepth
from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.layer import RoutedLayer

FOLDER = Path(__file__).parent / "pictures"
NUM_LAYERS, NUM_TOKENS = 6, 32
CELL, HALF, GAP, LEFT, TOP = 14, 8, 5, 62, 6
SHADES = ("#e4e7ec", "#8fb3dd", "#1f5fa8")  # skipped, one expert of two, processed
OVERHEAD = "#d97a1e"  # a no-op expert

TOKENS = torch.randint(64, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))

PAGE = Path(__file__).parent / "family.md"
START, END = "<!-- costs: written by make_family.py -->\n", "<!-- end of costs -->\n"
ROUTED = {"capacity": 0.25, "every": 2}
ROW = {"capacity": 0.125}
EXITS = {"scheme": "early_exit", "layers": (1, 3, 5, 7), "capacity": (0.5, 0.25, 0.125, 0.0625)}
MOE = {"experts": "token_choice", "layers": ()}
PICTURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "expert_choice": ROUTED,
    "token_choice": {**ROUTED, "scheme": "token_choice"},
    "early_exit": {"scheme": "early_exit", "layers": (1, 3, 5), "capacity": (0.75, 0.5, 0.25)},
    "random": {**ROUTED, "scheme": "random"},
    "soft": {"scheme": "soft"},
    "attention": {**ROUTED, "target": "attention"},
    "mlp": {**ROUTED, "target": "mlp"},
    "moe": {"experts": "token_choice", "layers": ()},
    "moe_expert_choice": {"experts": "expert_choice", "layers": ()},
    "staged": {**ROUTED, "experts": "token_choice"},
    "integrated": {"experts": "token_choice", "layers": (), "num_noop_experts": 2},
}


def build(settings: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": NUM_LAYERS}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**shape, **experts) if "experts" in settings else LlamaConfig(**shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    if not settings:
        return model
    model = mixdepth.route(model, **settings)
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight.normal_()
    if model.depth_config.scheme == "token_choice":  # as if it had learned its capacity
        mixdepth.calibrate(model, [TOKENS])
    return model


@torch.no_grad()
def who_passes(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """For each layer and token (L, T): attention or not, how much of the MLP (0, 1/2, 1), and no-op experts."""
    shape = (NUM_LAYERS, NUM_TOKENS)
    attention, mlp, noop = torch.ones(shape), torch.ones(shape), torch.zeros(shape)
    if not hasattr(model, "depth_config"):
        return attention, mlp, noop
    with mixdepth.lookahead(model):
        out = model(TOKENS, output_routes=True)
    routes = dict(zip(model.depth_config.routed_layers(NUM_LAYERS), out.routes, strict=True))
    for index, layer in enumerate(decoder_layers(model)):
        chosen = torch.arange(NUM_TOKENS)
        if isinstance(layer, RoutedLayer):
            route = routes[max(i for i in routes if i <= index)]
            chosen = route.index[0, : route.count[0]]
            for part, target in ((attention, "attention"), (mlp, "mlp")):
                if layer.depth_target in ("block", target):
                    part[index] = route.mask[0]
                    if model.depth_config.scheme == "soft":
                        part[index, route.index[0]] = (2 * route.weight[0]).round() / 2
        if out.loads:
            taken = out.loads[index].processed[0, : len(chosen)]
            mlp[index, chosen] = taken[:, :4].sum(1).clamp(max=2) / 2
            noop[index, chosen] = (taken[:, 4:].any(1) & ~taken[:, :4].any(1)).float()
    return attention, mlp, noop


def boxes(mask: Tensor, y: int, colour: str) -> str:
    """One path for all tokens of the mask (T,)."""
    path = "".join(f"M{LEFT + CELL * t} {y}h{CELL - 2}v{HALF}h-{CELL - 2}z" for t in mask.nonzero()[:, 0].tolist())
    return f'<path fill="{colour}" d="{path}"/>' if path else ""


def draw(settings: dict[str, Any]) -> str:
    attention, mlp, noop = who_passes(build(settings))
    width, height = LEFT + CELL * NUM_TOKENS + 4, TOP + NUM_LAYERS * (2 * HALF + 1 + GAP) + 16
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
    for index in range(NUM_LAYERS):
        y = TOP + (NUM_LAYERS - 1 - index) * (2 * HALF + 1 + GAP)  # depth grows upwards
        parts.append(f'<text x="4" y="{y + HALF + 4}" font-size="10" fill="#475467">layer {index}</text>')
        for half, share in ((y, mlp[index]), (y + HALF + 1, attention[index])):  # attention comes first: below
            for shade, value in zip(SHADES, (0, 0.5, 1), strict=True):
                parts.append(boxes(share == value, half, shade))
        parts.append(boxes(noop[index] > 0, y, OVERHEAD))
    parts.append(f'<text x="{LEFT}" y="{height - 4}" font-size="10" fill="#475467">tokens, from first to last</text>')
    return "".join(parts) + "</svg>\n"


ROWS = (
    # settings, computes, skips, training looks at, sampling looks at
    ("dense", {}, "everything", "nothing", "itself", "itself"),
    ("expert choice", ROW, "the top k tokens", "attention and MLP of the others", "the whole row", "itself, by a rule"),
    (
        "token choice",
        {**ROW, "scheme": "token_choice"},
        "tokens with a score above 0",
        "attention and MLP of the others",
        "itself; the row when full",
        "itself",
    ),
    ("early exit", EXITS, "the tokens that are left", "all later layers", "the whole row", "itself, by a rule"),
    (
        "random",
        {**ROW, "scheme": "random"},
        "k random tokens",
        "attention and MLP of the others",
        "positions",
        "its position",
    ),
    ("soft", {"scheme": "soft"}, "everything, weighted", "nothing", "itself", "itself"),
    (
        "attention alone",
        {**ROW, "target": "attention"},
        "the top k; all MLPs",
        "attention of the others",
        "the whole row",
        "itself, by a rule",
    ),
    (
        "MLP alone",
        {**ROW, "target": "mlp"},
        "the top k; all attention",
        "MLP of the others",
        "the whole row",
        "itself, by a rule",
    ),
    ("MoE", MOE, "two experts for each token", "the other experts", "itself", "itself"),
    (
        "MoE, expert choice",
        {**MOE, "experts": "expert_choice"},
        "each expert its top tokens",
        "the other experts",
        "the whole row",
        "itself, by thresholds",
    ),
    (
        "MoE, lower capacity",
        {**MOE, "expert_capacity": 0.125},
        "what fits the experts",
        "experts that are full",
        "the row when full",
        "itself",
    ),
    (
        "staged MoDE",
        {**ROW, "experts": "token_choice"},
        "experts of the top k",
        "attention and experts of the others",
        "the whole row",
        "itself, by a rule",
    ),
    (
        "integrated MoDE",
        {**MOE, "num_noop_experts": 8},
        "two of all experts for each token",
        "MLP at no-op experts",
        "itself",
        "itself",
    ),
)


def costs() -> str:
    """The table of what each kind costs: FLOPs against the dense model with as many parameters."""
    lines = [
        "| | computes | skips | training looks at | sampling looks at | FLOPs | attention | MLP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, settings, computes, skips, training, sampling in ROWS:
        shape = {
            "vocab_size": 256,
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        }
        with torch.device("meta"):
            if "experts" in settings:
                config: Any = MixtralConfig(**shape, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2)
            else:
                config = LlamaConfig(**shape, intermediate_size=1024)
            model = AutoModelForCausalLM.from_config(config)
            full = mixdepth.count_flops(model, 2048)
            count = mixdepth.count_flops(mixdepth.route(model, **settings), 2048) if settings else full
        shares = [
            sum(getattr(layer, part) for layer in count.layers) / sum(getattr(layer, part) for layer in full.layers)
            for part in ("attention", "mlp")
        ]
        numbers = " | ".join(f"{share:.3f}" for share in (count.total / full.total, *shares))
        lines.append(f"| {name} | {computes} | {skips} | {training} | {sampling} | {numbers} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """family.md, with its table of costs as it is now."""
    before, rest = PAGE.read_text().split(START)
    return before + START + costs() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
    FOLDER.mkdir(exist_ok=True)
    for name, settings in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(settings))
