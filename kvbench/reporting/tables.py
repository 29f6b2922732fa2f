"""The tables of a report as data frames, for csv files."""

from __future__ import annotations

import pandas as pd

from kvbench.reporting.view import Comparison, Estimate


def all_tables(comparison: Comparison) -> dict[str, pd.DataFrame]:
    """Tables by file name: tasks, scores, pairs, averages, verdicts. Numbers are as in comparison.json, unrounded."""
    names = {task.id: {"task": task.task, "filter": task.filter, "metric": task.metric} for task in comparison.tasks}
    return {
        "tasks": pd.DataFrame([task.model_dump(exclude={"pooled"}) | {"pooled": " ".join(task.pooled)} for task in comparison.tasks]),
        "scores": pd.DataFrame(
            [names[score.task_id] | {"arm": score.arm} | _flat("score", score.score) | {"at_chance": score.at_chance} for score in comparison.scores]
        ),
        "pairs": pd.DataFrame(
            [
                names[pair.task_id]
                | pair.model_dump(exclude={"task_id", "difference", "retention", "floor_normalised", "perplexity_ratio"})
                | _flat("difference", pair.difference)
                | _flat("retention", pair.retention)
                | _flat("floor_normalised", pair.floor_normalised)
                | _flat("perplexity_ratio", pair.perplexity_ratio or Estimate.missing("not a perplexity"))
                for pair in comparison.pairs
            ]
        ),
        "averages": pd.DataFrame(
            [
                average.model_dump(exclude={"tasks", "difference", "retention", "floor_normalised"})
                | {"tasks": " ".join(average.tasks)}
                | _flat("difference", average.difference)
                | _flat("retention", average.retention)
                | _flat("floor_normalised", average.floor_normalised)
                for average in comparison.averages
            ]
        ),
        "verdicts": pd.DataFrame(
            [verdict.model_dump(exclude={"points", "counts"}) | {"points": " ".join(verdict.points)} for verdict in comparison.verdicts]
        ),
    }


def _flat(name: str, estimate: Estimate) -> dict[str, float | str | None]:
    return {
        name: estimate.value,
        f"{name}_lower": estimate.lower,
        f"{name}_upper": estimate.upper,
        f"{name}_method": estimate.method,
        f"{name}_undefined": estimate.reason or estimate.interval_reason,
    }
