"""Where workers run: processes of this machine, or Ray."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

from kvbench.errors import BadInputError

Call = tuple[Callable[..., str], tuple[object, ...]]
OBJECT_STORE_BYTES = 96 << 20
"""Ray's shared memory: workers hand back one word, everything else is in files."""


class Engine(Protocol):
    """Starts workers and says when one has ended."""

    def __enter__(self) -> Engine:
        """Begin."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all workers."""
        ...

    def start(self, key: str, call: Call) -> None:
        """Start one worker on a call."""
        ...

    def wait(self) -> tuple[str, str | None]:
        """The key of a worker that has ended, and how it died, if it did."""
        ...


@dataclass
class LocalEngine:
    """A fresh process per pair on this machine: memory and devices are free again after each."""

    running: dict[str, BaseProcess] = field(default_factory=dict)

    def __enter__(self) -> LocalEngine:
        """Nothing to begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all workers."""
        for process in self.running.values():
            process.kill()
            process.join()

    def start(self, key: str, call: Call) -> None:
        """Start one worker on a call."""
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(os.getpid(), *call))
        process.start()
        self.running[key] = process

    def wait(self) -> tuple[str, str | None]:
        """The key of a worker that has ended, and how it died, if it did."""
        ready = wait([process.sentinel for process in self.running.values()])
        key = next(key for key, process in self.running.items() if process.sentinel in ready)
        process = self.running.pop(key)
        process.join()
        code = process.exitcode or 0
        if code == 0:
            return key, None
        return key, f"the worker was killed by {signal.Signals(-code).name}" if code < 0 else f"the worker ended with status {code}"


def _child(parent: int, function: Callable[..., str], arguments: tuple[object, ...]) -> None:
    """Run a call in a process that does not outlive its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            raise SystemExit(1)
    function(*arguments)


class RayEngine:
    """A Ray worker per pair, never used twice; Ray places it on any machine of the cluster that shares the output directory.

    Args:
        workers: of a local Ray; those of a cluster are its own affair.
        address: of a running cluster, e.g. auto; None starts a local Ray for the length of the sweep.
        gpus: GPUs per pair, also fractions.

    Raises:
        BadInputError: Ray is not installed.
    """

    def __init__(self, workers: int, *, address: str | None = None, gpus: float = 0.0) -> None:
        if importlib.util.find_spec("ray") is None:
            raise BadInputError("--engine ray needs Ray: pip install 'kvbench[ray]', or use --engine local")
        self.workers, self.address, self.gpus = workers, address, gpus
        self.running: dict[Any, str] = {}

    def __enter__(self) -> RayEngine:
        """Start or join Ray, without dashboard, statistics or a view of the network."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray = _ray()

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is not None:
                ray.init(address=self.address, **quiet)
            else:
                ray.init(
                    num_cpus=self.workers,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise BadInputError(f"Ray does not start or answer: {str(error).strip().splitlines()[0]}; check --ray-address") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave Ray; a local one ends."""
        ray = _ray()

        for reference in self.running:
            ray.cancel(reference, force=True)
        ray.shutdown()

    def start(self, key: str, call: Call) -> None:
        """Start one worker on a call."""
        ray = _ray()

        function, arguments = call
        # Retries are the sweep's, which counts them; max_calls ends the process, so that its memory and devices are free again.
        remote = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=0, max_calls=1)(function)
        self.running[remote.remote(*arguments)] = key

    def wait(self) -> tuple[str, str | None]:
        """The key of a worker that has ended, and how it died, if it did."""
        ray = _ray()

        ready, _ = ray.wait(list(self.running), num_returns=1)
        key = self.running.pop(ready[0])
        try:
            ray.get(ready[0])
        except ray.exceptions.WorkerCrashedError:
            return key, "the Ray worker died"
        except ray.exceptions.RayError as error:
            return key, _first_line(error)
        except Exception as error:  # whatever the worker raised, Ray raises here; it is recorded with the pair
            return key, _first_line(error)
        return key, None


def _ray() -> Any:
    """Ray, which is optional."""
    return importlib.import_module("ray")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    # Ray puts the remote traceback before the message.
    return (lines[-1] if lines else type(error).__name__).strip()


def make_engine(name: str, workers: int, *, address: str | None, gpus: float) -> Engine:
    """An engine by name.

    Raises:
        BadInputError: an unknown one, or options that do not go with it.
    """
    choices: Sequence[str] = ("local", "ray")
    if name not in choices:
        raise BadInputError(f"--engine {name} is unknown; it is one of {', '.join(choices)}")
    if workers < 1:
        raise BadInputError(f"--workers {workers}; it must be at least 1")
    if name == "local" and (address is not None or gpus):
        raise BadInputError("--ray-address and --gpus go with --engine ray; local workers share the devices of this machine")
    return LocalEngine() if name == "local" else RayEngine(workers, address=address, gpus=gpus)
