"""The memory meter against sizes that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbench.timing.memory import PeakMemory


def test_peak_is_the_most_in_use_at_once():
    with PeakMemory() as meter:
        a = torch.zeros(1000, 1000)  # 4 MB
        b = torch.ones(500, 1000)  # 2 MB
        del a, b
        c = torch.zeros(250, 1000)  # 1 MB, after the others are gone
    assert meter.peak_bytes == 6_000_000
    assert meter.left_bytes == 1_000_000
    assert c.shape == (250, 1000)


def test_temporaries_inside_an_operator_count():
    x = torch.randn(64, 64)
    with PeakMemory() as meter:
        # Two products of 16 KiB live at the same time as their sum is formed in a third.
        (x @ x) + (x @ x)
    assert meter.peak_bytes == 3 * 64 * 64 * 4


def test_what_was_there_before_does_not_count():
    before = torch.zeros(1_000_000)
    with PeakMemory() as meter:
        before.add_(1)
    assert meter.peak_bytes < 64  # the scalar itself


def test_it_ends_after_an_error_and_can_be_used_again():
    meter = PeakMemory()
    with pytest.raises(ValueError, match="broken"), meter:  # noqa: PT012
        torch.zeros(1000)
        raise ValueError("broken")
    assert meter.peak_bytes == 4000
    with meter:
        torch.zeros(500)
    assert meter.peak_bytes == 2000


def test_resident_counts_numpy_and_forgets_earlier_peaks():
    earlier = np.ones(8_000_000)  # 64 MB, released before the block
    del earlier
    with PeakMemory(counting="resident") as meter:
        found = np.ones(4_000_000)  # 32 MB touched
    assert found.nbytes == 32_000_000
    # Pages are 4 KiB and the interpreter itself moves a little.
    assert meter.peak_bytes == pytest.approx(32_000_000, rel=0.15)
