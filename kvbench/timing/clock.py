"""Timing one piece of work: warm-ups, synchronised repeats, percentiles, and memory given back afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch


class OutOfMemoryError(Exception):
    """A piece of work that did not fit; the sweep goes on with the next length."""


class Percentiles(NamedTuple):
    """Of the repeats, linearly interpolated."""

    p50: float
    p95: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Median, 95th and 99th percentile."""
    return Percentiles(*(float(q) for q in np.quantile(np.asarray(seconds, dtype=np.float64), (0.5, 0.95, 0.99))))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has always done so."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def release(device: torch.device) -> None:
    """Give memory back between phases."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's own class, or what allocators of other devices say."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


@contextmanager
def memory_guard(device: torch.device) -> Iterator[None]:
    """Turn an allocator's error into `OutOfMemoryError`.

    Raises:
        OutOfMemoryError: with the allocator's first line.
    """
    reason = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or ["out of memory"])[0][:200]
    # Outside the handler: the exception's frames would hold on to the tensors that did not fit.
    if reason is not None:
        release(device)
        raise OutOfMemoryError(reason)


Split = Callable[[], list[float]]
"""One repeat: seconds of each of its parts, measured inside."""


class Stopwatch:
    """Splits of one repeat, the device synchronised at every one."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices
        self.splits: list[float] = []
        self._wait()
        self._last = time.perf_counter()

    def _wait(self) -> None:
        for device in self._devices:
            synchronise(device)

    def split(self) -> None:
        """Note the seconds since the last split."""
        self._wait()
        now = time.perf_counter()
        self.splits.append(now - self._last)
        self._last = now


def repeat(work: Split, *, warmups: int, repeats: int, device: torch.device) -> list[tuple[float, ...]]:
    """Run a piece of work.

    Args:
        work: one repeat; returns the seconds of its parts.
        warmups: runs that are thrown away.
        repeats: runs that count.
        device: where memory is given back afterwards.

    Returns:
        One tuple of `repeats` seconds per part.

    Raises:
        OutOfMemoryError: it did not fit.
    """
    with memory_guard(device):
        for _ in range(warmups):
            work()
        rows = [work() for _ in range(repeats)]
    release(device)
    return [tuple(column) for column in zip(*rows, strict=True)]


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Set aside what is alive, so that collections between phases look at new objects only."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
