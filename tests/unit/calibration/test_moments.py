"""Moments against the definition, halves against the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.calibration.moments import CrossMoments, MomentAccumulator
from kvbench.errors import BadInputError

FIELDS = ("mean_x", "mean_y", "xx", "xy", "yy")


def _data(rows, px=5, py=3, offset=100.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, px, generator=g) + offset, torch.randn(rows, py, generator=g) - offset


def _by_definition(x, y):
    x, y = x.double(), y.double()
    xc, yc = x - x.mean(0), y - y.mean(0)
    return CrossMoments(len(x), x.mean(0), y.mean(0), xc.T @ xc, xc.T @ yc, yc.square().sum(0))


def _accumulate(x, y, size):
    acc = MomentAccumulator(x.shape[1], y.shape[1])
    for start in range(0, len(x), size):
        acc.update(x[start : start + size], y[start : start + size])
    return acc.result()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_streaming_equals_the_definition_despite_a_large_mean(size):
    x, y = _data(200)
    found, wanted = _accumulate(x, y, size), _by_definition(x, y)
    assert found.rows == 200
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=2e-5, atol=2e-4)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_two_halves_merged_equal_one_pass(first, second, seed):
    x, y = _data(first + second, seed=seed)
    merged = _accumulate(x[:first], y[:first], 16).merge(_accumulate(x[first:], y[first:], 16))
    whole = _accumulate(x, y, 16)
    assert merged.rows == whole.rows
    for name in FIELDS:
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-5, atol=1e-3)


def test_many_column_blocks_mirror_correctly(monkeypatch):
    monkeypatch.setattr("kvbench.calibration.moments.BLOCK_COLUMNS", 3)
    x, y = _data(50, px=8)
    torch.testing.assert_close(_accumulate(x, y, 20).xx, _by_definition(x, y).xx, rtol=2e-5, atol=2e-4)


def test_snapshot_and_restore_go_on_bit_for_bit():
    x, y = _data(96)
    straight = MomentAccumulator(5, 3)
    for start in range(0, 96, 32):
        straight.update(x[start : start + 32], y[start : start + 32])
    half = MomentAccumulator(5, 3)
    half.update(x[:32], y[:32])
    again = MomentAccumulator(5, 3)
    again.restore({k: v.clone() for k, v in half.snapshot().items()})
    for start in range(32, 96, 32):
        again.update(x[start : start + 32], y[start : start + 32])
    for name in FIELDS:
        assert torch.equal(getattr(straight.result(), name), getattr(again.result(), name))


def test_no_rows_is_an_error():
    with pytest.raises(BadInputError, match="no calibration rows"):
        MomentAccumulator(2, 2).result()
