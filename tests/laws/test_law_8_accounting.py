"""Law 8: The cache holds exactly what was processed."""

from tiny import NUM_LAYERS, decisions
from variants import every_case, left_padded, shared


@every_case
def test_the_cache_holds_exactly_what_was_processed(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    routes = decisions(model, ids, attention_mask=mask)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    routes = dict(zip(model.depth_config.routed_layers(NUM_LAYERS), routes, strict=True))
    for index, layer in enumerate(cache.layers):
        last = max((i for i in routes if i <= index), default=None)
        is_routed = index in routes or (last is not None and model.depth_config.scheme == "early_exit")
        if not is_routed or model.depth_config.target == "mlp":
            assert layer.get_seq_length() == ids.shape[1]
            assert not hasattr(layer, "lengths")
            continue
        route = routes[last]
        assert layer.lengths == route.count.tolist()
        for row, length in enumerate(layer.lengths):
            assert length == 0 or layer.columns[row, :length].tolist() == route.mask[row].nonzero()[:, 0].tolist()
