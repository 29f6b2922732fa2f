"""Which contexts run together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.scoring.batching import common_length, cut, find_headers, plan_batches

TOKENS = st.lists(st.integers(0, 2), max_size=8).map(tuple)


@given(TOKENS, TOKENS)
def test_common_length_by_counting(a, b):
    slow = 0
    while slow < min(len(a), len(b)) and a[slow] == b[slow]:
        slow += 1
    assert common_length(a, b) == slow


@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_every_prefix_is_in_exactly_one_batch_and_starts_with_its_header(prefixes, size, share):
    batches = plan_batches(prefixes, [1] * len(prefixes), batch_size=size, token_budget=10**9, arms=3, share_headers=share, shortest_header=1)
    assert sorted(i for b in batches for i in b.members) == list(range(len(prefixes)))
    for batch in batches:
        assert len(batch.members) <= size
        assert all(prefixes[i][: len(batch.header)] == batch.header for i in batch.members)


def test_a_long_shared_header_is_found_and_strangers_stay_out():
    header = tuple(range(200))
    prefixes = [(*header, 900 + i, i) for i in range(5)] + [(7, 7, 7), (8,)]
    groups = dict(find_headers(prefixes, 32))
    assert sorted(groups[200]) == [0, 1, 2, 3, 4]
    assert sorted(groups[0]) == [5, 6]


def test_headers_that_save_too_little_are_not_worth_a_pass():
    prefixes = [(*range(40), i) for i in range(3)]
    assert find_headers(prefixes, 32) == [(0, [0, 1, 2])]


def test_the_token_budget_bounds_a_batch():
    prefixes = [tuple(range(100))] * 10
    batches = plan_batches(prefixes, [10] * 10, batch_size=10, token_budget=3 * 110 * 2, arms=2, share_headers=False)
    assert max(len(b.members) for b in batches) == 3


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 9))
def test_cut_keeps_every_row_and_the_limit(lengths, most):
    sizes = cut(sorted(lengths, reverse=True), most)
    assert sum(sizes) == len(lengths)
    assert all(1 <= size <= most for size in sizes)


def test_cut_ends_a_batch_where_padding_would_cost():
    assert cut([200, 190, 50, 48, 47], 8) == [2, 3]
    assert cut([8, 2, 2], 8) == [3], "too few tokens to be worth a batch of their own"
