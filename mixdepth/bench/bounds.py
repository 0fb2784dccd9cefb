"""The least work of a pass: FLOPs to compute and bytes to read. Their ratio bounds what routing can save.

Shapes: B batch, T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixdepth.bench.timing import CacheSize
from mixdepth.hf.architectures import decoder_layers, dense_half, half_modules, target_of, tokens_of_halves
from mixdepth.hf.layer import RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.private import has_last_logits
from mixdepth.models.flops import check_counted, count_flops, layer_flops, token_flops
from mixdepth.router import Chooser


class Work(NamedTuple):
    """The least work that something takes; None where it is not counted."""

    flops: int | None = None
    bytes: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        return self._asdict()


@torch.no_grad()
def tokens_taken(model: Any, ids: Tensor) -> list[Tensor]:
    """Return which of the tokens (B, T) each decoder layer takes in its routed part: one mask (B, T) for each layer.

    A layer that is not routed takes all tokens. Routing is causal, so the masks are the same with a cache and without.
    """
    all_tokens = torch.ones_like(ids, dtype=torch.bool)  # (B, T)
    layers = decoder_layers(model)
    if not isinstance(model, RoutedCausalLM):
        return [all_tokens] * len(layers)
    out: Any = model(input_ids=ids, use_cache=False, output_routes=True, **last_logits(model))
    routes = iter(out.routes)
    masks = []
    chosen = all_tokens
    for layer in layers:
        if not isinstance(layer, RoutedLayer):
            masks.append(all_tokens)
            continue
        # Under early exit, a layer without a router takes the tokens that the last exit before it kept.
        if layer.depth_router is not None:
            chosen = next(routes).mask
        masks.append(chosen)
    return masks


def share_taken(model: Any, taken: Sequence[Tensor]) -> float | None:
    """Return the share of tokens that routed layers took, on average; None if no layer is routed."""
    pairs = zip(decoder_layers(model), taken, strict=True)
    routed = [mask for layer, mask in pairs if isinstance(layer, RoutedLayer)]
    if not routed:
        return None
    return torch.stack(routed).double().mean().item()


def last_logits(model: Any) -> dict[str, int]:
    """Return the argument with which generate() asks a model for the logits of the last token alone."""
    return {"logits_to_keep": 1} if has_last_logits(model) else {}


def step_work(model: Any, batch_size: int, context: int) -> Work:
    """Return the work of a training step: three forward passes at the configured capacity."""
    try:
        return Work(3 * batch_size * count_flops(model, context).total)
    except ValueError:  # not every architecture is counted
        return Work()


def prefill_work(model: Any, taken: Sequence[Tensor]) -> Work:
    """Return the work of a pass over prompts, with the logits of their last token, for the tokens that were taken."""
    batch_size, num_tokens = taken[0].shape
    flops = 0
    try:
        for row in range(batch_size):
            counts = {index: int(mask[row].sum()) for index, mask in enumerate(taken)}
            count = count_flops(model, num_tokens, counts)
            logits = count.logits
            if last_logits(model):
                logits //= num_tokens
            flops += count.total - count.logits + logits
    except ValueError:  # not every architecture is counted
        return Work()
    return Work(flops)


def decode_work(model: Any, taken: Sequence[Tensor], prompt_length: int, cache: CacheSize) -> Work:
    """Return the work of the steps after the prompt, one for each token.

    A step reads the weights of all parts that some row goes through, of the head and of the routers, and the keys and
    values of the rows that attend. A layer that a row skips reads nothing of that row's cache.
    """
    attends = []  # (B, new tokens) for each layer: the tokens that its attention takes
    feeds = []  # (B, new tokens) for each layer: the tokens that its MLP takes
    pairs = []  # for each layer, the number of pairs of a query and a key
    for layer, mask, window in zip(decoder_layers(model), taken, cache.windows, strict=True):
        attending, feeding = tokens_of_halves(layer, torch.ones_like(mask), mask)  # (B, T) each
        keys = keys_in_reach(attending, window)  # (B, T)
        pairs.append(int((keys * attending)[:, prompt_length:].sum()))
        attends.append(attending[:, prompt_length:])
        feeds.append(feeding[:, prompt_length:])
    return Work(_decode_flops(model, attends, feeds, pairs), _decode_bytes(model, attends, feeds, pairs, cache))


def keys_in_reach(attending: Tensor, window: int | None) -> Tensor:
    """Return how many keys each token can attend to, including its own: (B, T).

    The tokens `attending` (B, T) have a key. A sliding window reaches back over its last columns only.
    """
    keys = attending.cumsum(1)
    if window is not None and window < attending.shape[1]:
        keys[:, window:] -= attending.cumsum(1)[:, :-window]
    return keys


def _decode_flops(model: Any, attends: list[Tensor], feeds: list[Tensor], pairs: list[int]) -> int | None:
    """Return the FLOPs of all steps; None for architectures whose FLOPs are not counted."""
    config = model.config.get_text_config(decoder=True)
    num_tokens = attends[0].numel()
    try:
        check_counted(model)
        flops = num_tokens * token_flops(model.get_output_embeddings())
        for layer, attending, feeding, num_pairs in zip(decoder_layers(model), attends, feeds, pairs, strict=True):
            flops += sum(layer_flops(layer, config, int(attending.sum()), num_pairs, int(feeding.sum())))
            flops += num_tokens * sum(token_flops(router) for router in _routers(layer))
    except ValueError:  # not every architecture is counted
        return None
    return flops


def _decode_bytes(
    model: Any, attends: list[Tensor], feeds: list[Tensor], pairs: list[int], cache: CacheSize
) -> int | None:
    """Return the bytes that all steps read; None where there are experts, because each token reads some of them."""
    num_steps = attends[0].shape[1]
    total = num_steps * _parameter_bytes(model.get_output_embeddings())
    for index, layer in enumerate(decoder_layers(model)):
        if any(parameter.ndim > 2 for parameter in layer.parameters()):
            return None
        target = target_of(layer)
        # 1. Every step reads the routers, and the half that is not routed.
        always_read = sum(_parameter_bytes(router) for router in _routers(layer))
        half = dense_half(target)
        if half is not None:
            always_read += sum(_parameter_bytes(module) for module in half_modules(layer, half))
        # 2. A step in which some row chose the routed part reads that part, too.
        routed_bytes = _parameter_bytes(layer) - always_read
        chosen = attends[index] if target == "attention" else feeds[index]  # (B, new tokens)
        num_chosen_steps = int(chosen.any(0).sum())
        # 3. Each pair of a query and a key reads that key, and its value.
        cache_bytes = pairs[index] * cache.token_bytes[index]
        total += num_steps * always_read + num_chosen_steps * routed_bytes + cache_bytes
    return total


def _routers(layer: Any) -> list[Chooser]:
    return [module for module in layer.modules() if isinstance(module, Chooser)]


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
