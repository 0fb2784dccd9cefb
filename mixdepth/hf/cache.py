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
        self.evicted_at = 0  # how many tokens had been seen when some were dropped
        self.is_incomplete = False  # look-ahead passed by and stored nothing
        self.is_initialized = False

    def write(self, rows: list[int], counts: list[int], columns: Tensor) -> "CacheWrite":
        """Store `counts` tokens in each of the `rows`, at `columns` (R, K) of their sequences.

        Their keys and values follow when the layer's attention hands them to the returned object.
        """
        self._evict()
        starts = [self.lengths[row] for row in rows]
        needed = max(starts) + columns.shape[1]
        where: tuple[Any, Any]
        if len(rows) == len(self.lengths) and len(set(starts)) == 1:  # a slice is copied faster
            where = slice(None), slice(starts[0], needed)
        else:
            slots = torch.tensor(starts, device=columns.device)[:, None]
            slots = slots + torch.arange(columns.shape[1], device=columns.device)  # (R, K)
            where = torch.tensor(rows, device=columns.device)[:, None], slots  # (R, 1), (R, K)
        empty = columns.new_zeros(len(self.lengths), 0, dtype=torch.int32)
        self.columns = _with_room(self.columns, empty, 1, needed, _slack(needed))
        self.columns[where] = columns.to(torch.int32)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        return CacheWrite(self, rows, where)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a step as seen, whether the layer stored them or not."""
        self.seen += num_tokens

    def forbid_continuation(self) -> None:
        """Refuse later steps: look-ahead passed by and stored nothing."""
        self.is_incomplete = True

    def num_bytes(self) -> int:
        """Bytes of the stored keys and values, without the room made ahead."""
        if self.keys is None or self.values is None:
            return 0
        return sum(self.lengths) * sum(t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values))

    def _evict(self) -> None:
        """Drop what lies behind the sliding window of every token to come, once it is worth a copy."""
        if self.sliding_window is None or self.record_past or self.keys is None or self.values is None:
            return
        if max(self.lengths) <= self.sliding_window + _slack(self.sliding_window):
            return
        assert self.columns is not None
        expired = (self._used() & (self.columns <= self.seen - self.sliding_window)).sum(1)  # (B,)
        self.lengths = [length - drop for length, drop in zip(self.lengths, expired.tolist(), strict=True)]
        kept = torch.arange(max(self.lengths), device=expired.device) + expired[:, None]
        kept = kept.clamp(max=self.columns.shape[1] - 1)  # (B, S)
        self.columns = self.columns.gather(1, kept)
        heads, key_width, value_width = self.keys.shape[1], self.keys.shape[3], self.values.shape[3]
        self.keys = self.keys.gather(2, kept[:, None, :, None].expand(-1, heads, -1, key_width))
        self.values = self.values.gather(2, kept[:, None, :, None].expand(-1, heads, -1, value_width))
        self.evicted_at = self.seen

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
        """Forget the last tokens of the sequence, stored or not; their number is given as a negative one."""
        if self.seen == 0:  # as dense layers do
            return
        left = self.seen + tokens_to_remove
        if tokens_to_remove > 0 or left < 0:
            raise ValueError(f"crop takes a number from {-self.seen} to 0, not {tokens_to_remove}")
        if tokens_to_remove < 0 and left < self.evicted_at:
            raise RuntimeError("crop reaches tokens whose window was dropped: call activate_past_recording() earlier")
        self.seen = left
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

    def __init__(self, layer: RoutedCacheLayer, rows: list[int], where: tuple[Any, Any]) -> None:
        self.layer = layer
        self.selection = slice(None) if len(rows) == len(layer.lengths) else rows
        self.where = where  # rows and slots, as slices or as tensors
        self.lengths = [layer.lengths[row] for row in rows]  # of keys, with the new ones

    def mask(self, mask: Tensor | None, route: Route, num_tokens: int) -> Tensor | None:
        """The mask (R, 1, K, S) of the route's tokens over all keys of their rows.

        None, the faster kernel, wherever it means the same: a prompt whose keys are its own slots,
        or one token each over rows of equal length.
        """
        seen = self.layer.seen
        if mask is None and (seen == 0 or (num_tokens == 1 and len(set(self.lengths)) == 1)):
            return None
        assert self.layer.columns is not None
        columns = self.layer.columns[self.selection, : max(self.lengths)]  # (R, S)
        lengths = torch.tensor(self.lengths, device=columns.device)
        return routed_mask(mask, route, columns, lengths, seen, num_tokens)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (R, H, K, width); return all keys and values of the rows."""
        layer = self.layer
        assert layer.columns is not None
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = self._stored(layer.keys, keys), self._stored(layer.values, values)
        length = max(self.lengths)
        return layer.keys[self.selection, :, :length], layer.values[self.selection, :, :length]

    def _stored(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        assert self.layer.columns is not None
        batch_size, num_slots = self.layer.columns.shape
        buffer = _with_room(buffer, new.new_zeros(batch_size, new.shape[1], 0, new.shape[3]), 2, num_slots, 0)
        if torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad):
            buffer = buffer.clone()  # an earlier step's graph still reads it
        # Unused slots are written too: behind the row's length, where the next step overwrites them.
        rows, slots = self.where
        if isinstance(slots, slice):
            buffer[:, :, slots] = new
        else:
            buffer[rows, :, slots] = new.transpose(1, 2)
        return buffer


def _slack(num_slots: int) -> int:
    """Room to make ahead: few copies of the whole, and little memory that is not used."""
    return max(8, num_slots // 16)


def _with_room(buffer: Tensor | None, empty: Tensor, dim: int, needed: int, slack: int) -> Tensor:
    """The buffer, writable, with at least `needed` slots along `dim`; with `slack` more if it had to grow.

    Zeros fill the rest: attention multiplies masked values by 0, and 0 * NaN of raw memory is NaN.
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


def routed_cache_layer(cache: Cache, index: int, batch_size: int) -> RoutedCacheLayer:
    """The cache's layer for a routed layer, put in the place of the dense one on first use."""
    if not isinstance(cache, DynamicCache) or cache.offloading:
        raise unsupported_cache(type(cache).__name__)
    while len(cache.layers) <= index:  # DynamicCache() without a config grows with the layers it meets
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if not isinstance(layer, RoutedCacheLayer):
        if layer.get_seq_length():
            raise ValueError("this cache was filled by a model that is not routed: start with a new one")
        recording = getattr(layer, "record_past", False)
        layer = cache.layers[index] = RoutedCacheLayer(getattr(layer, "sliding_window", None))
        layer.record_past = recording
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
    return ValueError(
        f"the cache of a routed model stores a different number of tokens for each row and layer, which "
        f"{name!r} cannot: use the default cache (cache_implementation=None)"
    )
