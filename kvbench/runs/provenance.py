"""Where and with what: collected without importing a heavy library."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from pydantic import JsonValue

from kvbench._version import __version__
from kvbench.runs.schema import Provenance
from kvbench.storage import utc_now

_LIBRARIES = ("torch", "transformers", "lm-eval", "datasets", "accelerate", "safetensors", "numpy", "pandas", "scipy", "statsmodels")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def collect(
    *,
    started_utc: str | None = None,
    command: str | None = None,
    cost: Mapping[str, JsonValue] | None = None,
    notes: Sequence[str] = (),
) -> Provenance:
    """Record commit, versions, machine, threads and time; `finished_utc` is now.

    Args:
        started_utc: when the work began (`kvbench.storage.utc_now()`).
        command: command line; None takes this process's own.
        cost: wall seconds by stage, tokens/s, peak bytes.
        notes: what a reader must know.
    """
    commit, dirty = _checkout()
    return Provenance(
        command=command if command is not None else command_line(),
        started_utc=started_utc,
        finished_utc=utc_now(),
        commit=commit,
        dirty=dirty,
        versions=library_versions(),
        python=platform.python_version(),
        machine=_machine(),
        threads=_threads(),
        cost=dict(cost or {}),
        notes=tuple(notes),
    )


def library_versions() -> dict[str, str]:
    """Versions of kvbench and of what decides a score, from the installed packages; nothing is imported."""
    found = {"kvbench": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """This process's command line, quoted for a shell."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return shlex.join([program, *sys.argv[1:]])


def _checkout() -> tuple[str | None, bool | None]:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return (commit or None), (None if status is None else bool(status))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _machine() -> dict[str, str]:
    machine = {
        "system": platform.platform(),
        "processor": processor(),
        "cpus": str(os.cpu_count() or 0),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        machine["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return machine


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> dict[str, int]:
    found = {name: int(value) for name in _THREAD_VARIABLES if (value := os.environ.get(name, "")).isdigit()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = int(torch.get_num_threads())
    return found
