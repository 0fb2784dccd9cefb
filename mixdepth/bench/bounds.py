"""The least that a pass must do: FLOPs to compute and bytes to read. Their ratio is what routing can save at most.

Shapes: B batch, T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixdepth.bench.timing import CacheSize
from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.layer import RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.flops import check_counted, count_flops, halves, layer_flops, token_flops
from mixdepth.router import Chooser

HALVES = {"attention": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")}
"""What the halves of a layer are made of, where one of them alone is routed."""


class Work(NamedTuple):
    """What something takes at least; None where that is not counted."""

    flops: int | None = None
    bytes: int | None = None


@torch.no_grad()
def tokens_taken(model: Any, ids: Tensor) -> list[Tensor]:
    """For each decoder layer, which of the tokens (B, T) its routed part takes; a layer that is not routed takes all.

    As decided causally, over a cache or without: it is the same.
    """
    everyone = torch.ones_like(ids, dtype=torch.bool)
    layers = decoder_layers(model)
    if not isinstance(model, RoutedCausalLM):
        return [everyone] * len(layers)
    out: Any = model(input_ids=ids, use_cache=False, output_routes=True, **last_logits(model))
    routes = iter(out.routes)
    taken, chosen = [], everyone
    for layer in layers:
        is_routed = isinstance(layer, RoutedLayer)
        if is_routed and layer.depth_router is not None:  # else who is left goes on, under early exit
            chosen = next(routes).mask
        taken.append(chosen if is_routed else everyone)
    return taken


def share_taken(model: Any, taken: Sequence[Tensor]) -> float | None:
    """The realised capacity: of the tokens, how many routed layers took, on average; None if no layer is routed."""
    pairs = zip(decoder_layers(model), taken, strict=True)
    routed = [mask for layer, mask in pairs if isinstance(layer, RoutedLayer)]
    return torch.stack(routed).double().mean().item() if routed else None


def last_logits(model: Any) -> dict[str, int]:
    """An argument by which a model computes logits of the last token alone, as generate() asks it to."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


def step_work(model: Any, batch_size: int, context: int) -> Work:
    """Of a training step, three times a forward pass, at the configured capacity."""
    try:
        return Work(3 * batch_size * count_flops(model, context).total)
    except ValueError:  # not every architecture is counted
        return Work()


def prefill_work(model: Any, taken: Sequence[Tensor]) -> Work:
    """Of a pass over prompts, with the logits of their last token, at what was taken."""
    num_tokens = taken[0].shape[1]
    flops = 0
    try:
        for row in range(len(taken[0])):
            count = count_flops(model, num_tokens, {i: int(mask[row].sum()) for i, mask in enumerate(taken)})
            logits = count.logits // num_tokens if last_logits(model) else count.logits
            flops += count.total - count.logits + logits
    except ValueError:
        return Work()
    return Work(flops)


def decode_work(model: Any, taken: Sequence[Tensor], prompt_length: int, cache: CacheSize) -> Work:
    """Of the steps after the prompt, one for each token.

    A step reads the weights of what some row goes through, with the head's and the routers', and the keys and values
    of the rows that attend. A layer that a row skips reads nothing of that row's cache.
    """
    attends, feeds, pairs = [], [], []
    for layer, mask, window in zip(decoder_layers(model), taken, cache.windows, strict=True):
        attending, feeding = halves(layer, torch.ones_like(mask), mask)  # (B, T)
        keys = keys_in_reach(attending, window)
        pairs.append(int((keys * attending)[:, prompt_length:].sum()))
        attends.append(attending[:, prompt_length:])
        feeds.append(feeding[:, prompt_length:])
    return Work(_decode_flops(model, attends, feeds, pairs), _decode_bytes(model, attends, feeds, pairs, cache))


def keys_in_reach(attending: Tensor, window: int | None) -> Tensor:
    """(B, T): how many keys there are for a token to attend to, its own among them, where these tokens (B, T) have
    one; within a sliding window only its last columns."""
    keys = attending.cumsum(1)
    if window is not None and window < attending.shape[1]:
        keys[:, window:] -= attending.cumsum(1)[:, :-window]
    return keys


def _decode_flops(model: Any, attends: list[Tensor], feeds: list[Tensor], pairs: list[int]) -> int | None:
    config = model.config.get_text_config(decoder=True)
    num_tokens = attends[0].numel()
    try:
        check_counted(model)
        flops = num_tokens * token_flops(model.get_output_embeddings())
        for layer, attending, feeding, met in zip(decoder_layers(model), attends, feeds, pairs, strict=True):
            flops += sum(layer_flops(layer, config, int(attending.sum()), met, int(feeding.sum())))
            flops += num_tokens * sum(token_flops(router) for router in _routers(layer))
    except ValueError:
        return None
    return flops


def _decode_bytes(
    model: Any, attends: list[Tensor], feeds: list[Tensor], pairs: list[int], cache: CacheSize
) -> int | None:
    """None where there are experts, of which each token reads some."""
    num_steps = attends[0].shape[1]
    total = num_steps * _parameter_bytes(model.get_output_embeddings())
    for i, layer in enumerate(decoder_layers(model)):
        if any(parameter.ndim > 2 for parameter in layer.parameters()):
            return None
        target = getattr(layer, "depth_target", "block")
        every_time = sum(_parameter_bytes(router) for router in _routers(layer))
        if target != "block":
            kept = HALVES["mlp" if target == "attention" else "attention"]
            every_time += sum(_parameter_bytes(layer.get_submodule(name)) for name in kept)
        at_times = _parameter_bytes(layer) - every_time
        chosen = attends[i] if target == "attention" else feeds[i]
        total += num_steps * every_time + int(chosen.any(0).sum()) * at_times + pairs[i] * cache.token_bytes[i]
    return total


def _routers(layer: Any) -> list[Chooser]:
    return [module for module in layer.modules() if isinstance(module, Chooser)]


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
