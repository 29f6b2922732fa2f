"""Peak memory of a stretch of code, counted where memory is handed out."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

Counting = Literal["allocator", "resident"]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SAMPLE_SECONDS = 0.002


class PeakMemory:
    """Most bytes in use at once inside a `with` block, beyond what was in use when it began.

    How it counts:

    * CUDA: `torch.cuda.max_memory_allocated` of the device, reset at the start; what the caching allocator handed out, to the byte.
    * CPU, counting `allocator` (default): every allocation and release of torch's CPU allocator, C++ temporaries inside operators
      included, from the profiler's memory events of this thread. Exact, but every operator is recorded: for stretches of seconds.
      Python objects, numpy arrays and memory-mapped files are not torch allocations and do not count.
    * CPU, counting `resident`: the kernel's high-water mark of the resident set (`VmHWM`, reset at the start through
      `/proc/self/clear_refs`; elsewhere sampled every 2 ms). For whole stages of minutes: no overhead, counts numpy and touched
      pages of memory-mapped files too. What the C library holds free is returned to the system first (glibc), or a block that
      fits into it would count as nothing.

    Example:
        >>> with PeakMemory() as meter:
        ...     _ = torch.zeros(1000, dtype=torch.float32)
        >>> meter.peak_bytes
        4000

    Args:
        device: where the work runs.
        counting: on a CPU, `allocator` or `resident`.

    Attributes:
        peak_bytes: the peak, set when the block ends.
        left_bytes: bytes still in use at the end beyond those at the start (`allocator` and CUDA; 0 with `resident`).
    """

    def __init__(self, device: torch.device | str = "cpu", *, counting: Counting = "allocator") -> None:
        self.device = torch.device(device)
        self.counting: Counting = counting
        self.peak_bytes = 0
        self.left_bytes = 0
        self._before = 0
        self._profiler: Any = None
        self._sampler: _ResidentSampler | None = None

    @property
    def method(self) -> str:
        """How it counts, in words."""
        if self.device.type == "cuda":
            return "torch.cuda.max_memory_allocated"
        if self.counting == "allocator":
            return "torch CPU allocator, every allocation"
        return "resident set, high-water mark"

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif self.counting == "allocator":
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with _silent():
                self._profiler.__enter__()
        else:
            self._sampler = _ResidentSampler()
            self._before = self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.left_bytes = torch.cuda.memory_allocated(self.device) - self._before
        elif self._profiler is not None:
            with _silent():
                self._profiler.__exit__(kind, error, trace)
            self.peak_bytes, self.left_bytes = _peak_of(self._profiler)
            self._profiler = None
        elif self._sampler is not None:
            self.peak_bytes = max(0, self._sampler.stop() - self._before)
            self._sampler = None


def _peak_of(profiler: Any) -> tuple[int, int]:
    """Highest and last value of the running sum of allocations and releases."""
    events = profiler.profiler.kineto_results.events()
    memory = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0])
    used = peak = 0
    for _, size in memory:
        used += size
        peak = max(peak, used)
    return peak, used


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what the profiler's native code writes on starting and stopping out of stderr."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class _ResidentSampler:
    """The resident set's peak: the kernel's own where it can be reset, sampled elsewhere."""

    def __init__(self) -> None:
        self._peak = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Begin; returns the bytes resident now."""
        _return_free_memory()
        try:
            _CLEAR.write_text("5")
            _status_bytes("VmHWM")
        except (OSError, LookupError):
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return resident_bytes()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, resident_bytes())

    def stop(self) -> int:
        """End; returns the highest resident set seen."""
        if self._thread is None:
            return _status_bytes("VmHWM")
        self._stop.set()
        self._thread.join()
        return max(self._peak, resident_bytes())


def _return_free_memory() -> None:
    """Let glibc give free heap pages back to the system; other C libraries have no such call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def resident_bytes() -> int:
    """Resident set of this process, bytes; where /proc is missing, its high-water mark."""
    try:
        return _status_bytes("VmRSS")
    except (OSError, LookupError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
