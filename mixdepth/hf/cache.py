"""The key-value cache of a routed layer: the tokens that the layer processed, and nothing else.

Shapes: B rows of the batch, R rows that take part in a step, K new slots, S stored slots, H heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mixdepth.hf.mask import routed_mask
from mixdepth.routes import Route


class RoutedCacheLayer(CacheLayerMixin):
    """A compact and ragged cache: each row stores the tokens that it processed, each with its column in the sequence.

    It reports *seen* tokens to the model, so that the masks and positions of all layers agree, and stores fewer.
    It makes room ahead of need, so that a step copies only the tokens of that step.
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
        self.columns: Tensor | None = None  # (B, S) int32: the place of each stored token in its sequence
        self.lengths: list[int] = []  # the stored tokens of each row, on the host, because shapes depend on them
        self.seen = 0  # tokens of the sequence so far, stored or not
        self.evicted_at = 0  # how many tokens had been seen when some were dropped
        self.is_incomplete = False  # a pass with look-ahead went by and stored nothing
        self.is_initialized = False

    def write(self, rows: list[int], counts: list[int], columns: Tensor) -> "CacheWrite":
        """Store `counts` tokens in each of the `rows`, at `columns` (R, K) of their sequences.

        Their keys and values follow when the layer's attention hands them to the returned object.
        """
        self._evict()
        # 1. Find the slots. Each row goes on where it ends.
        starts = [self.lengths[row] for row in rows]
        needed = max(starts) + columns.shape[1]
        where: tuple[Any, Any]
        if len(rows) == len(self.lengths) and len(set(starts)) == 1:  # a slice is copied faster
            where = slice(None), slice(starts[0], needed)
        else:
            row_index = torch.tensor(rows, device=columns.device)[:, None]  # (R, 1)
            first = torch.tensor(starts, device=columns.device)[:, None]  # (R, 1)
            slots = first + torch.arange(columns.shape[1], device=columns.device)  # (R, K)
            where = row_index, slots
        # 2. Make room, and write the columns. Keys and values get as much room when they come.
        empty = columns.new_zeros(len(self.lengths), 0, dtype=torch.int32)  # (B, 0)
        self.columns = _with_room(self.columns, empty, 1, needed, _slack(needed))
        self.columns[where] = columns.to(torch.int32)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        return CacheWrite(self, rows, where)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a step as seen, whether the layer stored them or not."""
        self.seen += num_tokens

    def forbid_continuation(self) -> None:
        """Refuse later steps: a pass with look-ahead went by and stored nothing."""
        self.is_incomplete = True

    def num_bytes(self) -> int:
        """The bytes of the stored keys and values, without the room made ahead."""
        if self.keys is None or self.values is None:
            return 0
        token_bytes = sum(part.shape[1] * part.shape[3] * part.element_size() for part in (self.keys, self.values))
        return sum(self.lengths) * token_bytes

    def _evict(self) -> None:
        """Drop the tokens that no later token can see through the sliding window, once it is worth a copy."""
        if self.sliding_window is None or self.record_past or self.keys is None or self.values is None:
            return
        if max(self.lengths) <= self.sliding_window + _slack(self.sliding_window):
            return
        assert self.columns is not None
        # 1. Count the expired tokens of each row. They come first, because columns rise along a row.
        is_expired = self._used() & (self.columns <= self.seen - self.sliding_window)  # (B, S)
        num_expired = is_expired.sum(1)  # (B,)
        for row, number in enumerate(num_expired.tolist()):
            self.lengths[row] -= number
        # 2. Move the tokens that follow to the front.
        slots = torch.arange(max(self.lengths), device=num_expired.device) + num_expired[:, None]  # (B, new S)
        slots = slots.clamp(max=self.columns.shape[1] - 1)
        self.columns = self.columns.gather(1, slots)
        self.keys = _gather_slots(self.keys, slots)
        self.values = _gather_slots(self.values, slots)
        self.evicted_at = self.seen

    def _used(self) -> Tensor:
        """(B, S) bool: the slots that hold a token."""
        assert self.columns is not None
        lengths = torch.tensor(self.lengths, device=self.columns.device)
        return torch.arange(self.columns.shape[1], device=self.columns.device) < lengths[:, None]

    def _select(self, rows: Tensor) -> None:
        """Make these rows (any number of them, also several times) the rows of the cache."""
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        if self.columns is not None and self.keys is not None and self.values is not None:
            rows = rows.to(self.columns.device)
            self.columns = self.columns[rows]
            self.keys = self.keys[rows]
            self.values = self.values[rows]

    # The methods below are those that transformers calls.

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        if self.sliding_window is None:
            return -1
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and the offset of the mask, as a dense layer of the same kind reports them."""
        offset = 0
        if self.sliding_window is not None:
            offset = max(self.seen - self.sliding_window + 1, 0)
        return self.seen + query_length - offset, offset

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the sequence, stored or not. Their number is negative, as in transformers."""
        if self.seen == 0:  # as dense layers do
            return
        remaining = self.seen + tokens_to_remove
        if tokens_to_remove > 0 or remaining < 0:
            raise ValueError(f"crop takes a number from {-self.seen} to 0, not {tokens_to_remove}")
        if tokens_to_remove < 0 and remaining < self.evicted_at:
            raise RuntimeError("crop reaches tokens whose window was dropped: call activate_past_recording() earlier")
        self.seen = remaining
        if self.columns is not None:
            is_kept = self._used() & (self.columns < self.seen)  # (B, S)
            self.lengths = is_kept.sum(1).tolist()

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
    """The cache as a routed layer's attention sees it during one step: with the rows that take part."""

    def __init__(self, layer: RoutedCacheLayer, rows: list[int], where: tuple[Any, Any]) -> None:
        self.layer = layer
        self.selection = slice(None) if len(rows) == len(layer.lengths) else rows
        self.where = where  # rows and slots, as slices or as tensors
        self.lengths = [layer.lengths[row] for row in rows]  # the number of keys, with the new ones

    def mask(self, mask: Tensor | None, route: Route, num_tokens: int) -> Tensor | None:
        """The mask (R, 1, K, S) of the route's tokens over all keys of their rows.

        It is None, which selects a faster kernel, where that means the same: for a prompt, whose keys are its slots,
        and for one token in each row over rows of equal length.
        """
        seen = self.layer.seen
        if mask is None and (seen == 0 or (num_tokens == 1 and len(set(self.lengths)) == 1)):
            return None
        assert self.layer.columns is not None
        columns = self.layer.columns[self.selection, : max(self.lengths)]  # (R, S)
        lengths = torch.tensor(self.lengths, device=columns.device)
        return routed_mask(mask, route, columns, lengths, seen, num_tokens)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values (R, H, K, width), and return all those of the rows (R, H, S, width)."""
        layer = self.layer
        assert layer.columns is not None
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys = self._stored(layer.keys, keys)
        layer.values = self._stored(layer.values, values)
        length = max(self.lengths)
        return layer.keys[self.selection, :, :length], layer.values[self.selection, :, :length]

    def _stored(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """The buffer (B, H, S, width) with the new keys or values in their slots."""
        assert self.layer.columns is not None
        batch_size, num_slots = self.layer.columns.shape
        empty = new.new_zeros(batch_size, new.shape[1], 0, new.shape[3])  # (B, H, 0, width)
        buffer = _with_room(buffer, empty, 2, num_slots, 0)
        if torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad):
            buffer = buffer.clone()  # an earlier step's graph still reads it
        # Unused slots are written too: after the row's end, where the next step overwrites them.
        rows, slots = self.where
        if isinstance(slots, slice):
            buffer[:, :, slots] = new
        else:
            buffer[rows, :, slots] = new.transpose(1, 2)
        return buffer


def _slack(num_slots: int) -> int:
    """How many slots to make ahead, so that the whole is copied rarely and little memory stays unused."""
    return max(8, num_slots // 16)


def _with_room(buffer: Tensor | None, empty: Tensor, dim: int, needed: int, slack: int) -> Tensor:
    """The buffer, writable, with at least `needed` slots along `dim`, and with `slack` more if it had to grow.

    Zeros fill the rest, because attention multiplies masked values by 0, and 0 * NaN of raw memory is NaN.
    """
    if buffer is None:
        shape = [*empty.shape]
        shape[dim] = needed
        return empty.new_zeros(shape)
    if needed > buffer.shape[dim]:
        shape = [*buffer.shape]
        shape[dim] = needed - shape[dim] + slack
        return torch.cat([buffer, buffer.new_zeros(shape)], dim)
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return buffer.clone()
    return buffer


def _gather_slots(buffer: Tensor, slots: Tensor) -> Tensor:
    """Take these slots (B, S) of the keys or values (B, H, S', width) of all heads."""
    _, num_heads, _, width = buffer.shape
    index = slots[:, None, :, None].expand(-1, num_heads, -1, width)  # (B, H, S, width)
    return buffer.gather(2, index)


def routed_cache_layer(cache: Cache, index: int, batch_size: int) -> RoutedCacheLayer:
    """The cache's layer for a routed layer. It takes the place of the dense one at its first use."""
    if not isinstance(cache, DynamicCache) or cache.offloading:
        raise unsupported_cache(type(cache).__name__)
    while len(cache.layers) <= index:  # DynamicCache() without a config grows with the layers it meets
        cache.layers.append(cache.layer_class_to_replicate())
    # 1. Replace a dense layer, as long as it is empty.
    layer: Any = cache.layers[index]
    if not isinstance(layer, RoutedCacheLayer):
        if layer.get_seq_length():
            raise ValueError("this cache was filled by a model that is not routed: start with a new one")
        recording = getattr(layer, "record_past", False)
        layer = cache.layers[index] = RoutedCacheLayer(getattr(layer, "sliding_window", None))
        layer.record_past = recording
    # 2. Refuse a cache that does not fit this batch.
    if layer.is_incomplete:
        raise ValueError("this cache was made in training, with look-ahead, and cannot be continued from")
    if not layer.lengths:
        layer.lengths = [0] * batch_size
    if len(layer.lengths) != batch_size:
        raise ValueError(
            f"this cache holds {len(layer.lengths)} rows, the batch has {batch_size}: start with a new one"
        )
    return layer


def unsupported_cache(name: str) -> ValueError:
    """The error for caches that cannot hold what routed layers store."""
    return ValueError(
        f"the cache of a routed model stores a different number of tokens for each row and layer, which "
        f"{name!r} cannot: use the default cache (cache_implementation=None)"
    )
