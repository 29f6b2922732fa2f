"""A run on disk: spec first, then one sample file per task and arm, then results, then provenance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from pydantic import JsonValue

from kvbench.errors import ArtifactError, BadInputError
from kvbench.runs.files import disk_errors, read_stored, write_stored
from kvbench.runs.measured import Extras, read_extras
from kvbench.runs.schema import Provenance, RunResults, RunSpec, SampleRow, TaskResult
from kvbench.runs.table import concatenated, read_rows, write_rows

SPEC, RESULTS, PROVENANCE, SAMPLES, LM_EVAL = "spec.json", "results.json", "provenance.json", "samples", "lm_eval"


class RunStore:
    """A run directory.

    A writer calls, in this order:

    1. `RunStore.create(path, spec)`: writes spec.json, or resumes a run of the identical spec;
    2. per task and arm, `has(task, arm)` to skip what is there, else `write_samples(task, arm, rows)`;
    3. `write_results(results)`, native lm-eval files into `lm_eval_directory(arm)`;
    4. `finish(provenance)`.

    Every file appears whole or not at all, so that a killed run keeps what it had finished.

    Attributes:
        path: the directory.
        spec: what the run is of.
    """

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path, self.spec = path, spec

    @classmethod
    def create(cls, path: Path | str, spec: RunSpec) -> RunStore:
        """Start a run, or resume it.

        Raises:
            BadInputError: the directory holds a run of another spec (the message names the first difference) or other files.
            KVBenchError: the disk is full.
        """
        path = Path(path)
        if (path / SPEC).is_file():
            store = cls.open(path)
            difference = first_difference(store.spec.model_dump(mode="json"), spec.model_dump(mode="json"))
            if difference is not None:
                name, stored, asked = difference
                raise BadInputError(
                    f"'{path}' holds a run with {name} = {_short(stored)}, but this command asks for {_short(asked)}; "
                    "repeat the command as it was to resume, or choose another --out"
                )
            return store
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInputError(f"'{path}' exists and is not a kvbench run; choose another --out")
        with disk_errors(path):
            (path / SAMPLES).mkdir(parents=True, exist_ok=True)
        write_stored(path / SPEC, spec)
        return cls(path, spec)

    @classmethod
    def refuse_other(cls, path: Path | str, *, source: str, target: str, mappers: Sequence[str]) -> None:
        """What `create` would refuse and is known before any model is loaded: other files there, other models, other mappers.

        Args:
            path: directory of the run.
            source: name of the source model.
            target: name of the target model.
            mappers: names of the arms that are neither a model nor a control.

        Raises:
            BadInputError: the directory holds something else.
        """
        path = Path(path)
        if not (path / SPEC).is_file():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise BadInputError(f"'{path}' exists and is not a kvbench run; choose another --out")
            return
        spec = cls.open(path).spec
        stored = {"source": spec.source.name if spec.source else "none", "target": spec.target.name if spec.target else "none"}
        stored["mappers"] = ", ".join(arm.name for arm in spec.arms if arm.role == "mapper") or "none"
        asked = {"source": source, "target": target, "mappers": ", ".join(mappers) or "none"}
        for name, value in asked.items():
            if stored[name] != value:
                raise BadInputError(
                    f"'{path}' holds a run with {name} = {stored[name]}, but this command asks for {value}; "
                    "repeat the command as it was to resume, or choose another --out"
                )

    @classmethod
    def open(cls, path: Path | str) -> RunStore:
        """Open an existing run.

        Raises:
            BadInputError: no such directory.
            ArtifactError: not a run, damaged, or of a newer version.
        """
        path = Path(path)
        if not path.is_dir():
            raise BadInputError(f"there is no run at '{path}'; check the path")
        return cls(path, read_stored(path / SPEC, RunSpec))

    def has(self, task: str, arm: str) -> bool:
        """Whether this task was finished for this arm."""
        return self._file(task, arm).is_file()

    def write_samples(self, task: str, arm: str, rows: Sequence[SampleRow]) -> None:
        """Store all items of one task and arm, atomically.

        Raises:
            BadInputError: no rows, rows of another task or arm, a doubled (filter, doc_id), or names that the spec does not have.
            KVBenchError: the disk is full; what was finished before is intact.
        """
        self._known(task, arm)
        if not rows:
            raise BadInputError(f"task '{task}' gave no samples for arm '{arm}'; an empty task cannot be compared, leave it out of --tasks")
        seen: set[tuple[str, int]] = set()
        for row in rows:
            if (row.task, row.arm) != (task, arm):
                raise BadInputError(f"a sample of task '{row.task}', arm '{row.arm}' was given for task '{task}', arm '{arm}'")
            if (row.filter, row.doc_id) in seen:
                raise BadInputError(f"task '{task}', arm '{arm}': item {row.doc_id} (filter {row.filter}) comes twice; lm-eval ranks may overlap")
            seen.add((row.filter, row.doc_id))
        write_rows(self._file(task, arm), rows)

    def write_results(self, results: Iterable[TaskResult]) -> None:
        """Store lm-eval's aggregated figures (results.json), replacing those of before.

        Raises:
            KVBenchError: the disk is full.
        """
        write_stored(self.path / RESULTS, RunResults(results=tuple(results)))

    def finish(self, provenance: Provenance) -> None:
        """Mark the run as finished.

        Raises:
            BadInputError: a task of the spec lacks samples for an arm.
            KVBenchError: the disk is full.
        """
        missing = self.missing()
        if missing:
            shown = ", ".join(f"{task} ({arm})" for task, arm in missing[:3])
            raise BadInputError(f"the run at '{self.path}' is not finished: no samples of {shown}{' and others' if len(missing) > 3 else ''}")
        write_stored(self.path / PROVENANCE, provenance)

    def missing(self) -> list[tuple[str, str]]:
        """(task, arm) of the spec without samples."""
        return [(task.name, arm.name) for task in self.spec.tasks for arm in self.spec.arms if not self.has(task.name, arm.name)]

    def samples(self, tasks: Sequence[str] | None = None, arms: Sequence[str] | None = None) -> pd.DataFrame:
        """All rows as a data frame; columns as in `kvbench.runs.table.arrow_table`.

        Args:
            tasks: only these; None for all.
            arms: only these; None for all.

        Raises:
            ArtifactError: a damaged file.
        """
        frames = []
        for task in self.spec.tasks:
            for arm in self.spec.arms:
                if (tasks is None or task.name in tasks) and (arms is None or arm.name in arms) and self.has(task.name, arm.name):
                    frame = read_rows(self._file(task.name, arm.name))
                    if set(frame["task"]) != {task.name} or set(frame["arm"]) != {arm.name}:
                        raise ArtifactError(
                            f"'{self._file(task.name, arm.name)}' holds other samples than its name says; delete it and repeat the run"
                        )
                    frames.append(frame)
        return concatenated(frames)

    def results(self) -> RunResults:
        """lm-eval's aggregated figures; empty where there are none yet."""
        file = self.path / RESULTS
        return read_stored(file, RunResults) if file.is_file() else RunResults()

    def provenance(self) -> Provenance | None:
        """How the run was made; None while it is not finished."""
        file = self.path / PROVENANCE
        return read_stored(file, Provenance) if file.is_file() else None

    def extras(self) -> Extras:
        """Diagnostics, sweep, latency, handoff, where they were measured."""
        return read_extras(self.path)

    def lm_eval_directory(self, arm: str) -> Path:
        """Where the native lm-eval result and sample files of an arm go."""
        return self.path / LM_EVAL / _file_name(arm)

    def _file(self, task: str, arm: str) -> Path:
        return self.path / SAMPLES / f"{_file_name(task)}@{_file_name(arm)}.parquet"

    def _known(self, task: str, arm: str) -> None:
        for kind, name, known in (("task", task, [t.name for t in self.spec.tasks]), ("arm", arm, [a.name for a in self.spec.arms])):
            if name not in known:
                raise BadInputError(f"{kind} '{name}' is not in the spec of the run at '{self.path}' ({', '.join(known) or 'none'})")


def first_difference(stored: JsonValue, asked: JsonValue, where: str = "") -> tuple[str, JsonValue, JsonValue] | None:
    """Path, stored value and asked value of the first field in which two JSON values differ."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for name in [*stored, *(key for key in asked if key not in stored)]:
            found = first_difference(stored.get(name), asked.get(name), f"{where}.{name}" if where else name)
            if found is not None:
                return found
        return None
    if isinstance(stored, list) and isinstance(asked, list):
        for index, (first, second) in enumerate(zip(stored, asked, strict=False)):
            label = first.get("name") if isinstance(first, dict) else None
            found = first_difference(first, second, f"{where}[{label if isinstance(label, str) else index}]")
            if found is not None:
                return found
        return None if len(stored) == len(asked) else (f"{where}: number of entries", len(stored), len(asked))
    return None if stored == asked and type(stored) is type(asked) else (where, stored, asked)


def _file_name(name: str) -> str:
    # Reversible, and keeps '@' free as the separator.
    return quote(name, safe=" ,=+()[]")


def _short(value: JsonValue) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
