"""What a metric is: its kind, its direction, the score of guessing, and which one is a task's headline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.reporting.view import Kind, TaskView
from kvbench.runs.pairing import PairedItems
from kvbench.runs.sources import TaskReading
from kvbench.runs.table import BETTER, GROUP, METRIC, SIZE

_HEADLINES = ("acc_norm", "acc", "f1", "exact_match", "em", "token_perplexity", "word_perplexity", "byte_perplexity", "perplexity", "nll")
_NLL_ENDINGS = ("perplexity", "bits_per_byte", "nll")
_CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes", "exact_match")
_CLUSTER_LABELS = ("conversation", "article", "subject")
_LOWER = ("brier_score", "wer", "cer", "ter")


@dataclass(frozen=True)
class TaskData:
    """One task, filter and metric with the paired scores of all arms.

    Attributes:
        view: what it is.
        scores: by arm `[n]`; NaN where the arm has no score.
        sizes: `[n]` tokens behind each total; None for plain scores.
        groups: `[n]` cluster labels; None where items are independent.
        items: `[n]` (task, doc_id).
    """

    view: TaskView
    scores: dict[str, NDArray[np.float64]]
    sizes: NDArray[np.float64] | None
    groups: NDArray[np.str_] | None
    items: list[tuple[str, int]] = field(repr=False)


def primary_metric(metrics: Sequence[str]) -> str:
    """The headline metric of a task: length-normalised accuracy before accuracy before F1 before exact match before perplexity."""
    return next((name for name in _HEADLINES if name in metrics), sorted(metrics)[0])


def kind_of(metric: str, scores: Sequence[NDArray[np.float64]]) -> Kind:
    """Right-or-wrong, graded, or negative log-likelihood."""
    if metric.endswith(_NLL_ENDINGS):
        return "nll"
    values = np.concatenate(list(scores))
    values = values[np.isfinite(values)]
    return "accuracy" if values.size and np.all((values == 0) | (values == 1)) else "score"


def read_task(paired: PairedItems, metric: str, reading: TaskReading, *, primary: bool) -> TaskData:
    """Collect one metric of one task.

    Args:
        paired: the joined samples.
        metric: which metric.
        reading: overrides from the run's spec.
        primary: whether it is the headline.
    """
    first = next(iter(paired.frames.values()))
    scores = {arm: _column(frame, METRIC + metric) for arm, frame in paired.frames.items()}
    kind = kind_of(metric, list(scores.values()))
    sizes = _column(first, SIZE + metric)
    chance, source = _chance(metric, kind, first, reading)
    label, groups = _clusters(first, reading)
    filled = np.concatenate(list(scores.values()))
    filled = filled[np.isfinite(filled)]
    view = TaskView(
        id=f"{paired.task}|{paired.filter}|{metric}",
        task=paired.task,
        filter=paired.filter,
        metric=metric,
        kind=kind,
        higher_is_better=_direction(metric, kind, first),
        fraction=kind == "accuracy" or (kind == "score" and filled.size > 0 and bool(np.all((filled >= 0) & (filled <= 1)))),
        primary=primary,
        n=len(first),
        cluster=label,
        clusters=None if groups is None else int(np.unique(groups).size),
        chance=chance,
        chance_source=source,
    )
    items = [(paired.task, doc) for doc in paired.doc_ids]
    return TaskData(view, scores, sizes if kind == "nll" and np.all(np.isfinite(sizes)) and np.all(sizes > 0) else None, groups, items)


def pool(name: str, parts: Sequence[TaskData]) -> TaskData:
    """Read several tasks as one, items clustered by task (MMLU by subject).

    Args:
        name: of the group.
        parts: same filter and metric each.
    """
    n = sum(part.view.n for part in parts)
    chances = [part.view.chance for part in parts if part.view.chance is not None]
    chance = sum(part.view.n * (part.view.chance or 0.0) for part in parts) / n if len(chances) == len(parts) else None
    groups = np.concatenate([np.full(part.view.n, part.view.task) for part in parts])
    scores = {arm: np.concatenate([part.scores[arm] for part in parts]) for arm in parts[0].scores if all(arm in part.scores for part in parts)}
    first = parts[0].view
    view = first.model_copy(
        update={
            "id": f"{name}|{first.filter}|{first.metric}",
            "task": name,
            "n": n,
            "kind": kind_of(first.metric, list(scores.values())),
            "cluster": "task",
            "clusters": len(parts),
            "chance": chance,
            "pooled": tuple(part.view.task for part in parts),
            "primary": True,
        }
    )
    sizes = [part.sizes for part in parts if part.sizes is not None]
    return TaskData(
        view, scores, np.concatenate(sizes) if len(sizes) == len(parts) else None, groups, [item for part in parts for item in part.items]
    )


def _column(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    return frame[name].to_numpy(dtype=np.float64, na_value=np.nan)


def _direction(metric: str, kind: Kind, frame: pd.DataFrame) -> bool:
    if kind == "nll":
        return False
    name = BETTER + metric
    stated = frame[name].dropna() if name in frame.columns else pd.Series(dtype=object)
    return bool(stated.iloc[0]) if len(stated) else metric not in _LOWER


def _chance(metric: str, kind: Kind, frame: pd.DataFrame, reading: TaskReading) -> tuple[float | None, str]:
    if kind == "nll":
        return None, ""
    if reading.chance is not None:
        return reading.chance, "the run's task settings"
    counts = frame["choices"].map(len).to_numpy(dtype=np.float64)
    if np.all(counts >= 2) and metric in _CHOICE_METRICS:
        fewest, most = int(counts.min()), int(counts.max())
        return float(np.mean(1 / counts)), f"1 / choices ({fewest if fewest == most else f'{fewest} to {most}'})"
    if metric in ("exact_match", "em", "acc", "f1"):
        return 0.0, "free answers"
    return None, ""


def _clusters(frame: pd.DataFrame, reading: TaskReading) -> tuple[str | None, NDArray[np.str_] | None]:
    """The label whose items belong together: stated, or the first one found that groups anything."""
    for label in (reading.cluster,) if reading.cluster else _CLUSTER_LABELS:
        name = GROUP + str(label)
        if name not in frame.columns or frame[name].isna().any():
            continue
        values = frame[name].astype(str).to_numpy(dtype=str)
        if 1 < np.unique(values).size < values.size:
            return label, values
    return None, None
