"""The model card of a folder: what the model is, how it is routed, what was measured, and how to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from mixdepth.files import write_text
from mixdepth.hf import smollm2
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import PREFIX

CARD = "README.md"
ROUTING_SETTINGS = ("scheme", "capacity", "target", "gate", "causal")
"""Settings of the routing that a card lists, besides the routed layers."""


class Origin(NamedTuple):
    """What a model was made from in the end, and its licence."""

    base: str | None
    licence: str | None

    @property
    def is_local(self) -> bool:
        """Whether the base is a folder, which others do not have, and not a name of the hub."""
        return self.base is None or Path(self.base).is_absolute() or Path(self.base).exists()


def write_card(
    folder: Path, title: str, model: Any, original: str | None, about: Mapping[str, Any], measured: Mapping[str, Any]
) -> None:
    """Write README.md for the model that was saved in this folder; `about` and `measured` become tables."""
    origin = _origin(original)
    is_routed = isinstance(model, RoutedCausalLM)
    lines = [*_head(title, origin, is_routed), "", *_description(model, origin)]
    if about:
        lines += ["", *_table(about)]
    if measured:
        lines += ["", "## Measured", "", *_table(measured)]
    lines += ["", *_use(title, is_routed)]
    write_text(folder / CARD, "\n".join(lines) + "\n")


def _head(title: str, origin: Origin, is_routed: bool) -> list[str]:
    """Return the metadata that the hub reads, and the title."""
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mixture-of-depths", "mixdepth"] if is_routed else None,
        base_model=None if origin.is_local else origin.base,
        license=origin.licence,
    )
    return ["---", metadata.to_yaml(), "---", "", f"# {title}"]


def _description(model: Any, origin: Origin) -> list[str]:
    """Say what the model is, and how it is routed."""
    kind = model.config.model_type.removeprefix(PREFIX)
    sentence = f"A {kind} model"
    if origin.base is not None:
        base = Path(origin.base).name if origin.is_local else origin.base
        sentence += f" made from {base}"
    lines = [f"{sentence}."]
    if isinstance(model, RoutedCausalLM):
        settings = {name: getattr(model.depth_config, name) for name in ROUTING_SETTINGS}
        lines += [
            "It is a [Mixture-of-Depths](https://arxiv.org/abs/2404.02258) transformer: routed layers process some "
            "of the tokens and are skipped by the others.",
            "",
            *_table({"routed layers": model.deciding_layers, **settings}),
        ]
    return lines


def _use(title: str, is_routed: bool) -> list[str]:
    """Show how the model is loaded."""
    lines = ["## Use", "", "```python"]
    if is_routed:
        lines.append("import mixdepth  # makes routed models known to transformers")
    lines += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{title}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{title}")',
        "```",
    ]
    return lines


def write_adapter_card(folder: Path, title: str, original: str) -> None:
    """Write README.md for an adapter, in place of the empty form that peft writes."""
    write_text(
        folder / CARD,
        f"# Adapter of {title}\n\nLow-rank adapters and routers for the converted model {Path(original).name}, which "
        "is at capacity 1: bring it down with `mixdepth.set_capacity` before you put this on. The folder above holds "
        "the merged model.\n",
    )


def _origin(original: str | None) -> Origin:
    """Find what a model was made from in the end. A local folder's own card may say what that one was made from."""
    if original == smollm2.NAME:
        return Origin(smollm2.HUB_NAME, smollm2.LICENCE)
    if original is None:
        return Origin(None, None)
    path = Path(original) / CARD
    if not path.is_file():
        return Origin(original, None)
    try:
        metadata = ModelCard.load(path).data
    except Exception:  # a README.md that a user wrote need not be a card
        return Origin(original, None)
    base = metadata.base_model
    if isinstance(base, list):  # of a merge
        base = base[0]
    return Origin(base or original, metadata.license)


def _table(rows: Mapping[str, Any]) -> list[str]:
    """Return a table of two columns in Markdown."""
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())]


def _cell(value: Any) -> str:
    """Return a value as it stands in a table."""
    if isinstance(value, list | tuple):
        return ", ".join(_cell(part) for part in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
