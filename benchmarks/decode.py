"""Decoding with a routed model against the same model unrouted, under transformers' own generate().

113 M parameters (width 768, 12 layers, bytes), every second layer routed, predictors set so that they
choose 12.5 % of the tokens. Sampling, batches of 1 and 8, prompts of 16 and 1,000 tokens; the models
take turns and the median of their ratios counts; the prompt's time is left out.

The script prints two limits next to the speed-up. By bytes: a step reads every weight that some row passes, and all
keys and values; a routed layer's weights are read if any row chose it. By FLOPs: only what was chosen is
computed. One row is bound by bytes; with many rows a dense layer is bound by FLOPs too, and a routed one,
which runs for few of them, saves more than its bytes.

    python benchmarks/decode.py
"""

import argparse
from typing import Any

from machine import describe, header, row

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--repeats", type=int, default=11)
parser.add_argument("--new-tokens", type=int, default=32)
parser.add_argument("--capacity", type=float, default=0.125)
parser.add_argument("--vocab-size", type=int, default=256, help="a larger head is read for every token, routed or not")
WIDTH, NUM_LAYERS = 768, 12


def set_choice(model: Any, capacity: float) -> None:
    """Move each predictor's threshold, layer by layer, so that it chooses this share of random tokens."""
    import torch

    ids = torch.randint(model.config.vocab_size, (4, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for index, router in enumerate(model.depth_routers):
            logits = model(ids, output_routes=True, use_cache=False).routes[index].predictor_logits
            router.predictor.down.bias -= logits.float().quantile(1 - capacity)


def main(repeats: int, new_tokens: int, capacity: float, vocab_size: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import mixdepth
    from mixdepth.bench import Spread, decode_in_turns

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    dense = AutoModelForCausalLM.from_config(config).eval()
    routed = AutoModelForCausalLM.from_config(config)
    routed.load_state_dict(dense.state_dict())
    routed = mixdepth.route(routed, capacity=capacity, every=2).eval()
    set_choice(routed, capacity)
    models = {"dense": dense, "routed": routed}

    layer = sum(p.numel() for n, p in dense.model.layers[0].named_parameters()) * 4
    head = dense.lm_head.weight.nbytes
    print(f"{describe()}\n{dense.num_parameters() / 1e6:.0f} M parameters, fp32, {new_tokens} new tokens each")
    names = ("batch", "prompt", "dense tokens/s", "routed tokens/s", "speed-up", "by bytes", "by FLOPs", "chosen")
    header(*names, "cache", "allocated")
    for batch_size in (1, 8):
        for length in (16, 1000):
            prompt = torch.randint(vocab_size, (batch_size, length))
            # without top_k tokens are random, so that the choice stays at its share
            texts = decode_in_turns(models, prompt, new_tokens, repeats, same_text=False, top_k=0)
            speeds = {name: [text.tokens_per_second for text in found] for name, found in texts.items()}
            caches = {name: found[-1].cache for name, found in texts.items()}
            stored = [caches["routed"].stored[i] / caches["dense"].stored[i] for i in routed.deciding_layers]
            realised = sum(stored) / len(stored)
            # bytes that a step must read: all weights that some row passes, and the caches
            any_row = sum(1 - (1 - share) ** batch_size for share in stored)
            dense_held, held, allocated = caches["dense"].held, caches["routed"].held, caches["routed"].allocated
            dense_bytes = NUM_LAYERS * layer + head + dense_held
            routed_bytes = (NUM_LAYERS - len(stored) + any_row) * layer + head + held
            flop_limit = NUM_LAYERS / (NUM_LAYERS - len(stored) + sum(stored))
            row(
                batch_size,
                length,
                f"{Spread.of(speeds['dense']):.1f}",
                f"{Spread.of(speeds['routed']):.1f}",
                f"{Spread.of_ratios(speeds['routed'], speeds['dense']):.2f}",
                f"{dense_bytes / routed_bytes:.2f}",
                f"{flop_limit:.2f}",
                f"{realised:.1%}",
                f"{held / dense_held:.1%} of {dense_held / 1e6:.1f} MB",
                f"{allocated / dense_held:.1%}",
            )


if __name__ == "__main__":
    arguments = vars(parser.parse_args())
    main(**arguments)
