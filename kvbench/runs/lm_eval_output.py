"""Plain `lm_eval --log_samples --output_path` folders: each result set is one arm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import ArtifactError, BadInputError
from kvbench.runs.convert import rows_from_lm_eval
from kvbench.runs.schema import Provenance, Role
from kvbench.runs.sources import ComparableRun, Conditions, RunArm
from kvbench.runs.table import concatenated, frame_of

_CONTROLS = ("identity", "oracle", "zero", "raw", "random", "shuffled")


def read_output(path: Path | str) -> list[ComparableRun]:
    """Read an lm-eval output folder, or a folder of such folders.

    The arm takes the name of the folder given; where that holds several result sets, the name of the model's folder. Of several
    results in one folder the newest counts, and a note says so.

    Raises:
        BadInputError: no results, or results without samples.
        ArtifactError: a file that is not lm-eval's.
    """
    path = Path(path)
    found: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob("results_*.json")):
        found.setdefault(file.parent, []).append(file)
    if (path / "screen.json").is_file():
        raise BadInputError(f"'{path}' is a screen: its own report is '{path / 'report'}', and its runs are the folders canary, run and text in it")
    if not found:
        raise BadInputError(
            f"'{path}' holds neither a kvbench run (spec.json) nor lm-eval results (results_*.json); run lm_eval with --log_samples --output_path"
        )
    return [_read(directory, files, _label(path, directory, len(found))) for directory, files in found.items()]


def _label(path: Path, directory: Path, count: int) -> str:
    if count == 1:
        return path.resolve().name
    # lm-eval puts one folder per model below --output_path; anything above it that differs is more telling.
    parts = directory.relative_to(path).parts
    return parts[0] if len(parts) > 1 else directory.name


def _read(directory: Path, files: list[Path], label: str) -> ComparableRun:
    newest = files[-1]
    notes = [f"'{directory}' holds {len(files)} results; the newest, {newest.name}, was taken"] if len(files) > 1 else []
    results = _json(newest)
    if not isinstance(results.get("results"), dict) or not isinstance(results.get("config"), dict):
        raise ArtifactError(f"'{newest}' is not an lm-eval result file: it lacks 'results' or 'config'")
    date = newest.stem.removeprefix("results_")
    configs, config = results.get("configs", {}), results["config"]
    pooled = _pooled(results)
    directions = results.get("higher_is_better", {})
    arm = _arm(label, config)
    frames, tasks = [], []
    for task in configs:
        file = directory / f"samples_{task}_{date}.jsonl"
        if not file.is_file():
            raise BadInputError(f"'{directory}' has results of task '{task}' but no samples ({file.name}); repeat the run with --log_samples")
        frames.append(frame_of(rows_from_lm_eval(_lines(file), task, arm.name, higher_is_better=directions.get(task))))
        tasks.append(task)
    conditions = {
        (task, arm.name): Conditions(
            num_fewshot=_whole(results.get("n-shot", {}).get(task)),
            limit=_number(config.get("limit")),
            version=str(results["versions"][task]) if task in results.get("versions", {}) else None,
            chat_template=str(results.get("chat_template_sha") or ""),
            system_instruction=str(results.get("system_instruction_sha") or ""),
            generation=json.dumps(config.get("gen_kwargs") or {}, sort_keys=True, default=str),
        )
        for task in tasks
    }
    arguments = _model_args(config)
    return ComparableRun(
        path=directory,
        kind="lm-eval",
        arms=(arm,),
        tasks=tuple(tasks),
        frame=concatenated(frames),
        conditions=conditions,
        pooled=pooled,
        source=arguments.get("source"),
        target=arguments.get("pretrained") or arguments.get("target") if config.get("model") == "kvxfer" else None,
        settings={
            name: str(config[key])
            for name, key in (("dtype", "model_dtype"), ("batch_size", "batch_size"), ("device", "device"), ("limit", "limit"))
            if config.get(key) not in (None, "")
        },
        provenance=Provenance(
            commit=None,
            versions={
                name: str(results[key])
                for name, key in (("lm-eval", "lm_eval_version"), ("transformers", "transformers_version"))
                if results.get(key)
            },
            cost={"total_seconds": float(results["total_evaluation_time_seconds"])}
            if _is_number(results.get("total_evaluation_time_seconds"))
            else {},
        ),
        notes=tuple(notes),
    )


def _arm(label: str, config: Mapping[str, Any]) -> RunArm:
    arguments = _model_args(config)
    role: Role = "model"
    mapper = None
    if config.get("model") == "kvxfer":
        kind, mapper = arguments.get("arm", "transfer"), arguments.get("mapper")
        role = "target" if kind == "target" else "source" if kind == "source" else "control" if mapper in _CONTROLS else "mapper"
    detail = {"model": str(config.get("model")), "model_args": ",".join(f"{key}={value}" for key, value in arguments.items())}
    return RunArm(label, role, mapper, detail)


def _model_args(config: Mapping[str, Any]) -> dict[str, str]:
    """Model arguments; a mapping in 0.4.13, a string before."""
    given = config.get("model_args")
    if isinstance(given, Mapping):
        return {str(key): str(value) for key, value in given.items()}
    pairs = (part.partition("=") for part in str(given or "").split(",") if part)
    return {key.strip(): value for key, _, value in pairs}


def _pooled(results: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Groups that lm-eval aggregates into one figure; a plain list of tasks is none."""
    aggregated = {
        name for name, figures in (results.get("groups") or {}).items() if any("," in key and _is_number(value) for key, value in figures.items())
    }
    members: Mapping[str, list[str]] = results.get("group_subtasks") or {}
    leaves = set(results.get("configs", {}))

    def tasks_of(name: str) -> Iterator[str]:
        for member in members.get(name, []):
            if member in leaves:
                yield member
            else:
                yield from tasks_of(member)

    inner = {member for name in aggregated for member in members.get(name, [])}
    return {name: tuple(dict.fromkeys(tasks_of(name))) for name in sorted(aggregated - inner)}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"'{file}' cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ArtifactError(f"'{file}' is not an lm-eval result file")
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    # By '\n' alone: JSON text may hold other line separators.
    with file.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ArtifactError(f"'{file}', line {number} is cut or damaged: {error}; copy it again or repeat the run") from error


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _number(value: object) -> float | None:
    return float(str(value)) if value is not None and _is_number(value) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
