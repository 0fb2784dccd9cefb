"""Law 2: exactly k tokens of each row are processed, and the others are left as they were."""

from dataclasses import dataclass
from typing import Any

import torch
from oracle import rounded_up
from tiny import NUM_LAYERS
from torch import Tensor
from variants import every_case, left_padded, shared

import mixdepth
from mixdepth.hf.layer import RoutedLayer


@dataclass
class Pass:
    """What one routed layer did in a pass with look-ahead."""

    router: Any
    """The layer's own, or behind an exit the exit's."""
    route: Any
    before: Tensor
    """(B, T, D): the stream in front of the layer."""
    after: Tensor
    """(B, T, D): the stream behind it."""


def passes(model, ids, mask):
    """Run the model with look-ahead, and watch its routed layers."""
    streams = {}

    def watch(layer, args, kwargs, out):
        streams[layer.depth_index] = (args[0], out)

    hooks = []
    for layer in model.modules():
        if isinstance(layer, RoutedLayer):
            hooks.append(layer.register_forward_hook(watch, with_kwargs=True))
    with mixdepth.lookahead(model):
        out = model(ids, attention_mask=mask, output_routes=True)
    for hook in hooks:
        hook.remove()
    deciding = list(model.depth_config.routed_layers(NUM_LAYERS))
    results = []
    for index, (before, after) in streams.items():
        number = len([i for i in deciding if i <= index]) - 1  # of the layer itself, or of the last exit before it
        router, route = model.depth_routers[number], out.routes[number]
        results.append(Pass(router=router, route=route, before=before, after=after))
    return results


@every_case
def test_exactly_k_tokens_of_each_row_are_chosen(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    for layer in passes(model, ids, mask):
        route = layer.route
        expected = [rounded_up(layer.router.capacity, length) for length in mask.sum(1).tolist()]
        if layer.router.scheme == "token_choice":  # fewer where fewer tokens want to pass
            num_willing = (route.real & (route.logits > layer.router.cutoff)).sum(1).tolist()
            expected = [min(k, willing) for k, willing in zip(expected, num_willing, strict=True)]
        assert route.count.tolist() == expected


@every_case
def test_padding_is_not_chosen(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    for layer in passes(model, ids, mask):
        assert not (layer.route.mask & (mask == 0)).any()


@every_case
def test_chosen_tokens_change_and_the_others_are_left_to_the_bit(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    if model.depth_config.target != "block":
        return  # the other half of the layer processes every token
    for layer in passes(model, ids, mask):
        chosen = layer.route.mask
        assert torch.equal(layer.after[~chosen], layer.before[~chosen])
        assert (layer.after != layer.before).any(-1)[chosen].all()
