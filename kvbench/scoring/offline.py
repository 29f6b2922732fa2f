"""Any stock task from local rows: task files that include lm-eval's own and take their data from a folder, without a network.

A folder DIR holds `<folder>/<split>.jsonl` with rows in the schema of the hub data set; the folder is the task's name, or for the data sets
of `FOLDERS` the one named there. Of a task that is evaluated on a validation split, test.jsonl will do; the overlay's note says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import BadInputError
from kvbench.paths import tasks_directory
from kvbench.scoring.rows import SCHEMAS, Field, anything, check_rows
from kvbench.scoring.taskfiles import Leaf, find_definitions
from kvbench.storage import sha256_of, write_atomic

AVAILABLE = "mmlu_available"
"""Name of the group of those MMLU subjects that the local data has a test split for, 5-shot as in `kvxfer_suite`."""
MARK = "# Written by kvbench from local data; changes are lost.\n"
FOLDERS: Mapping[tuple[str, str | None], str] = {
    ("allenai/ai2_arc", "ARC-Easy"): "arc_easy",
    ("allenai/ai2_arc", "ARC-Challenge"): "arc_challenge",
    ("Rowan/hellaswag", None): "hellaswag",
    ("allenai/winogrande", "winogrande_xl"): "winogrande",
    ("baber/piqa", None): "piqa",
    ("aps/super_glue", "boolq"): "boolq",
    ("openai/gsm8k", "main"): "gsm8k",
    ("EleutherAI/coqa", None): "coqa",
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): "wikitext2",
}
"""Hub data set and configuration -> folder. cais/mmlu lies in mmlu/<subject>."""
_LOCAL = ("json", "csv", "parquet", "text", "arrow", "pandas")


@dataclass(frozen=True)
class Overlay:
    """A task that reads local rows.

    Attributes:
        task: lm-eval's name, as in the stock definition.
        path: The task file that was written.
        stock: The task file that it includes.
        files: Split -> local file; empty for a task that makes its own data.
        note: What differs from the stock task, for people; empty if nothing does.
    """

    task: str
    path: Path
    stock: Path
    files: Mapping[str, Path]
    note: str = ""


@dataclass(frozen=True)
class _Plan:
    """How a task finds its data: lines of the overlay, files, and notes; or the file that is missing."""

    settings: Mapping[str, object]
    files: Mapping[str, Path]
    notes: tuple[str, ...] = ()
    no_examples: bool = False
    missing: str = ""


def overlays(
    tasks: Sequence[str], data_dir: Path, out: Path, *, include: Sequence[Path] = (), num_fewshot: int | None = None, check: bool = True
) -> list[Overlay]:
    """Write task files that read local rows.

    `TaskManager(include_path=[out], include_defaults=False)` then loads the same names; `lm_eval --include_path OUT` works as well.

    Args:
        tasks: lm-eval names of tasks, groups and tags, and `mmlu_available`.
        data_dir: folder of local rows.
        out: folder to write to; may hold nothing but what was written here before, which is replaced.
        include: further folders of task files.
        num_fewshot: few-shot examples that will be asked for, where it is known.
        check: read all rows and check them.

    Returns:
        One overlay per task, groups resolved, in order.

    Raises:
        BadInputError: an unknown task, a task without local data, rows that the task cannot read, or a folder that cannot be used.
    """
    if not data_dir.is_dir():
        raise BadInputError(f"the data folder '{data_dir}' does not exist; give the folder that holds <task>/<split>.jsonl")
    if not tasks:
        raise BadInputError("no task given; name one or more with --tasks")
    data_dir = data_dir.resolve()
    names = [name for name in dict.fromkeys(tasks) if name != AVAILABLE]
    subjects = _available(data_dir, include) if AVAILABLE in tasks else {}
    found = find_definitions(names, include) if names else None
    leaves = {**(found.leaves if found else {})}
    for name, leaf in subjects.items():
        leaves.setdefault(name, leaf)
    plans = {
        name: _plan(leaf, data_dir, leaf.num_fewshot if num_fewshot is None or leaf.config.get("num_fewshot") == 0 else num_fewshot)
        for name, leaf in leaves.items()
    }
    _refuse_missing({name: plan.missing for name, plan in plans.items() if plan.missing}, [name for name, plan in plans.items() if not plan.missing])
    if check:
        for name, plan in plans.items():
            for file in dict.fromkeys(plan.files.values()):
                check_rows(file, _fields(leaves[name].config))
    _clear(out)
    for name, path in (found.groups if found else {}).items():
        _write(out / f"group.{_file_name(name)}.yaml", {"include": str(path), "group": name})
    if subjects:
        _write(out / f"group.{AVAILABLE}.yaml", _available_group(subjects))
    return [_write_overlay(leaves[name], plan, out) for name, plan in plans.items()]


def tasks_with_data(data_dir: Path) -> list[str]:
    """Which tasks of `kvxfer_suite` a folder has rows for; MMLU as `mmlu_available`, unless all of it is there.

    Raises:
        BadInputError: the folder does not exist.
    """
    if not data_dir.is_dir():
        raise BadInputError(f"the data folder '{data_dir}' does not exist; give the folder that holds <task>/<split>.jsonl")
    leaves = find_definitions(["kvxfer_suite"]).leaves
    there = [name for name, leaf in leaves.items() if not _plan(leaf, data_dir.resolve(), leaf.num_fewshot).missing]
    names = [name for name in there if not name.startswith("mmlu_")]
    return names + ([AVAILABLE] if len(names) < len(there) else [])


def data_fingerprint(overlay: Overlay) -> str:
    """SHA-256 over the files of a task, by split; where they lie does not count. Without files: of nothing."""
    sums = {split: sha256_of(file) for split, file in overlay.files.items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def manager_over(
    names: Sequence[str],
    data_dir: Path | None,
    folder: Path,
    include: Sequence[Path] = (),
    *,
    num_fewshot: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, str], list[str]]:
    """lm-eval's task manager, over local rows where they are given.

    Args:
        names: tasks and groups.
        data_dir: local rows, or None for the tasks' own data.
        folder: for the task files that point to local rows.
        include: more folders of tasks.
        num_fewshot: asked for in place of the tasks' own.
        metadata: what tasks are built from.

    Returns:
        The manager, fingerprints of local data by task, and what a user must be told.

    Raises:
        BadInputError: an unknown task, or missing rows.
    """
    from kvbench.scoring.evaluate import task_manager

    if data_dir is None:
        return task_manager(names, include, metadata=metadata), {}, []
    from lm_eval.tasks import TaskManager

    laid = overlays(list(names), data_dir, folder, include=list(include), num_fewshot=num_fewshot)
    manager = TaskManager(include_path=[str(folder)], include_defaults=False, metadata=dict(metadata or {}))
    told = [f"{overlay.task}: {overlay.note}" for overlay in laid if overlay.note]
    return manager, {overlay.task: data_fingerprint(overlay) for overlay in laid}, told


def _plan(leaf: Leaf, data_dir: Path, num_fewshot: int) -> _Plan:
    config = leaf.config
    dataset, name = config.get("dataset_path"), config.get("dataset_name")
    if "class" in config:
        return _Plan({}, {}, missing="defined in Python, it loads its data itself")
    if not isinstance(dataset, str) or not dataset:
        # Of data made in code, only that of kvbench's own tasks is known to need no network.
        return _Plan({}, {}, missing="" if leaf.path.is_relative_to(tasks_directory()) else "it makes its data in code")
    if dataset in _LOCAL or dataset.startswith(("/", ".")):
        return _Plan({}, _own_files(config))
    folder = _folder(leaf.name, dataset, name, data_dir)
    splits = {kind: config.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")}
    evaluated = splits["test"] or splits["validation"] or splits["training"]
    if not isinstance(evaluated, str):
        return _Plan({}, {}, missing="its definition names no split")
    files: dict[str, Path] = {
        split: folder / f"{split}.jsonl" for split in dict.fromkeys(splits.values()) if split and (folder / f"{split}.jsonl").is_file()
    }
    notes = []
    if evaluated not in files:
        if evaluated != splits["validation"] or not (folder / "test.jsonl").is_file():
            return _Plan({}, {}, missing=f"{folder.relative_to(data_dir)}/{evaluated}.jsonl")
        files[evaluated] = folder / "test.jsonl"
        notes.append(f"evaluated on {folder.name}/test.jsonl: there is no {evaluated}.jsonl, the split that the stock task evaluates")
    examples = config.get("fewshot_config") or {}
    source = splits["fewshot"] or examples.get("split") or (None if examples.get("samples") else splits["training"] or splits["validation"])
    no_examples = not examples.get("samples") and (source is None or source not in files or (source == evaluated and source != splits["fewshot"]))
    if no_examples and num_fewshot:
        return _Plan(
            {}, {}, missing=f"{folder.relative_to(data_dir)}/{source or splits['training'] or 'train'}.jsonl, for its {num_fewshot} few-shot examples"
        )
    if no_examples and source and source != evaluated:
        notes.append(f"0-shot only: there is no {folder.name}/{source}.jsonl to take few-shot examples from")
    settings: dict[str, object] = {f"{kind}_split": split if split in files else None for kind, split in splits.items()}
    return _Plan(settings, files, tuple(notes), no_examples)


def _folder(task: str, dataset: str, name: object, data_dir: Path) -> Path:
    """The task's own folder if there is one, else its data set's, else again the task's (to be named as missing)."""
    own = data_dir / task
    if own.is_dir():
        return own
    if dataset == "cais/mmlu":
        return data_dir / "mmlu" / str(name)
    known = FOLDERS.get((dataset, name if isinstance(name, str) else None))
    return data_dir / known if known else own


