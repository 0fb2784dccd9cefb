"""Law 2: Exactly k tokens are processed, and the others are left as they were."""

import torch
from tiny import NUM_LAYERS
from variants import every_case, left_padded, shared

import mixdepth
from mixdepth.hf.layer import RoutedLayer
from mixdepth.routes import slots


@every_case
def test_exactly_k_tokens_are_processed_and_the_others_are_left_to_the_bit(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    streams = {}
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, kwargs, out: streams.update({layer.depth_index: (args[0], out)}), with_kwargs=True
        )
        for layer in model.modules()
        if isinstance(layer, RoutedLayer)
    ]
    with mixdepth.lookahead(model):
        out = model(ids, attention_mask=mask, output_routes=True)
    deciding = model.depth_config.routed_layers(NUM_LAYERS)
    routes = dict(zip(deciding, out.routes, strict=True))
    routers = dict(zip(deciding, model.depth_routers, strict=True))
    for hook in hooks:
        hook.remove()
    for index, (before, after) in streams.items():
        last = max(i for i in model.depth_config.routed_layers(NUM_LAYERS) if i <= index)  # the last exit, or itself
        route, router = routes[last], routers[last]
        k = [slots(router.capacity, length) for length in mask.sum(1).tolist()]
        if router.scheme == "token_choice":
            k = torch.minimum(torch.tensor(k), (route.real & (route.logits > router.cutoff)).sum(1)).tolist()
        assert route.count.tolist() == k
        assert not (route.mask & (mask == 0)).any()
        if model.depth_config.target == "block":
            assert torch.equal(after[~route.mask], before[~route.mask])
            assert (after != before).any(-1)[route.mask].all()
