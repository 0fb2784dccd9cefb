"""Writes docs/architectures.md: the architectures that the tests hold to the laws, and the refused ones."""

import sys
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mixdepth.hf.architectures import EXPERTS, HALVES, REFUSED, decoder_layers
from mixdepth.hf.names import SUPPORTED

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PAGE = Path(__file__).with_name("architectures.md")

INTRODUCTION = """\
# Architectures

These {number} architectures of transformers 5.22 can be routed. The list is that of
`mixdepth.supported_architectures()`, over which `tests/laws/` runs every law: a tiny random
model of each, with grouped-query attention, a sliding window shorter than the test, and layer 0 routed.
This page is written by `make docs`, and a test fails when it is out of date.

*By halves* are those that `target` and `gate_on` can be used with; experts are *settable* by `experts`
([the family](family.md)).

| model type | class | decoder layer | attention | by halves | experts |
|---|---|---|---|---|---|
"""

REFUSALS = """
## Refused

`mixdepth.route` refuses everything else by name, before it changes the model. The reasons:

| model types | reason |
|---|---|
"""


def page() -> str:
    from tiny import dense

    text = INTRODUCTION.format(number=len(SUPPORTED))
    for name in SUPPORTED:
        model = dense(name)
        layer = type(decoder_layers(model)[0]).__name__
        windows = bool(getattr(model.config, "sliding_window", None)) and "sliding" in str(mask_types(model))
        attention = "sliding window" if windows else "full"
        experts = "yes" if any("experts" in key for key in model.state_dict()) else ""
        experts = "yes, settable" if name in EXPERTS else experts
        halves = "yes" if name in HALVES else ""
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]].__name__
        text += f"| `{name}` | {model_class} | {layer} | {attention} | {halves} | {experts} |\n"
    text += REFUSALS
    for reason in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{name}`" for name, why in REFUSED.items() if why == reason)
        text += f"| {names} | {reason} |\n"
    text += "| encoders, encoder-decoders | only causal language models are sampled token by token |\n"
    return text + "| models that are quantised by something else than bitsandbytes | no test covers them |\n"


def mask_types(model: object) -> set[str]:
    """The kinds of layers that the model's cache distinguishes."""
    from transformers import DynamicCache

    return {"sliding" if layer.is_sliding else "full" for layer in DynamicCache(config=model.config).layers}


if __name__ == "__main__":
    PAGE.write_text(page())