def _own_files(config: Mapping[str, Any]) -> dict[str, Path]:
    """Files of a task that is local already, for its fingerprint."""
    given = (config.get("dataset_kwargs") or {}).get("data_files")
    files = given if isinstance(given, Mapping) else {"train": given} if isinstance(given, str) else {}
    return {str(split): Path(file) for split, file in files.items() if isinstance(file, str) and Path(file).is_file()}


def _fields(config: Mapping[str, Any]) -> Sequence[Field]:
    """What rows must have: by data set where it is known, else what the task's templates name."""
    dataset, name = config.get("dataset_path"), config.get("dataset_name")
    known = SCHEMAS.get(f"{dataset}:{name}") or SCHEMAS.get(str(dataset))
    if known:
        return known
    if config.get("process_docs") or config.get("custom_dataset") or dataset in _LOCAL:
        return ()
    from jinja2 import Environment, meta

    wanted: set[str] = set()
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        template = config.get(key)
        if isinstance(template, str) and "{" in template:
            wanted |= meta.find_undeclared_variables(Environment().parse(template))
        elif isinstance(template, str) and template.isidentifier():
            # lm-eval would take a name that is no field for a constant text.
            wanted.add(template)
    return tuple(anything(field) for field in sorted(wanted))


def _available(data_dir: Path, include: Sequence[Path]) -> dict[str, Leaf]:
    subjects = find_definitions(["mmlu"], include).leaves
    here = {name: leaf for name, leaf in subjects.items() if (data_dir / "mmlu" / str(leaf.config.get("dataset_name")) / "test.jsonl").is_file()}
    if not here:
        raise BadInputError(f"{AVAILABLE}: '{data_dir}' has no mmlu/<subject>/test.jsonl; add one, or leave {AVAILABLE} out")
    return {name: Leaf(name, leaf.path, leaf.config, num_fewshot=5) for name, leaf in sorted(here.items())}


