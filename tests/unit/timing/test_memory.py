"""The memory meter against sizes that can be counted by hand."""

from __future__ import annotations

import platform

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
        found = np.ones(5_000_000)  # 40 MB touched: above glibc's largest mmap threshold (32 MiB), so these are new pages
    assert found.nbytes == 40_000_000
    # Pages are 4 KiB and the interpreter itself moves a little.
    assert meter.peak_bytes == pytest.approx(40_000_000, rel=0.15)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_resident_counts_blocks_that_fit_into_free_heap():
    # Many blocks below the mmap threshold lie on the heap; released, they leave resident pages that the next ones would reuse.
    earlier = [bytearray(100_000) for _ in range(400)]
    del earlier
    with PeakMemory(counting="resident") as meter:
        found = [bytearray(b"x" * 100_000) for _ in range(200)]
    assert len(found) == 200
    assert meter.peak_bytes == pytest.approx(20_000_000, rel=0.3)
