"""`convert`: a pretrained model becomes a routed one that computes what it did before, to the bit.

The folder holds the model at capacity 1 with gates of 1, and conversion.json names the capacity that it is meant for.
`mixdepth tune` leads it down to that capacity.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mixdepth import schemes
from mixdepth.config import DepthConfig, check_integer
from mixdepth.conversion.fitting_routers import check_fit, fit_routers, windows_to_fit
from mixdepth.conversion.importance import cheapest, layer_costs
from mixdepth.data.corpus import load_corpus
from mixdepth.files import check_name, read_json, write_json, writing
from mixdepth.hf.architectures import check_settings, decoder_layers
from mixdepth.hf.install import route, unroute
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.card import write_card
from mixdepth.models.loading import check_whole, load, positions
from mixdepth.runs.digests import write_digests
from mixdepth.runs.run import tokenizer_of
from mixdepth.version import made_by

CONVERSION = "conversion.json"

NUM_WINDOWS = 4
"""How many windows of text layers are measured on by default."""

DEFAULT_CONTEXT = 512
"""The length of these windows in tokens, if the model takes as many."""

EXACT_GATES = ("unit", "straight", "one")
"""Gates that are 1 where scores are 0."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model that was converted, as conversion.json describes it."""

    original: str
    depth: DepthConfig
    """The routing that the model is meant for. It comes down to this capacity when it is tuned."""
    costs: dict[int, float] | None
    """Nats per token that the absence of each layer costs, if layers were chosen by it."""

    @classmethod
    def read(cls, folder: str | Path) -> "Conversion | None":
        """Read the conversion.json of a folder; None if there is none."""
        path = Path(folder) / CONVERSION
        if not path.exists():
            return None
        values = read_json(path)
        try:
            costs = values["costs"]
            if costs is not None:
                costs = {int(index): cost for index, cost in costs.items()}
            return cls(original=values["original"], depth=DepthConfig.from_dict(values["depth"]), costs=costs)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): convert the model again") from error

    def to_dict(self) -> dict[str, Any]:
        return {"original": self.original, "depth": self.depth.to_dict(), "costs": self.costs}

    def write(self, folder: Path) -> None:
        write_json(folder / CONVERSION, {**self.to_dict(), "versions": made_by()})


def convert(
    name: str | Path,
    out: str | Path,
    depth: DepthConfig | None = None,
    *,
    choose: str | None = None,
    fit: bool = False,
    corpus: str = "stdlib",
    text_field: str = "text",
    windows: int | None = None,
    context: int | None = None,
) -> Conversion | None:
    """Route a pretrained model and save it in the new folder `out`.

    `name` is a folder, a name of the hub, or `smollm2`. Without `depth` the plain model is saved, and a routed model is
    unrouted for it. `choose="auto"` routes as many layers as `depth.every` says, but those whose absence costs least,
    as measured by `layer_costs` on text. `fit` starts routers by `fit_routers` on the same text, and not at 0. The text
    is that of `windows` windows of the corpus (by default 4, or as many as the fit needs) of `context` tokens (by
    default 512, or as many as the model takes).
    """
    # 1. Check the arguments, as far as that is possible before the model is loaded.
    name = str(name)
    folder = _check_folder(out)
    if choose not in (None, "auto"):
        raise ValueError(f"choose must be auto, or be left out, not {choose!r}")
    if windows is not None:
        check_integer("windows", windows, minimum=1)
    if context is not None:
        check_integer("context", context, minimum=2)
    # 2. Load the model.
    loaded = load(name)
    model = loaded.model
    check_whole(name, loaded, context or 1)
    # 3. Route it, or take out the routers that are there.
    conversion = None
    if depth is None:
        if choose is not None or fit:
            flag = "fit" if fit else "choose"
            raise ValueError(f"a plain model has no routed layers to {flag}: leave out {flag}, or --dense")
        if isinstance(model, RoutedCausalLM):
            model = unroute(model)
    else:
        _check_routing(name, model, depth, choose, fit)
        costs = None
        batches: list[Tensor] = []  # (4, context) each; the last may have fewer rows
        if choose is not None or fit:
            length = context or min(DEFAULT_CONTEXT, positions(model))
            least = windows_to_fit(model, length) if fit else 1
            number = _number_of_windows(windows, least)
            batches = _read_windows(model, corpus, tokenizer_of(name), text_field, number, length)
        if choose is not None:
            depth, costs = choose_layers(model, depth, batches)
        model = route(model, replace(depth, capacity=1.0, init_std=0.0))
        if fit:
            fit_routers(model, batches)
        meant_for = replace(model.depth_config, capacity=depth.capacity)
        conversion = Conversion(original=name, depth=meant_for, costs=costs)
    # 4. Write the folder, whole or not at all.
    with writing(folder), _new_folder(folder) as aside:
        model.save_pretrained(aside)
        loaded.tokenizer.save_pretrained(aside)
        facts = {}
        if conversion is not None:
            conversion.write(aside)
            facts["comes down to capacity"] = conversion.depth.capacity
        write_card(aside, folder.name, model, name, facts, {})
        write_digests(aside)
    return conversion


