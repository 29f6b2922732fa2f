"""One view of all that can be compared: kvbench runs and plain lm-eval result folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvbench.errors import BadInputError
from kvbench.runs.measured import Extras
from kvbench.runs.schema import Provenance, Role
from kvbench.runs.store import SPEC, RunStore


@dataclass(frozen=True)
class Conditions:
    """How one arm was asked one task; two arms are compared only if all known fields agree.

    Attributes:
        num_fewshot: examples in the prompt.
        limit: lm-eval's --limit.
        version: of the task.
        chat_template: name or SHA-256.
        system_instruction: text or SHA-256.
        generation: overrides of generation arguments, as JSON.
    """

    num_fewshot: int | None = None
    limit: float | None = None
    version: str | None = None
    chat_template: str | None = None
    system_instruction: str | None = None
    generation: str | None = None


@dataclass(frozen=True)
class TaskReading:
    """How a comparison reads a task, where the run says so; see the fields of `TaskSpec`.

    Attributes:
        primary_metric: for the headline.
        primary_filter: for the headline.
        chance: score of guessing.
        cluster: group label that is resampled as a whole.
    """

    primary_metric: str | None = None
    primary_filter: str | None = None
    chance: float | None = None
    cluster: str | None = None


@dataclass(frozen=True)
class RunArm:
    """One arm of a run.

    Attributes:
        name: in tables.
        role: see `Role`.
        mapper: what maps, as text.
        detail: further pins for the provenance table.
    """

    name: str
    role: Role
    mapper: str | None = None
    detail: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparableRun:
    """What a comparison needs of a run.

    Attributes:
        path: where it lies.
        kind: 'kvbench' or 'lm-eval'.
        arms: in order.
        tasks: in order.
        frame: all samples, columns as in `kvbench.runs.table`.
        conditions: by (task, arm).
        reading: by task.
        pooled: groups read as one task.
        source: name of the source model, if any.
        target: name of the target model, if any.
        settings: dtype, hold_back and so on, for the provenance table.
        provenance: None where it is unknown or the run is not finished.
        extras: optional measurements beside it.
        notes: what a reader must know.
    """

    path: Path
    kind: str
    arms: tuple[RunArm, ...]
    tasks: tuple[str, ...]
    frame: pd.DataFrame
    conditions: dict[tuple[str, str], Conditions]
    reading: dict[str, TaskReading] = field(default_factory=dict)
    pooled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    provenance: Provenance | None = None
    extras: Extras = field(default_factory=Extras)
    notes: tuple[str, ...] = ()


def load_runs(path: Path | str) -> list[ComparableRun]:
    """Read what lies at a path: one kvbench run, or one lm-eval run per result folder below.

    Raises:
        BadInputError: neither.
        ArtifactError: damaged, or of a newer version.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadInputError(f"there is no directory '{path}'; give a run of 'kvbench evaluate' or an --output_path of 'lm_eval --log_samples'")
    if (path / SPEC).is_file():
        return [from_store(RunStore.open(path))]
    from kvbench.runs.lm_eval_output import read_output

    return read_output(path)


def load_frame(path: Path | str) -> pd.DataFrame:
    """All samples at a path as one data frame: one row per task, filter, item and arm.

    Works on a kvbench run and on an lm-eval output folder. Columns: the fields of `SampleRow`; `metric.<name>`, `size.<name>`,
    `better.<name>` (higher is better) and `group.<name>` for its dict fields.

    Raises:
        BadInputError: neither a run nor an lm-eval folder.
        ArtifactError: damaged, or of a newer version.
    """
    from kvbench.runs.table import concatenated

    return concatenated([run.frame for run in load_runs(path)])


def from_store(store: RunStore) -> ComparableRun:
    """The view of a kvbench run."""
    spec = store.spec
    provenance = store.provenance()
    notes = list(provenance.notes) if provenance else []
    if provenance is None:
        notes.append(f"the run at '{store.path}' was not finished; its provenance is missing")
    generation = spec.model_dump_json(include={"generation"})
    conditions = {
        (task.name, arm.name): Conditions(
            num_fewshot=task.num_fewshot,
            limit=task.limit if task.limit is not None else spec.limit,
            version=task.version,
            chat_template=spec.chat_template or "",
            system_instruction=spec.system_instruction or "",
            generation=generation if spec.generation else "",
        )
        for task in spec.tasks
        for arm in spec.arms
    }
    settings = {
        name: str(value)
        for name, value in spec.model_dump(mode="json", include={"hold_back", "batch_size", "dtype", "device", "attention", "limit"}).items()
        if value is not None
    }
    settings |= {f"seed {name}": str(value) for name, value in spec.seeds.items()} | {f"data {name}": value for name, value in spec.data.items()}
    settings |= {name: str(value) for name, value in spec.settings.items()}
    if spec.subset:
        settings["subset"] = ", ".join(f"{name} {value}" for name, value in spec.subset.items())
    for role, model in (("source", spec.source), ("target", spec.target)):
        if model is not None:
            settings[role] = model.name + (f" @ {model.revision}" if model.revision else "")
            settings |= {
                f"{role} {key}": str(value) for key, value in model.pin.items() if isinstance(value, str | int) and key not in ("name", "revision")
            }
    return ComparableRun(
        path=store.path,
        kind="kvbench",
        arms=tuple(RunArm(arm.name, arm.role, arm.mapper, {key: str(value) for key, value in arm.pin.items()}) for arm in spec.arms),
        tasks=tuple(task.name for task in spec.tasks),
        frame=store.samples(),
        conditions=conditions,
        reading={task.name: TaskReading(task.primary_metric, task.primary_filter, task.chance, task.cluster) for task in spec.tasks},
        pooled=dict(spec.pooled),
        source=spec.source.name if spec.source else None,
        target=spec.target.name if spec.target else None,
        settings=settings,
        provenance=provenance,
        extras=store.extras(),
        notes=tuple(notes),
    )
