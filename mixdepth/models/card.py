"""The model card of a folder: what the model is, how it is routed, what was measured, how it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mixdepth.files import write_text
from mixdepth.hf import smollm2
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import PREFIX

CARD = "README.md"
TOLD = ("scheme", "capacity", "target", "gate", "causal")
"""Settings of the routing that a card tells beside the layers."""


def write_card(
    folder: Path, title: str, model: Any, original: str | None, about: Mapping[str, Any], measured: Mapping[str, Any]
) -> None:
    """Write README.md for the model that was saved in this folder; `about` and `measured` become tables."""
    is_routed = isinstance(model, RoutedCausalLM)
    base, licence = _origin(original)
    is_local = base is None or Path(base).is_absolute() or Path(base).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mixture-of-depths", "mixdepth"] if is_routed else None,
        base_model=None if is_local else base,
        license=licence,
    )
    parts = ["---", metadata.to_yaml(), "---", "", f"# {title}", ""]
    kind = model.config.model_type.removeprefix(PREFIX)
    parts += [f"A {kind} model" + ("" if base is None else f" made from {Path(base).name if is_local else base}") + "."]
    if is_routed:
        parts += [
            "It is a [Mixture-of-Depths](https://arxiv.org/abs/2404.02258) transformer: routed layers process some "
            "of the tokens and are skipped by the others.",
            "",
            *_table({"routed layers": model.deciding_layers, **{n: getattr(model.depth_config, n) for n in TOLD}}),
        ]
    if about:
        parts += ["", *_table(about)]
    if measured:
        parts += ["", "## Measured", "", *_table(measured)]
    parts += ["", "## Use", "", "```python"]
    parts += ["import mixdepth  # makes routed models known to transformers"] if is_routed else []
    parts += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{title}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{title}")',
        "```",
    ]
    write_text(folder / CARD, "\n".join(parts) + "\n")


def write_adapter_card(folder: Path, title: str, original: str) -> None:
    """Write README.md for an adapter, in place of peft's empty form."""
    write_text(
        folder / CARD,
        f"# Adapter of {title}\n\nLow-rank adapters and routers for the converted model {Path(original).name}, which "
        "is at capacity 1: bring it down with `mixdepth.set_capacity` before you put this on. The folder above holds "
        "the merged model.\n",
    )


def _origin(original: str | None) -> tuple[str | None, str | None]:
    """What a model was made from in the end, and its licence: a local folder's own card may tell of both."""
    if original == smollm2.NAME:
        return smollm2.HUB_NAME, smollm2.LICENCE
    path = Path(original or "") / CARD
    if original is None or not path.is_file():
        return original, None
    try:
        told = ModelCard.load(path).data
    except Exception:  # somebody's own file, which need not be a card
        return original, None
    base = told.base_model[0] if isinstance(told.base_model, list) else told.base_model  # of a merge, the first
    return base or original, told.license


def _table(rows: Mapping[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())]


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