def _check_folder(out: str | Path) -> Path:
    """Refuse a folder that holds something already; return its absolute path."""
    check_name(out)
    folder = Path(out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} exists already: choose another --out")
    return folder


def _check_routing(name: str, model: Any, depth: DepthConfig, choose: str | None, fit: bool) -> None:
    """Refuse a routing that this model cannot have, or that would not be exact."""
    check_exact(depth)
    if depth.capacity == 1:
        raise ValueError("capacity=1 leaves nothing to come down to: choose a lower one")
    if isinstance(model, RoutedCausalLM):
        raise ValueError(f"{name!r} is routed already: take its routers out first, with --dense")
    check_settings(model, depth)
    if choose is not None:
        check_open(depth)
    if fit:
        check_fit(depth)


def _number_of_windows(windows: int | None, least: int) -> int:
    if windows is None:
        return max(NUM_WINDOWS, least)
    if windows < least:
        raise ValueError(f"windows={windows} are too few to fit routers of this width: give at least {least}")
    return windows


def _read_windows(model: Any, corpus: str, tokenizer: str, text_field: str, number: int, context: int) -> list[Tensor]:
    """Read evenly spaced windows of the training text, in batches (4, context) on the device of the model."""
    windows = load_corpus(corpus, tokenizer, text_field=text_field).train.windows(context)
    device = next(model.parameters()).device
    return [batch.to(device) for batch in windows.spread(number).batches(4)]


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which then takes the place of `folder`. After an error nothing is left of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp made it readable by its owner alone
        if folder.exists():  # and is empty
            folder.rmdir()
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_open(depth: DepthConfig) -> None:
    """Refuse routing whose layers are chosen already."""
    if depth.layers is not None:
        raise ValueError(f"layers={list(depth.layers)} has no meaning next to choose='auto': give one of them")
    if not isinstance(depth.capacity, float):
        raise ValueError("choose='auto' needs one capacity for all layers, not a list")


def choose_layers(model: Any, depth: DepthConfig, batches: Iterable[Tensor]) -> tuple[DepthConfig, dict[int, float]]:
    """Return the same routing on the layers whose absence costs least, and what the absence of each layer costs."""
    assert isinstance(depth.capacity, float)
    number = len(depth.routed_layers(len(decoder_layers(model))))
    costs = layer_costs(model, batches, depth.capacity, depth.target)
    return replace(depth, layers=cheapest(costs, number), every=2, first=None), costs


def check_exact(depth: DepthConfig) -> None:
    """Refuse a routing that would change what a pretrained model computes before it is tuned."""
    if depth.gate not in EXACT_GATES:
        raise ValueError(
            f"gate={depth.gate!r} changes what a pretrained model computes before it is tuned: use gate='unit', which "
            "starts at 1"
        )
    if schemes.processes_everything(depth.scheme):
        raise ValueError(
            f"scheme={depth.scheme!r} processes every token and makes nothing cheaper: choose another scheme"
        )
    if depth.experts is not None:
        raise ValueError(
            f"experts={depth.experts.scheme!r} changes the experts of a pretrained model before it is tuned: leave it "
            "out"
        )