def _available_group(subjects: Mapping[str, Leaf]) -> dict[str, object]:
    return {
        "group": AVAILABLE,
        "task": [{"task": name, "num_fewshot": 5} for name in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1.0},
    }


def _refuse_missing(missing: Mapping[str, str], there: Sequence[str]) -> None:
    if not missing:
        return
    shown = "; ".join(f"{name} ({where})" for name, where in list(missing.items())[:8])
    more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
    remedy = "add these files"
    subjects = [name for name in there if name.startswith("mmlu_")]
    if there:
        named = [name for name in there if not name.startswith("mmlu_")] + ([AVAILABLE] if subjects else [])
        remedy += f", or name what there is: --tasks {','.join(named)}"
    raise BadInputError(f"no local data for {len(missing)} of {len(missing) + len(there)} tasks: {shown}{more}; {remedy}")


def _write_overlay(leaf: Leaf, plan: _Plan, out: Path) -> Overlay:
    stock = [str(leaf.path)]
    if plan.no_examples:
        stock.append(str(tasks_directory() / "offline" / "no_examples.yaml"))
    content: dict[str, object] = {"include": stock if len(stock) > 1 else stock[0], "task": leaf.name}
    if plan.settings:
        data = {"data_files": {split: str(file) for split, file in plan.files.items()}}
        content |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": data, **plan.settings}
    path = out / f"{_file_name(leaf.name)}.yaml"
    _write(path, content)
    return Overlay(leaf.name, path, leaf.path, dict(plan.files), "; ".join(plan.notes))


def _write(path: Path, content: Mapping[str, object]) -> None:
    try:
        write_atomic(path, MARK + yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=1000))
    except OSError as error:
        raise BadInputError(f"cannot write '{path}': {error.strerror or error}; choose another folder") from error


def _clear(out: Path) -> None:
    """Take away what an earlier call wrote, so that no task of another data folder stays."""
    if out.exists() and not out.is_dir():
        raise BadInputError(f"'{out}' is a file; choose a folder for the task files")
    old = sorted(out.glob("**/*.yaml")) if out.is_dir() else []
    for path in old:
        if not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise BadInputError(f"'{out}' holds {path.name}, which kvbench did not write; choose an empty or new folder for the task files")
    for path in old:
        path.unlink()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
