"""The key-value cache of a routed layer: the tokens that the layer processed, and nothing else.

Shapes: B rows of the batch, R rows that take part in a step, K new slots, S stored slots, H heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mixdepth.hf.mask import routed_mask
from mixdepth.routing import Route


class RoutedCacheLayer(CacheLayerMixin):
    """Compact and ragged: each row stores its own tokens, each with its column in the sequence.

    To the model it reports *seen* tokens, so that masks and positions of all layers agree; what it
    stores is less. Room is made ahead of need, so that a step copies its own tokens only.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.keys: Tensor | None = None  # (B, H, S, width of a key)
        self.values: Tensor | None = None  # (B, H, S, width of a value)
        self.columns: Tensor | None = None  # (B, S) int32: each stored token's place in its sequence
        self.lengths: list[int] = []  # stored tokens of each row, on the host, where shapes are decided
        self.seen = 0
        self.evicted = False
        self.is_initialized = False

    def write(self, rows: list[int], counts: list[int], columns: Tensor) -> "CacheWrite":
        """Store `counts` tokens in each of the `rows`, at `columns` (R, K) of their sequences.

        Their keys and values follow when the layer's attention hands them to the returned object.
        """
        needed = max(self.lengths[row] for row in rows) + columns.shape[1]
        if self.columns is not None and needed > self.columns.shape[1]:
            self._evict()
            needed = max(self.lengths[row] for row in rows) + columns.shape[1]
        starts = torch.tensor([self.lengths[row] for row in rows], device=columns.device)
        slots = starts[:, None] + torch.arange(columns.shape[1], device=columns.device)  # (R, K)
        row_index = torch.tensor(rows, device=columns.device)[:, None]  # (R, 1)
        self.columns = _with_room(self.columns, columns.new_zeros(len(self.lengths), 0, dtype=torch.int32), 1, needed)
        self.columns[row_index, slots] = columns.to(torch.int32)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        return CacheWrite(self, rows, row_index, slots)

    def num_bytes(self) -> int:
        """Bytes of the stored keys and values, without the room made ahead."""
        if self.keys is None or self.values is None:
            return 0
        return sum(self.lengths) * sum(t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values))

    def _evict(self) -> None:
        """Drop what lies behind the sliding window of every token to come."""
        if self.sliding_window is None or self.record_past:
            return
        assert self.columns is not None
        assert self.keys is not None
        assert self.values is not None
        expired = (self._used() & (self.columns <= self.seen - self.sliding_window)).sum(1)  # (B,)
        last = self.columns.shape[1] - 1
        order = (torch.arange(last + 1, device=expired.device) + expired[:, None]).clamp(max=last)  # (B, S)
        self.columns = self.columns.gather(1, order)
        self.keys = self.keys.gather(2, order[:, None, :, None].expand_as(self.keys))
        self.values = self.values.gather(2, order[:, None, :, None].expand_as(self.values))
        self.lengths = [length - drop for length, drop in zip(self.lengths, expired.tolist(), strict=True)]
        self.evicted = True

    def _used(self) -> Tensor:
        """(B, S) bool: the slots that hold a token."""
        assert self.columns is not None
        lengths = torch.tensor(self.lengths, device=self.columns.device)
        return torch.arange(self.columns.shape[1], device=self.columns.device) < lengths[:, None]

    def _select(self, rows: Tensor) -> None:
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        if self.columns is not None and self.keys is not None and self.values is not None:
            rows = rows.to(self.columns.device)
            self.columns, self.keys, self.values = self.columns[rows], self.keys[rows], self.values[rows]

    # What transformers asks of a cache layer

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask, as a dense layer of the same kind reports them."""
        offset = 0 if self.sliding_window is None else max(self.seen - self.sliding_window + 1, 0)
        return self.seen + query_length - offset, offset

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the sequence, stored or not."""
        if tokens_to_remove == 0:
            return
        if self.evicted:
            raise RuntimeError("crop needs tokens that were dropped: call activate_past_recording() on a new cache")
        self.seen -= abs(tokens_to_remove)
        if self.columns is not None:
            self.lengths = (self._used() & (self.columns < self.seen)).sum(1).tolist()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(len(self.lengths))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("a routed layer's cache is written by its routed layer, not by update()")


