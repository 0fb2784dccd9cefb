"""RoutedCacheLayer by itself: what it stores, reports, forgets and copies."""

import pytest
import torch

from mixdepth.hf.cache import RoutedCacheLayer


def store(layer, chosen):
    """One step: `chosen` (B, T) says which tokens to store; a key is made of row and column."""
    num_rows, num_tokens = chosen.shape
    layer.lengths = layer.lengths or [0] * num_rows
    counts = chosen.sum(1).tolist()
    rows = [row for row in range(num_rows) if counts[row]]
    num_slots = max(counts)
    if rows:
        index = torch.stack(
            [chosen[row].logical_not().to(torch.uint8).argsort(stable=True)[:num_slots] for row in rows]
        )
        columns = index + layer.seen
        write = layer.write(rows, [counts[row] for row in rows], columns)
        keys = (100 * torch.tensor(rows)[:, None] + columns).double()[:, None, :, None].expand(-1, 2, -1, 3)
        returned, values = write.update(keys, -keys)
        for row, length, stored in zip(rows, write.lengths, returned, strict=True):
            assert stored[0, :length, 0].tolist() == contents(layer)[row]
        assert torch.equal(values, -returned)
    layer.seen += num_tokens


def contents(layer):
    return [layer.keys[row, 1, :length, 2].tolist() for row, length in enumerate(layer.lengths)]


def expected(chosen, rows=None, start=0):
    rows = range(len(chosen)) if rows is None else rows
    return [
        [100.0 * row + column for column in chosen[row].nonzero()[:, 0].tolist() if column >= start] for row in rows
    ]


def filled(chosen, layer=None):
    layer = layer or RoutedCacheLayer()
    store(layer, chosen[:, :5])
    for column in range(5, chosen.shape[1]):
        store(layer, chosen[:, column : column + 1])
    return layer


def random_choice(num_rows=3, num_tokens=60, share=0.4):
    return torch.rand(num_rows, num_tokens) < share


def test_it_stores_the_chosen_tokens_and_reports_the_seen_ones():
    chosen = random_choice()
    layer = filled(chosen)
    assert contents(layer) == expected(chosen)
    assert layer.get_seq_length() == 60
    assert layer.get_mask_sizes(1) == (61, 0)
    assert layer.num_bytes() == chosen.sum() * 2 * (2 * 3) * 8


def test_growing_copies_rarely_and_allocates_little():
    layer = RoutedCacheLayer()
    buffers = set()
    for _ in range(1000):
        store(layer, torch.ones(2, 1, dtype=torch.bool))
        buffers.add(layer.keys.data_ptr())
    assert len(buffers) < 100  # reallocations, of 1000 steps
    assert layer.keys.shape[2] <= 1000 * 1.07


def test_cropping_forgets_columns_stored_or_not():
    chosen = random_choice()
    layer = filled(chosen)
    for remove in (1, 0, 7):
        layer.crop(-remove)
        chosen = chosen[:, : chosen.shape[1] - remove]
        assert contents(layer) == expected(chosen)
        assert layer.get_seq_length() == chosen.shape[1]
    more = random_choice(num_tokens=9)
    for column in range(9):
        store(layer, more[:, column : column + 1])
    assert contents(layer) == expected(torch.cat([chosen, more], 1))


def test_rows_can_be_reordered_selected_and_repeated():
    chosen = random_choice()
    layer = filled(chosen)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert contents(layer) == expected(chosen, [2, 2, 0])
    layer.batch_repeat_interleave(2)
    assert contents(layer) == expected(chosen, [2, 2, 2, 2, 0, 0])
    layer.batch_select_indices(torch.tensor([0, 4]))
    assert contents(layer) == expected(chosen, [2, 0])
    layer.batch_select_indices(torch.tensor([False, True]))
    assert contents(layer) == expected(chosen, [0])


def test_stored_tokens_keep_their_columns_where_rows_are_reordered_and_repeated():
    layer = filled(random_choice())
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    layer.batch_repeat_interleave(2)
    for row, (keys, length) in enumerate(zip(contents(layer), layer.lengths, strict=True)):
        assert layer.columns[row, :length].tolist() == [key % 100 for key in keys]


def test_a_sliding_window_drops_what_no_later_token_can_see():
    chosen = random_choice(num_tokens=400)
    layer = filled(chosen, RoutedCacheLayer(sliding_window=10))
    window = 400 - 10 + 1  # the first column that the next token sees
    for stored, visible in zip(contents(layer), expected(chosen, start=window), strict=True):
        assert stored[len(stored) - len(visible) :] == visible
    assert layer.keys.shape[2] < 40
    assert layer.get_mask_sizes(1) == (10, window)
    assert layer.get_seq_length() == 400


def test_a_recording_cache_drops_nothing_so_that_it_can_be_cropped():
    chosen = random_choice(num_tokens=400)
    layer = RoutedCacheLayer(sliding_window=10)
    layer.activate_past_recording()
    layer = filled(chosen, layer)
    layer.crop(-300)
    assert contents(layer) == expected(chosen[:, :100])


def test_a_cache_that_dropped_tokens_can_still_forget_later_ones():
    chosen = random_choice(num_tokens=100)
    layer = filled(chosen, RoutedCacheLayer(sliding_window=10))
    evicted = layer.evicted_at
    assert 0 < evicted < 100
    layer.crop(evicted - 100)
    window = evicted - 10 + 1
    for stored, visible in zip(contents(layer), expected(chosen[:, :evicted], start=window), strict=True):
        assert stored[len(stored) - len(visible) :] == visible
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)


def test_a_long_prompt_behind_a_sliding_window_gives_its_memory_back():
    layer = RoutedCacheLayer(sliding_window=10)
    chosen = torch.ones(2, 300, dtype=torch.bool)
    store(layer, chosen)
    store(layer, chosen[:, :1])
    assert layer.keys.shape[2] < 30
    assert layer.lengths == [10, 10]


@pytest.mark.parametrize("number", [1, 15, -61])
def test_a_crop_that_makes_no_sense_is_refused(number):
    with pytest.raises(ValueError, match=f"crop takes a number from -60 to 0, not {number}"):
        filled(random_choice()).crop(number)


def test_gradients_flow_through_cached_steps_and_inference_tensors_are_not_written():
    layer = RoutedCacheLayer()
    layer.lengths = [0]
    parts = [torch.randn(1, 2, 1, 3, requires_grad=True) for _ in range(20)]
    total = torch.zeros(())
    for column, part in enumerate(parts):
        keys, _ = layer.write([0], [1], torch.tensor([[column]])).update(part, part)
        total = total + (keys**2).sum()
    total.backward()
    assert all(part.grad.any() for part in parts)
    with torch.inference_mode():
        layer = filled(random_choice())
    store(layer, torch.ones(3, 1, dtype=torch.bool))


def test_a_reset_cache_is_empty():
    layer = filled(random_choice())
    layer.reset()
    assert layer.get_seq_length() == layer.num_bytes() == 0
    chosen = random_choice()
    assert contents(filled(chosen, layer)) == expected(chosen)
