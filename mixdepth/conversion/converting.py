"""`convert`: a pretrained model becomes a routed one that computes what it did before, to the bit.

The folder holds it at capacity 1 with gates of 1, and conversion.json says which capacity it is to come down to:
`mixdepth tune` leads it there.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mixdepth.config import DepthConfig, check_integer
from mixdepth.conversion.importance import cheapest, check_fit, fit_routers, layer_costs, windows_to_fit
from mixdepth.data.corpus import load_corpus
from mixdepth.files import check_name, read_json, write_json, writing
from mixdepth.hf.architectures import check_settings, decoder_layers
from mixdepth.hf.install import route, unroute
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.card import write_card
from mixdepth.models.loading import check_whole, load, positions
from mixdepth.runs.digests import write_digests
from mixdepth.runs.run import tokenizer_of

CONVERSION = "conversion.json"
WINDOWS = 4
"""Of text, to measure on."""


class Conversion(NamedTuple):
    """A model that was converted, as conversion.json tells of it."""

    original: str
    depth: DepthConfig
    """The routing to come down to."""
    costs: dict[int, float] | None
    """Nats per token that each layer's absence costs, where layers were chosen by it."""

    @classmethod
    def read(cls, folder: str | Path) -> "Conversion | None":
        """What a folder's conversion.json says; None if there is none."""
        path = Path(folder) / CONVERSION
        if not path.exists():
            return None
        found = read_json(path)
        try:
            costs = found["costs"] and {int(index): cost for index, cost in found["costs"].items()}
            return cls(found["original"], DepthConfig.from_dict(found["depth"]), costs)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): convert the model again") from error

    def write(self, folder: Path) -> None:
        write_json(folder / CONVERSION, {**self._asdict(), "depth": self.depth.to_dict()})


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
    """Route a pretrained model and save it in the new folder `out`: a folder, a name of the hub, or `smollm2`.

    Without `depth` the plain model is saved, and a routed one is unrouted for it. `choose="auto"` routes as many
    layers as `depth.every` says, but those that can best be spared, as measured by `layer_costs` on `windows`
    windows of the corpus (by default 4, or as many as a fit needs), of `context` tokens (by default 512, or as many as
    the model takes). `fit` starts routers by `fit_routers` on the same windows, and not at 0.
    """
    name = str(name)
    check_name(out)
    folder = Path(out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} exists already: choose another --out")
    if choose not in (None, "auto"):
        raise ValueError(f"choose must be auto, or be left out, not {choose!r}")
    if windows is not None:
        check_integer("windows", windows, minimum=1)
    if context is not None:
        check_integer("context", context, minimum=2)
    loaded = load(name)
    model, tokenizer = loaded.model, loaded.tokenizer
    check_whole(name, loaded, context or 1)
    conversion = None
    if depth is None:
        if choose is not None or fit:
            what = "fit" if fit else "choose"
            raise ValueError(f"a plain model has no routed layers to {what}: leave out {what}, or --dense")
        model = unroute(model) if isinstance(model, RoutedCausalLM) else model
    else:
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
        costs, batches = None, list[Tensor]()
        if choose is not None or fit:
            context = context or min(512, positions(model))
            number = _number_of_windows(windows, windows_to_fit(model, context) if fit else 1)
            text = load_corpus(corpus, tokenizer_of(name), text_field=text_field).train.windows(context)
            device = next(model.parameters()).device
            batches = [batch.to(device) for batch in text.spread(number).batches(4)]
        if choose is not None:
            depth, costs = choose_layers(model, depth, batches)
        model = route(model, replace(depth, capacity=1.0, init_std=0.0))
        if fit:
            fit_routers(model, batches)
        conversion = Conversion(name, replace(model.depth_config, capacity=depth.capacity), costs)
    with writing(folder), _new_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if conversion is not None:
            conversion.write(aside)
        about = {} if conversion is None else {"comes down to capacity": conversion.depth.capacity}
        write_card(aside, folder.name, model, name, about, {})
        write_digests(aside)
    return conversion


def _number_of_windows(windows: int | None, needed: int) -> int:
    if windows is None:
        return max(WINDOWS, needed)
    if windows < needed:
        raise ValueError(f"windows={windows} are too few to fit routers of this width: give at least {needed}")
    return windows


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `folder`; or vanishes if something goes wrong."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp made it the user's own
        if folder.exists():  # and is empty
            folder.rmdir()
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_open(depth: DepthConfig) -> None:
    """Refuse routing in which the layers are chosen already."""
    if depth.layers is not None:
        raise ValueError(f"layers={list(depth.layers)} has no meaning beside choose='auto': give one of them")
    if not isinstance(depth.capacity, float):
        raise ValueError("choose='auto' needs one capacity for all layers, not a list")


def choose_layers(model: Any, depth: DepthConfig, batches: Iterable[Tensor]) -> tuple[DepthConfig, dict[int, float]]:
    """The same routing on the layers that can best be spared, and what each layer's absence costs."""
    assert isinstance(depth.capacity, float)
    number = len(depth.routed_layers(len(decoder_layers(model))))
    costs = layer_costs(model, batches, depth.capacity, depth.target)
    return replace(depth, layers=cheapest(costs, number), every=2, first=None), costs


EXACT_GATES = ("unit", "straight", "one")
"""Gates that are 1 where scores are 0."""


def check_exact(depth: DepthConfig) -> None:
    """Refuse a routing under which a pretrained model would be broken before it is tuned."""
    if depth.gate not in EXACT_GATES:
        raise ValueError(
            f"gate={depth.gate!r} changes what a pretrained model computes before it is tuned: use gate='unit', which "
            "starts at 1"
        )
    if depth.scheme == "soft":
        raise ValueError("scheme='soft' processes every token and makes nothing cheaper: choose another scheme")
    if depth.experts is not None:
        raise ValueError(
            f"experts={depth.experts!r} changes the experts of a pretrained model before it is tuned: leave it out"
        )
