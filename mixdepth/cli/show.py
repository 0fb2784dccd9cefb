"""Verbs that show and measure."""

from typing import Any

from mixdepth.cli.flags import ROUTING_FLAGS, add_settings, add_shape, routing_settings, split
from mixdepth.config import DepthConfig
from mixdepth.settings import parse_value


def add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="train a small routed model for a minute and sample from it",
        description="Routes a small Llama, trains it on the Python standard library's source (nothing is "
        "downloaded), and prints its held-out loss, the realised capacity and a sample.",
    )
    demo.add_argument("--steps", type=int, default=800, help="how long to train (default: %(default)s, about a minute)")
    demo.add_argument(
        "--capacity", type=float, default=0.125, help="share of tokens per routed layer (default: %(default)s)"
    )
    demo.add_argument("--every", type=int, default=2, help="route every n-th layer (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of weights, data and sample (default: %(default)s)")
    demo.set_defaults(run=_demo)


def _demo(**options: Any) -> None:
    from mixdepth import demo

    demo.run(**options)


def add_bench(verbs: Any) -> None:
    bench = verbs.add_parser(
        "bench",
        help="time a routed model against a dense one on this machine",
        description="Times training, prefill and decoding of a routed model against the same model unrouted, counts "
        "the bytes of their caches, and prints beside each speed-up what FLOPs and bytes allow. A routed model is "
        "unrouted for it, a plain one is routed by the settings below and calibrated. Without a model: a Llama of "
        "the given shape over random tokens.",
        epilog="example: mixdepth bench --layers 8 --width 512 --capacity 0.125",
    )
    bench.add_argument("model", nargs="?", help="a run, a checkpoint, a folder, a name of the hub, or smollm2")
    bench.add_argument("--corpus", help="the text of prompts (default: the run's own, or stdlib)")
    for name, default, about in (
        ("batch-sizes", "1,8", "rows in prefill and decoding (default: 1,8)"),
        ("prompts", None, "their lengths (default: 16,1000, or as long as the model takes)"),
    ):
        bench.add_argument(f"--{name}", type=parse_value, default=default, help=about)
    bench.add_argument("--new-tokens", type=int, default=64, help="after each prompt (default: %(default)s)")
    bench.add_argument(
        "--train-batch-size", type=int, default=4, help="windows in a training step; 0 is none (default: %(default)s)"
    )
    bench.add_argument("--train-context", type=int, help="tokens in a window (default: 512, or what the model takes)")
    bench.add_argument("--repeats", type=int, default=5, help="of which the median is taken (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the numbers to this file too; - prints them instead")
    add_shape(bench.add_argument_group("shape, in place of a model"))
    add_settings(bench.add_argument_group("routing"), DepthConfig, ROUTING_FLAGS, prefix="depth_")
    bench.set_defaults(run=_bench)


def _bench(model: str | None, corpus: str | None, json: str | None, **options: Any) -> None:
    from mixdepth.bench import fresh_pair, measure_speed, pair_of
    from mixdepth.files import as_json, write_json

    routing = routing_settings(split(options, "depth_"))
    shape = {name: value for name, value in split(options, "shape_").items() if value is not None}
    for name in ("batch_sizes", "prompts"):
        if not isinstance(options[name], tuple | None):
            options[name] = (options[name],)
    if model is None:
        if corpus is not None:
            raise ValueError(f"--corpus {corpus} has no meaning without a model: a fresh one runs on random tokens")
        pair = fresh_pair(shape, routing)
    elif shape:
        raise ValueError(f"{next(iter(shape))} has no meaning beside a model, which has its own shape: leave it out")
    else:
        pair = pair_of(model, routing, corpus)
    found = measure_speed(pair.dense, pair.routed, pair.text, notes=pair.notes, **options)
    print(as_json(found.to_dict()) if json == "-" else found, end="" if json == "-" else "\n")
    if json not in (None, "-"):
        write_json(json, found.to_dict())
