"""A training step of a routed model against the same model unrouted.

Width 512, 8 layers, 4 sequences of 512 bytes, every second layer routed at 12.5 %; forward, backward
and AdamW, in fp32 and in bf16 autocast. The limit is the ratio of FLOPs; the goal is to stay within
1.08 times of it. Steps of the two models take turns; the median of their ratios counts.

    python benchmarks/step.py
"""

import argparse
import contextlib

from machine import avoid_broken_amx, describe, header, row

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--repeats", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=4)
WIDTH, NUM_LAYERS, LENGTH = 512, 8, 512


def main(repeats: int, batch_size: int) -> None:
    import torch
    from small import byte_llama

    import mixdepth
    from mixdepth.bench import Spread, interleave
    from mixdepth.models.flops import count_flops

    torch.manual_seed(0)
    models = {"dense": byte_llama(WIDTH, NUM_LAYERS, LENGTH).train()}
    models["routed"] = mixdepth.route(byte_llama(WIDTH, NUM_LAYERS, LENGTH), capacity=0.125, every=2).train()
    flops = {name: count_flops(model, LENGTH).total for name, model in models.items()}
    flop_ratio = flops["routed"] / flops["dense"]
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for name, model in models.items()}
    ids = torch.randint(256, (batch_size, LENGTH))
    print(f"{describe()}\n{models['dense'].num_parameters() / 1e6:.1f} M parameters, batch {batch_size} x {LENGTH}")
    header("precision", "dense s", "routed s", "time ratio", "FLOP ratio", "time / FLOPs", "dense GFLOP/s")
    for precision in ("fp32", "bf16 autocast"):

        def step(name: str, precision: str = precision) -> None:
            cast = torch.autocast("cpu", torch.bfloat16) if precision != "fp32" else contextlib.nullcontext()
            with cast:
                loss = models[name](ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()

        seconds = interleave({name: (lambda name=name: step(name)) for name in models}, repeats)
        dense, routed = Spread.of(seconds["dense"]), Spread.of(seconds["routed"])
        ratio = Spread.of_ratios(seconds["routed"], seconds["dense"])
        row(
            precision,
            f"{dense:.3f}",
            f"{routed:.3f}",
            f"{ratio:.3f}",
            f"{flop_ratio:.3f}",
            f"{ratio.median / flop_ratio:.3f}",
            f"{3 * flops['dense'] * batch_size / dense.median / 1e9:.0f}",
        )


if __name__ == "__main__":
    arguments = parser.parse_args()
    avoid_broken_amx()
    main(arguments.repeats, arguments.batch_size)
