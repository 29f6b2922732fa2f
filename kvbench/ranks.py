"""Processes that share one calibration or one evaluation, started by `torchrun` or `accelerate launch`.

Whoever starts one process has `ALONE` and no process group. Otherwise every process runs the whole command, the expensive
part is cut into pieces that go round the processes, and process 0 alone writes and prints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.errors import BadInputError, KVBenchError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
# Between two exchanges a process may calibrate for hours; one that fails is ended, with all others, by the launcher.
PATIENCE_DAYS = 28


class OtherProcessError(KVBenchError):
    """Another process failed and has said why."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work.

    Attributes:
        rank: number of this process, 0 to size - 1; 0 writes.
        size: processes on all machines.
        local_rank: number of this process on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """This process's device: the n-th GPU where `cuda` was asked for."""
        return f"cuda:{self.local_rank}" if self.size > 1 and device == "cuda" else device

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in order of rank, on every process."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: T, owner: int = 0) -> T:
        """The owner's value, on every process."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value if self.rank == owner else None]
        dist.broadcast_object_list(box, src=owner)
        return box[0]  # type: ignore[no-any-return]

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def together(self, work: Callable[[], T]) -> T:
        """Run something on every process; where it fails on one, it fails on all.

        Raises:
            OtherProcessError: it failed elsewhere.
        """
        answer, error = _attempt(work)
        self._raise_first(self.gather(_told(error, self.rank)), error)
        return answer  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run something on process 0 and hand its result (or its failure) to all.

        Raises:
            OtherProcessError: it failed there.
        """
        answer, error = _attempt(work) if self.main else (None, None)
        answer, told = self.broadcast((answer, _told(error, self.rank)))
        self._raise_first([told], error)
        return answer  # type: ignore[return-value]

    def agree(self, what: str, text: str) -> None:
        """Refuse to go on where the processes do not work on the same thing.

        Raises:
            BadInputError: another machine has other models, data or settings.
        """
        found = self.gather(hashlib.sha256(text.encode()).hexdigest())
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
        if other is not None:
            raise BadInputError(f"process {other} has another {what} than process 0; give every machine the same models, data, settings and versions")

    def share(self, items: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
        """Work on items in turns, one per process and turn, and yield every item with its answer, in order, on every process.

        Raises:
            torch.OutOfMemoryError: on all processes where one has run out of memory.
            OtherProcessError: another process failed.
        """
        for start in range(0, len(items), self.size):
            turn = items[start : start + self.size]
            if self.size == 1:
                yield turn[0], work(turn[0])
                continue
            answer, error = _attempt(lambda mine=turn: work(mine[self.rank]) if self.rank < len(mine) else None)  # type: ignore[misc]
            outcomes = self.gather((answer, _told(error, self.rank)))
            self._raise_first([told for _, told in outcomes], error)
            for item, (found, _) in zip(turn, outcomes, strict=False):
                yield item, found  # type: ignore[misc]

    def _raise_first(self, told: Sequence[tuple[int, bool, str] | None], own: Exception | None) -> None:
        if own is not None:
            raise own
        for failure in told:
            if failure is None:
                continue
            rank, memory, text = failure
            if memory:
                import torch

                raise torch.OutOfMemoryError(text)
            raise OtherProcessError(f"process {rank} failed: {text}")


ALONE = Ranks()


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # handed to the other processes, which would wait for ever, and raised again here
        return None, error


def _told(error: Exception | None, rank: int) -> tuple[int, bool, str] | None:
    """(rank, whether memory ran out, text) of a failure, in plain types."""
    return None if error is None else (rank, type(error).__name__ == "OutOfMemoryError", str(error) or type(error).__name__)


def processes() -> int:
    """How many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1) if "RANK" in os.environ else 1


def is_main() -> bool:
    """Whether this process talks, from the environment alone."""
    return processes() == 1 or os.environ.get("RANK") == "0"


def join(device: str, device_map: str | None = None) -> Ranks:
    """Meet the other processes: NCCL for CUDA devices, Gloo for others.

    Args:
        device: torch device asked for.
        device_map: accelerate's device map; does not go with several processes.

    Raises:
        BadInputError: a device map, a numbered device, or processes that cannot be reached.
    """
    if processes() == 1:
        return ALONE
    if device_map:
        raise BadInputError(
            f"--device-map {device_map} spreads one process over all devices; with {processes()} processes give every one a whole model, or start one process"
        )
    if device.startswith("cuda:"):
        raise BadInputError(f"--device {device} would put {processes()} processes on one device; give --device cuda, each takes its own")
    import atexit
    from datetime import timedelta

    import torch.distributed as dist
    from accelerate import PartialState

    try:
        state = PartialState(cpu=not device.startswith("cuda"), timeout=timedelta(days=PATIENCE_DAYS))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInputError(f"the {processes()} processes do not find each other: {reason}; check the launcher's address and port") from error
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return Ranks(int(state.process_index), int(state.num_processes), int(state.local_process_index))
