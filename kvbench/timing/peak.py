"""What this machine can do: the rate of matrix products and of copies, measured."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from kvbench.runs.latency import CopyRate, MatrixRate
from kvbench.timing.clock import OutOfMemoryError, memory_guard, release, synchronise
from kvbench.timing.counted import Work

TRIES = 7
COPY_BYTES = (1 << 20, 1 << 25, 1 << 28)
"""Within a core's cache, within a shared one, in memory."""
SQUARE = {"cpu": 1024}
"""Side of the large square product that is timed beside the pair's own shapes; 8192 elsewhere."""


def matrix_rate(shape: tuple[int, int, int], what: str, dtype: torch.dtype, device: torch.device) -> MatrixRate | None:
    """Time a product of `[rows, inner] @ [inner, columns]`; None where it does not fit.

    The fastest of some tries counts: a floor must not be raised by what else the machine was doing.
    """
    rows, inner, columns = shape
    try:
        with memory_guard(device), torch.no_grad():
            left, right = torch.randn(rows, inner, device=device).to(dtype), torch.randn(inner, columns, device=device).to(dtype)
            out = torch.empty(rows, columns, dtype=dtype, device=device)
            # Small products are repeated within a try, so that the clock's own grain does not count.
            inside = max(1, round(5e7 / (2 * rows * inner * columns)))
            best = min(_seconds(lambda: torch.mm(left, right, out=out), inside, device) for _ in range(TRIES))
    except OutOfMemoryError:
        return None
    return MatrixRate(shape=shape, what=what, operations_per_second=2 * rows * inner * columns / best)


def copy_rate(size: int, device: torch.device) -> CopyRate | None:
    """Time a copy of `size` bytes; None where it does not fit."""
    try:
        with memory_guard(device), torch.no_grad():
            here = torch.ones(size // 4, dtype=torch.float32, device=device)
            there = torch.empty_like(here)
            inside = max(1, (1 << 25) // size)
            best = min(_seconds(lambda: there.copy_(here), inside, device) for _ in range(TRIES))
    except OutOfMemoryError:
        return None
    return CopyRate(buffer_bytes=size, bytes_per_second=2 * size / best)


def _seconds(work: object, inside: int, device: torch.device) -> float:
    synchronise(device)
    begun = time.perf_counter()
    for _ in range(inside):
        work()  # type: ignore[operator]
    synchronise(device)
    return max((time.perf_counter() - begun) / inside, 1e-9)


class Machine:
    """Measured rates, and the floors that follow from them.

    Args:
        dtype: of weights and cache.
        device: where the work runs.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.matrix: dict[tuple[int, int, int], MatrixRate] = {}
        self.copies: tuple[CopyRate, ...] = ()

    def measure(self, shapes: Iterable[tuple[tuple[int, int, int], str]]) -> None:
        """Time products of these shapes (those not timed yet), one large square one, and copies."""
        side = SQUARE.get(self.device.type, 8192)
        for shape, what in [((side, side, side), "large square"), *shapes]:
            if shape not in self.matrix and (rate := matrix_rate(shape, what, self.dtype, self.device)) is not None:
                self.matrix[shape] = rate
        if not self.copies:
            self.copies = tuple(copy for size in COPY_BYTES if (copy := copy_rate(size, self.device)) is not None)
        release(self.device)

    @property
    def operations_per_second(self) -> float | None:
        """The fastest product of all."""
        return max((rate.operations_per_second for rate in self.matrix.values()), default=None)

    def bandwidth(self, size: int) -> float | None:
        """Bytes per second of the smallest timed copy that is at least this large: what fits a cache moves at the cache's rate."""
        fitting = [rate for rate in self.copies if rate.buffer_bytes >= size] or list(self.copies[-1:])
        return fitting[0].bytes_per_second if fitting else None

    def compute_floor(self, work: Work) -> float:
        """Seconds below which no engine can be: operations over the peak rate. Prefill cannot be done in less."""
        peak = self.operations_per_second
        return work.operations / peak if peak else 0.0

    def floor(self, work: Work) -> float:
        """The larger of operations over peak rate and bytes over bandwidth."""
        rate = self.bandwidth(work.bytes_moved)
        return max(self.compute_floor(work), work.bytes_moved / rate if rate else 0.0)
