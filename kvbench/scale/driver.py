"""Hands pairs to workers until every pair has an answer or has failed too often."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.errors import BadInputError
from kvbench.runs.store import first_difference
from kvbench.scale.engines import Engine
from kvbench.scale.pairs_file import PairTask
from kvbench.scale.work import Commands, PairRecord, read_record, work_on_pair, write_record

SETTLED = ("finished", "refused")


def open_pairs(out: Path, tasks: Sequence[PairTask]) -> list[PairTask]:
    """The tasks that have no answer yet.

    Raises:
        BadInputError: a pair's directory belongs to another task.
    """
    left = []
    for task in tasks:
        record = read_record(out / task.label)
        if record is not None and record.task != task:
            found = first_difference(record.task.model_dump(mode="json"), task.model_dump(mode="json"))
            where, stored, asked = found or ("", "", "")
            raise BadInputError(
                f"'{out / task.label}' was made by another sweep: {where} is {stored!r} there and {asked!r} now; choose another --out"
            )
        if record is None or record.state not in SETTLED:
            left.append(task)
    return left


def sweep_pairs(
    tasks: Sequence[PairTask],
    out: Path,
    engine: Engine,
    commands: Commands,
    *,
    workers: int,
    retries: int,
    threads: int,
    told: Callable[[PairRecord], None],
) -> list[PairRecord]:
    """Work on all pairs that have no answer yet.

    Args:
        tasks: all pairs.
        out: their directories' parent.
        engine: where workers run.
        commands: what the command line lends.
        workers: pairs at the same time.
        retries: how often a pair that failed is begun again, unless it would fail alike.
        threads: per worker.
        told: called when a pair has an answer, has failed, or is begun again (state waiting).

    Returns:
        The records of all pairs, in order.
    """
    left = open_pairs(out, tasks)
    waiting, running = deque(left), dict[str, PairTask]()
    attempts = {task.label: 0 for task in left}
    if left:
        with engine:
            while waiting or running:
                while waiting and len(running) < workers:
                    task = waiting.popleft()
                    attempts[task.label] += 1
                    running[task.label] = task
                    engine.start(task.label, (work_on_pair, (task, str(out.absolute() / task.label), commands, str(Path.cwd()), threads)))
                label, death = engine.wait()
                task = running.pop(label)
                record = _after(task, out / label, death)
                again = record.state == "failed" and not record.permanent and attempts[label] <= retries
                if again:
                    record = record.model_copy(update={"state": "waiting"})
                    waiting.append(task)
                write_record(out / label, record)
                told(record)
    return [read_record(out / task.label) or PairRecord(task=task, state="failed", reason="no record was written") for task in tasks]


def _after(task: PairTask, directory: Path, death: str | None) -> PairRecord:
    """The record once a worker has ended; a worker that died had no time to write it."""
    record = read_record(directory) or PairRecord(task=task, state="running", attempts=1)
    if death is None and record.state != "running":
        return record
    return record.model_copy(update={"state": "failed", "reason": death or "the worker ended without an answer", "pid": None})
