"""The work on one pair, in a process of its own: stage after stage, each skipped where its result lies there already."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from kvbench.errors import KVBenchError
from kvbench.runs.files import read_stored, write_stored
from kvbench.runs.schema import SCHEMA_VERSION, Stored
from kvbench.scale.pairs_file import PLACE, PairTask, Stage
from kvbench.storage import utc_now

RECORD, LOG, LOCK = "pair.json", "log.txt", ".lock"
LOCK_SECONDS = 10.0
State: TypeAlias = Literal["waiting", "running", "finished", "refused", "failed"]
REFUSED = 4
"""Exit status of a check or a gate that refuses a pair."""


class PairRecord(Stored):
    """The file pair.json: how far a pair has come."""

    format: Literal["kvbench-pair"] = "kvbench-pair"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    task: PairTask
    """What is to be done; a finished pair is skipped only if this is the same."""
    state: State
    """waiting, running, finished, refused (by check or gates) or failed."""
    stage: str | None = None
    """Stage at work, or where it failed."""
    reason: str | None = None
    """Why it was refused or failed."""
    permanent: bool = False
    """Whether the same command would fail again (bad input)."""
    verdict: str | None = None
    """Reading of the best mapper, or the screen's verdict."""
    headline: str | None = None
    """One line about the result."""
    seconds: float = 0.0
    """Wall time over all attempts that ended by themselves."""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """By stage, of the last attempt."""
    attempts: int = 0
    """How often it was begun."""
    pid: int | None = None
    """Process at work."""
    updated: str | None = None
    """UTC."""


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        status: exit status.
        output: what it printed to stdout.
        message: what went wrong, in one line.
    """

    status: int
    output: str = ""
    message: str = ""


@dataclass(frozen=True)
class Commands:
    """What the command line lends: functions of modules, so that they reach other processes by name.

    Attributes:
        perform: runs one kvbench command in this process, its talk appended to a log file.
        reasons: why `check --json` refuses, from what it printed.
        summarise: (verdict, headline) of a finished pair's directory.
    """

    perform: Callable[[Sequence[str], Path], Done]
    reasons: Callable[[str], str]
    summarise: Callable[[Path], tuple[str | None, str | None]]


def read_record(directory: Path) -> PairRecord | None:
    """The record of a pair, if there is one."""
    file = directory / RECORD
    return read_stored(file, PairRecord) if file.is_file() else None


def write_record(directory: Path, record: PairRecord) -> None:
    """Replace the record of a pair."""
    write_stored(directory / RECORD, record.model_copy(update={"updated": utc_now()}))


def work_on_pair(task: PairTask, directory: str, commands: Commands, cwd: str, threads: int) -> str:
    """Bring a pair as far as it goes and record it. Results are in the directory alone, so a killed worker loses only its time.

    Args:
        task: what to do.
        directory: of the pair.
        commands: see `Commands`.
        cwd: where relative paths of the task start.
        threads: for the numerical libraries.

    Returns:
        The state reached.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.chdir(cwd)
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    with _alone(place):
        before = read_record(place)
        same = before if before is not None and before.task == task else None
        record = PairRecord(
            task=task, state="running", attempts=(same.attempts if same else 0) + 1, seconds=same.seconds if same else 0.0, pid=os.getpid()
        )
        started = time.perf_counter()
        for stage in task.stages:
            record = record.model_copy(update={"stage": stage.name})
            write_record(place, record)
            clock = time.perf_counter()
            done = _do(stage, place, commands)
            took = {**record.stage_seconds, stage.name: round(record.stage_seconds.get(stage.name, 0.0) + time.perf_counter() - clock, 3)}
            record = record.model_copy(update={"stage_seconds": took, "seconds": _seconds(same, started)})
            if done is not None and done.status:
                refused = done.status == REFUSED
                reason = commands.reasons(done.output) if refused and stage.name == "check" else done.message
                ended: dict[str, object] = {
                    "state": "refused" if refused else "failed",
                    "reason": reason,
                    "permanent": done.status == KVBenchError.exit_code,
                    "pid": None,
                }
                write_record(place, record.model_copy(update=ended))
                return str(ended["state"])
        verdict, headline = commands.summarise(place)
        update: dict[str, object] = {
            "state": "finished",
            "stage": None,
            "pid": None,
            "verdict": verdict,
            "headline": headline,
            "seconds": _seconds(same, started),
        }
        write_record(place, record.model_copy(update=update))
        return "finished"


def _seconds(before: PairRecord | None, started: float) -> float:
    return round((before.seconds if before else 0.0) + time.perf_counter() - started, 3)


def _do(stage: Stage, place: Path, commands: Commands) -> Done | None:
    """Run a stage, or None where its result is there."""
    if stage.result is not None and (place / stage.result).exists():
        return None
    done = commands.perform([part.replace(PLACE, str(place)) for part in stage.arguments], place / LOG)
    if stage.name == "screen" and done.status in (3, REFUSED) and (place / "screen" / "verdict.json").exists():
        return None  # inconclusive and do-not-deploy are answers, not failures
    return done


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process per pair: a worker that outlived its engine must not write beside a second one.

    Raises:
        KVBenchError: another process is at work.
    """
    with (place / LOCK).open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise KVBenchError(f"another process works on '{place}'; wait for it or end it") from error
                time.sleep(0.2)
        yield
