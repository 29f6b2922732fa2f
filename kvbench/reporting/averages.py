"""Figures over several tasks, each task weighing alike and resampled within itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.errors import BadInputError
from kvbench.reporting.metrics import TaskData
from kvbench.reporting.pairwise import generator, undefined_scores
from kvbench.reporting.view import AverageView, Estimate, PairView, Policy, Relation
from kvbench.stats import (
    MIN_DIFFERING,
    MaybeInterval,
    TaskScores,
    Undefined,
    average_draws,
    average_retention,
    bounded_difference_interval,
    difference_of_means,
    evaluate,
    interval_of,
    mean_of_intervals,
    refusal,
    resample,
)


def average_pair(
    tasks: Sequence[TaskData], arm: str, reference: str, relation: Relation, policy: Policy, pairs: Sequence[PairView]
) -> AverageView | None:
    """Average one arm against one reference over the headline tasks with scores where higher is better.

    Args:
        tasks: all tasks of the comparison.
        arm: under test.
        reference: held against.
        relation: what the reference is.
        policy: level, seed, resamples.
        pairs: the comparisons task by task; with a single task its figures are the average's.

    Returns:
        The average, or None where there is no such task.
    """
    chosen = [data for data in tasks if data.view.primary and data.view.kind != "nll" and data.view.higher_is_better]
    # A task that one of the two was spared belongs to neither side's mean.
    chosen = [data for data in chosen if arm in data.scores and reference in data.scores]
    if not chosen:
        return None
    ids = tuple(data.view.id for data in chosen)
    reason = next((why for data in chosen for who in (arm, reference) if (why := undefined_scores(data, who)) is not None), None)
    if reason is not None:
        gone = Estimate.missing(f"no average: {reason}")
        return AverageView(
            arm=arm, reference=reference, relation=relation, tasks=ids, arm_score=None, reference_score=None,
            difference=gone, retention=gone, floor_normalised=gone,
        )  # fmt: skip
    means = [float(np.mean([data.scores[who].mean() for data in chosen])) for who in (arm, reference)]
    if len(chosen) == 1:
        only = next(pair for pair in pairs if (pair.task_id, pair.arm, pair.reference) == (ids[0], arm, reference))
        difference, retention, floor = only.difference, only.retention, only.floor_normalised
    else:
        difference = Estimate.of(means[0] - means[1], _difference_interval(chosen, arm, reference, policy))
        kept = average_retention(
            {data.view.id: TaskScores(data.scores[arm], data.scores[reference], data.view.chance, data.groups) for data in chosen},
            rng=generator(policy, "average retention", arm, reference),
            level=policy.level,
            resamples=policy.resamples,
        )
        retention, floor = Estimate.of(kept.value, kept.interval), Estimate.of(kept.floor_normalised, kept.floor_normalised_interval)
    return AverageView(
        arm=arm,
        reference=reference,
        relation=relation,
        tasks=ids,
        arm_score=means[0],
        reference_score=means[1],
        difference=difference,
        retention=retention,
        floor_normalised=floor,
    )


def _difference_interval(tasks: Sequence[TaskData], arm: str, reference: str, policy: Policy) -> MaybeInterval:
    rng = generator(policy, "average difference", arm, reference)
    draws = []
    differing = 0
    for data in tasks:
        first, second = data.scores[arm], data.scores[reference]
        refused = refusal(data.view.n, data.view.clusters)
        if refused is not None:
            return Undefined(f"task {data.view.task}: {refused.reason}")
        differing += int(np.sum(first != second))
        try:
            sample = resample([first, second], rng=rng, groups=data.groups, resamples=policy.resamples)
        except BadInputError as error:
            raise BadInputError(f"task {data.view.task}: {error}") from error
        draws.append(evaluate(sample, difference_of_means))
    if differing < MIN_DIFFERING:
        parts = []
        for d in tasks:
            first, second = d.scores[arm], d.scores[reference]
            bounds = bounded_difference_interval(first, second, groups=d.groups, level=policy.level)
            if isinstance(bounds, Undefined):
                return Undefined(f"task {d.view.task}: {bounds.reason}")
            parts.append((float(first.mean() - second.mean()), bounds))
        return mean_of_intervals(parts)
    return interval_of(average_draws(draws), level=policy.level)
