"""A prefix that is answered from many times."""

from __future__ import annotations

import pytest
import torch

from kvbench.kv.masks import packed_mask, within_window
from kvbench.pairs.models import Query, write_prefix


def _answer(model, kv, header, ids, start, lengths):
    cache = model.cache_for(len(lengths), kv.tokens + ids.shape[1], kv.tokens)
    write_prefix(cache, kv, slice(None), 0)
    positions = lengths[:, None] + torch.arange(ids.shape[1])
    return cache, Query(ids, positions, torch.zeros_like(ids))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_unequal_length_equal_one_row_at_a_time(tiny, attention):
    model = tiny(attention=attention)
    rows = [[1, 5, 9, 13, 17, 21], [2, 4], [7]]
    kv = model.prefill(rows)
    ids = torch.tensor([[3, 8], [6, 1], [11, 12]])
    cache, query = _answer(model, kv, 0, ids, 0, kv.lengths)
    hidden = model.run(cache, query, 0, kv.lengths, kv.tokens)
    for i, row in enumerate(rows):
        alone = model.decoder(input_ids=torch.tensor([row + ids[i].tolist()]), use_cache=False).last_hidden_state[0, len(row) :]
        torch.testing.assert_close(hidden[i], alone, atol=1e-5, rtol=1e-4)


def test_answering_again_gives_the_same_and_the_cache_does_not_grow(tiny):
    model = tiny()
    kv = model.prefill([[1, 5, 9, 13]])
    cache, query = _answer(model, kv, 0, torch.tensor([[3, 8]]), 0, kv.lengths)
    first = model.run(cache, query, 0, kv.lengths, kv.tokens)
    size = cache.layers[0].keys.shape
    for _ in range(3):
        cache.rewind(kv.tokens)
        assert torch.equal(model.run(cache, query, 0, kv.lengths, kv.tokens), first)
    assert cache.layers[0].keys.shape == size


def test_room_grows_when_it_was_too_small(tiny):
    model = tiny()
    kv = model.prefill([[1, 5, 9, 13]])
    cache = model.cache_for(1, kv.tokens, kv.tokens)
    write_prefix(cache, kv, slice(None), 0)
    ids = torch.tensor([[3, 8, 2]])
    hidden = model.run(cache, Query(ids, torch.tensor([[4, 5, 6]]), torch.zeros_like(ids)), 0, kv.lengths, kv.tokens)
    alone = model.decoder(input_ids=torch.tensor([[1, 5, 9, 13, 3, 8, 2]]), use_cache=False).last_hidden_state[0, 4:]
    torch.testing.assert_close(hidden[0], alone, atol=1e-5, rtol=1e-4)


def test_prefill_behind_a_header_equals_prefill_in_one_piece(tiny):
    model = tiny()
    header, rests = [1, 5, 9], [[13, 17, 21], [2], [4, 6]]
    behind = model.prefill(rests, model.prefill([header]))
    assert behind.offset == 3
    for i, rest in enumerate(rests):
        whole = model.prefill([header + rest])
        for layer in range(model.layers):
            torch.testing.assert_close(behind.keys[layer][i, :, : len(rest)], whole.keys[layer][0, :, 3:], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(behind.values[layer][i, :, : len(rest)], whole.values[layer][0, :, 3:], atol=1e-5, rtol=1e-4)


def test_continuations_packed_in_one_row_do_not_see_each_other(tiny):
    model = tiny()
    kv = model.prefill([[1, 5, 9, 13]])
    # held-back 3; continuation a: 8, 2; continuation b: 7, 6, 5
    ids = torch.tensor([[3, 8, 2, 7, 6, 5]])
    positions = torch.tensor([[4, 5, 6, 5, 6, 7]])
    segments = torch.tensor([[0, 1, 1, 2, 2, 2]])
    cache = model.cache_for(1, 10, 4)
    write_prefix(cache, kv, slice(None), 0)
    hidden = model.run(cache, Query(ids, positions, segments), 0, kv.lengths, kv.tokens)[0]
    for tail, where in (([3, 8, 2], [0, 1, 2]), ([3, 7, 6, 5], [0, 3, 4, 5])):
        alone = model.decoder(input_ids=torch.tensor([[1, 5, 9, 13, *tail]]), use_cache=False).last_hidden_state[0, 4:]
        torch.testing.assert_close(hidden[where], alone, atol=1e-5, rtol=1e-4)


def test_mask_by_a_slow_definition():
    lengths, segments = torch.tensor([2, 1]), torch.tensor([[0, 0, 1, 1, 2], [0, 1, 2, -1, -1]])
    mask = packed_mask(1, lengths, 3, segments)
    assert mask.shape == (2, 5, 9)
    for b in range(2):
        for q in range(5):
            for k in range(9):
                if k < 1:
                    wanted = True
                elif k < 4:
                    wanted = k - 1 < int(lengths[b])
                else:
                    j = k - 4
                    same = segments[b, j] in (0, segments[b, q]) and segments[b, j] >= 0
                    wanted = j == q or (j < q and bool(same))
                assert bool(mask[b, q, k]) == wanted, (b, q, k)


def test_sliding_window_narrows_by_position():
    allowed = torch.ones(1, 1, 4, dtype=torch.bool)
    narrowed = within_window(allowed, torch.tensor([[5]]), torch.tensor([[2, 3, 4, 5]]), 2)
    assert narrowed[0, 0].tolist() == [False, False, True, True]
