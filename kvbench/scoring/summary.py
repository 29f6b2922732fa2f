"""A table of tasks and arms from lm-eval results: figure, retention, floor-normalised retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.stats import Interval, Undefined, paired_retention

# In order of preference; lm-eval names metrics "name,filter".
ACCURACIES = ("exact_match", "f1", "acc")
PERPLEXITIES = ("token_perplexity", "perplexity", "word_perplexity")


@dataclass(frozen=True)
class Cell:
    """One arm on one task.

    Attributes:
        task: task name.
        arm: arm name.
        metric: metric name without filter.
        value: accuracy (0 to 1) or perplexity.
        items: items scored.
        chance: accuracy of guessing; None for perplexities.
        retention: of the target arm's accuracy, with its interval; Undefined with the reason.
        floor_normalised: (accuracy - chance) / (target - chance).
    """

    task: str
    arm: str
    metric: str
    value: float
    items: int
    chance: float | None
    retention: float | Undefined
    retention_interval: Interval | Undefined
    floor_normalised: float | Undefined


def main_metric(sample: Mapping[str, Any]) -> str:
    """The metric that a task's sample rows are compared by."""
    for name in (*ACCURACIES, *PERPLEXITIES):
        if name in sample["metrics"]:
            return name
    return str(sample["metrics"][0])


def chance_of(samples: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Accuracy of guessing: one over the number of choices, 0 for generated answers, None for perplexities."""
    if metric not in ACCURACIES:
        return None
    counts = [len(s["resps"]) for s in samples]
    return float(np.mean([1 / n if n > 1 else 0.0 for n in counts]))


def summarise(results: Mapping[str, Mapping[str, Any]], *, reference: str = "target", seed: int = 0) -> list[Cell]:
    """Cells of all tasks and arms.

    Args:
        results: arm name -> lm-eval results with samples, as `evaluate_arms` returns them.
        reference: arm that retention is relative to.
        seed: of the bootstrap.
    """
    cells = []
    for task, reference_samples in results[reference]["samples"].items():
        metric = main_metric(reference_samples[0])
        chance = chance_of(reference_samples, metric)
        filters = list(dict.fromkeys(s["filter"] for s in reference_samples))
        for arm, result in results.items():
            samples = [s for s in result["samples"][task] if s["filter"] == filters[0]]
            value = result["results"][task][f"{metric},{filters[0]}"]
            if chance is None:
                nothing = Undefined("perplexities have no retention; compare them directly")
                cells.append(Cell(task, arm, metric, float(value), len(samples), None, nothing, nothing, nothing))
                continue
            mine = np.array([float(s[metric]) for s in sorted(samples, key=lambda s: s["doc_id"])])
            other = np.array([float(s[metric]) for s in sorted(reference_samples, key=lambda s: s["doc_id"]) if s["filter"] == filters[0]])
            labels = [s["doc"].get("conversation") for s in sorted(reference_samples, key=lambda s: s["doc_id"]) if s["filter"] == filters[0]]
            # Turns of one conversation are not independent items; whole conversations are resampled, as in the report.
            groups = np.array([str(label) for label in labels]) if all(label is not None for label in labels) else None
            kept = paired_retention(mine, other, chance=chance, higher_is_better=True, groups=groups, rng=np.random.default_rng(seed))
            cells.append(Cell(task, arm, metric, float(value), len(samples), chance, kept.value, kept.interval, kept.floor_normalised))
    return cells