class CacheWrite:
    """What a routed layer's attention sees as its cache during one step: the rows that take part."""

    def __init__(self, layer: RoutedCacheLayer, rows: list[int], row_index: Tensor, slots: Tensor) -> None:
        self.layer = layer
        self.rows: Any = slice(None) if len(rows) == len(layer.lengths) else rows
        self.row_index, self.slots = row_index, slots
        self.lengths = [layer.lengths[row] for row in rows]  # of keys, with the new ones
        self.is_first = layer.seen == 0

    def mask(self, mask: Tensor | None, route: Route, num_tokens: int) -> Tensor | None:
        """The mask (R, 1, K, S) of the route's tokens over all keys of their rows.

        None, the faster kernel, wherever it means the same: a prompt whose keys are its own slots,
        or one token each over rows of equal length.
        """
        if mask is None and (self.is_first or (num_tokens == 1 and len(set(self.lengths)) == 1)):
            return None
        assert self.layer.columns is not None
        columns = self.layer.columns[self.rows, : max(self.lengths)]  # (R, S)
        lengths = torch.tensor(self.lengths, device=columns.device)
        seen = self.layer.seen
        return routed_mask(mask, route, columns, lengths, route.index + seen, seen + num_tokens - 1)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (R, H, K, width); return all keys and values of the rows."""
        layer = self.layer
        assert layer.columns is not None
        batch_size, num_slots = layer.columns.shape
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        stored = []
        for buffer, new in ((layer.keys, keys), (layer.values, values)):
            empty = new.new_zeros(batch_size, new.shape[1], 0, new.shape[3])
            buffer = _with_room(buffer, empty, 2, num_slots, exact=True)
            # Unused slots are written too: behind the row's length, where the next step overwrites them.
            buffer[self.row_index, :, self.slots] = new.transpose(1, 2)
            stored.append(buffer)
        layer.keys, layer.values = stored
        length = max(self.lengths)
        return layer.keys[self.rows, :, :length], layer.values[self.rows, :, :length]


def _with_room(buffer: Tensor | None, empty: Tensor, dim: int, needed: int, exact: bool = False) -> Tensor:
    """The buffer with at least `needed` slots along `dim`, some more if it had to grow.

    Zeros fill the rest: attention multiplies masked values by 0, and 0 * NaN of raw memory is NaN.
    """
    if buffer is not None and needed <= buffer.shape[dim]:
        return buffer
    if buffer is not None and not exact:
        needed += max(8, needed // 16)
    buffer = empty if buffer is None else buffer
    shape = [*buffer.shape]
    shape[dim] = needed - shape[dim]
    return torch.cat([buffer, buffer.new_zeros(shape)], dim)


def routed_cache_layer(cache: Cache, index: int, batch_size: int) -> RoutedCacheLayer:
    """The cache's layer for a routed layer, put in the place of the dense one on first use."""
    refuse_cache(type(cache).__name__, isinstance(cache, DynamicCache) and not cache.offloading)
    while len(cache.layers) <= index:  # DynamicCache() without a config grows with the layers it meets
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if not isinstance(layer, RoutedCacheLayer):
        if layer.get_seq_length():
            raise ValueError("this cache was filled by a model that is not routed: start with a new one")
        recording = getattr(layer, "record_past", False)
        layer = cache.layers[index] = RoutedCacheLayer(getattr(layer, "sliding_window", None))
        layer.record_past = recording
    if not layer.lengths:
        layer.lengths = [0] * batch_size
    return layer


def refuse_cache(name: str, supported: bool) -> None:
    if not supported:
        raise ValueError(
            f"the cache of a routed model stores a different number of tokens for each row and layer, which "
            f"{name!r} cannot: use the default cache (cache_implementation=None)"
        )
