"""How much of the reference an arm keeps.

Retention is arm score / reference score; floor-normalised it is (arm - chance) / (reference - chance). Both divide by a measured
number, so their intervals resample arm and reference together, and where the divisor is not above zero there is no retention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvbench.errors import BadInputError
from kvbench.stats.inputs import Vector, finite_vector, group_codes, is_zero_one, paired_vectors
from kvbench.stats.intervals import (
    RESAMPLES,
    Draws,
    Floats,
    Method,
    Resampled,
    Statistic,
    average_draws,
    difference_of_means,
    evaluate,
    interval_of,
    refusal,
    resample,
)
from kvbench.stats.paired import bounded_difference_interval, tango_interval
from kvbench.stats.status import Interval, MaybeInterval, Undefined, Value

MIN_DIFFERING = 10
"""With fewer items (or clusters) on which the arms differ, resampling knows too little about how often they do."""
# Means this close to their floor are on it but for rounding.
_ON_FLOOR = 1e-12


class Retention(NamedTuple):
    """Result of `paired_retention`."""

    n: int
    """Items."""
    clusters: int | None
    """Clusters that were resampled, None where items were."""
    differing: int
    """Items whose score differs between the arms."""
    arm_score: float
    """Mean score of the arm."""
    reference_score: float
    """Mean score of the reference."""
    chance: float | None
    """Score of guessing, as given."""
    value: Value
    """arm_score / reference_score; 1 means nothing lost."""
    interval: MaybeInterval
    """Of the value; its method says how it was computed."""
    floor_normalised: Value
    """(arm_score - chance) / (reference_score - chance); 0 means guessing, below 0 worse than guessing."""
    floor_normalised_interval: MaybeInterval
    """Of the floor-normalised value."""


class PerplexityRatio(NamedTuple):
    """Result of `perplexity_ratio`. Lower is better: below 1 the arm predicts the text better than the reference."""

    n: int
    """Documents."""
    clusters: int | None
    """Clusters that were resampled, None where documents were."""
    arm_perplexity: Value
    """exp of the arm's mean negative log-likelihood."""
    reference_perplexity: Value
    """exp of the reference's mean negative log-likelihood."""
    nll_difference_nats: float
    """Mean negative log-likelihood of the arm minus that of the reference, per token (or per document without tokens)."""
    nll_interval_nats: MaybeInterval
    """Of the difference."""
    value: Value
    """arm_perplexity / reference_perplexity = exp(nll_difference_nats)."""
    interval: MaybeInterval
    """Of the value: exp of the bounds above."""


class TaskScores(NamedTuple):
    """The items of one task, for `average_retention`."""

    arm: ArrayLike
    """`[n]` scores, higher is better."""
    reference: ArrayLike
    """`[n]`, the same items in the same order."""
    chance: float | None = None
    """Score of guessing; None if unknown."""
    groups: ArrayLike | None = None
    """`[n]` cluster labels, or None."""


class AverageRetention(NamedTuple):
    """Result of `average_retention`."""

    tasks: tuple[str, ...]
    """The tasks averaged, each with the same weight, in sorted order."""
    value: Value
    """Mean of the tasks' retentions."""
    interval: MaybeInterval
    """Of the value; each task is resampled within itself."""
    floor_normalised: Value
    """Mean of the tasks' floor-normalised retentions."""
    floor_normalised_interval: MaybeInterval
    """Of the floor-normalised value."""


def paired_retention(
    arm: ArrayLike,
    reference: ArrayLike,
    *,
    rng: np.random.Generator,
    higher_is_better: bool,
    chance: float | None = None,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    method: Method = "bca",
    resamples: int = RESAMPLES,
) -> Retention:
    """Share of the reference's score that the arm keeps, plain and above chance.

    With fewer than `MIN_DIFFERING` differing items (or clusters) the bootstrap is replaced, for right-or-wrong items without clusters, by
    1 + (Tango interval of the paired difference) / (reference - floor), the reference held fixed; the method says so. For graded or
    clustered scores in [0, 1] the conservative `bounded_difference_interval` takes its place; for others there is then no interval.

    Args:
        arm: `[n]` scores.
        reference: `[n]`, the same items in the same order.
        rng: the source of chance.
        higher_is_better: False gives Undefined: keeping a share of an error means nothing; use `perplexity_ratio`.
        chance: score of guessing, e.g. 0.25; None if the task has none, and then nothing is floor-normalised.
        groups: `[n]` cluster labels (conversation, article, subject); whole clusters are then resampled.
        level: nominal coverage.
        method: 'bca' or 'percentile'.
        resamples: how many.

    Raises:
        BadInputError: on empty, unequal or non-finite scores, or a chance that is negative or not finite.

    Source:
        arXiv:2608.03893 for both ratios; `intervals` and `paired.tango_interval` for their intervals.
    """
    first, second, clusters = _checked(arm, reference, groups, chance)
    arm_score, reference_score = float(first.mean()), float(second.mean())
    differing, units = _differing(first, second, groups)
    refused = refusal(first.size, clusters)
    sample: Resampled | None = None
    if higher_is_better and refused is None and units >= MIN_DIFFERING:
        sample = resample([first, second], rng=rng, groups=groups, resamples=resamples)

    def both(floor: float, name: str) -> tuple[Value, MaybeInterval]:
        if not higher_is_better:
            lower = Undefined(f"{name} is defined for scores where higher is better; compare the difference or the ratio instead")
            return lower, lower
        missing = _no_divisor(reference_score, floor, name)
        if missing is not None:
            return missing, missing
        value = (arm_score - floor) / (reference_score - floor)
        if refused is not None:
            return value, refused
        if sample is None:
            return value, _few_differing(first, second, floor, groups, units, level)
        bounds = interval_of(evaluate(sample, _ratio_above(floor)), level=level, method=method)
        # An arm that is never right leaves every resample at zero, which is no certainty.
        flat = not isinstance(bounds, Interval) and float(np.ptp(first)) == 0
        return value, _few_differing(first, second, floor, groups, units, level) if flat else bounds

    value, interval = both(0.0, "retention")
    if chance is None:
        normalised: Value = Undefined("the task has no chance level")
        normalised_interval: MaybeInterval = Undefined("the task has no chance level")
    else:
        normalised, normalised_interval = both(chance, "floor-normalised retention")
    return Retention(
        n=int(first.size),
        clusters=clusters,
        differing=differing,
        arm_score=arm_score,
        reference_score=reference_score,
        chance=chance,
        value=value,
        interval=interval,
        floor_normalised=normalised,
        floor_normalised_interval=normalised_interval,
    )


def perplexity_ratio(
    arm_nll: ArrayLike,
    reference_nll: ArrayLike,
    *,
    rng: np.random.Generator,
    tokens: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    method: Method = "bca",
    resamples: int = RESAMPLES,
) -> PerplexityRatio:
    """Perplexity of the arm over that of the reference, on the same documents.

    Args:
        arm_nll: `[n]` negative log-likelihood in nats: per document summed over its tokens if `tokens` is given, else its mean.
        reference_nll: `[n]`, the same documents in the same order.
        rng: the source of chance.
        tokens: `[n]` scored tokens (or words) per document; None weighs documents alike.
        groups: `[n]` cluster labels (article, conversation).
        level: nominal coverage.
        method: 'bca' or 'percentile'.
        resamples: how many.

    Raises:
        BadInputError: on empty, unequal or non-finite values, or token counts that are not positive.

    Source:
        exp of the mean difference of negative log-likelihoods; both bootstrap methods give the same interval on either scale.
    """
    first, second, clusters = _checked(arm_nll, reference_nll, groups, None)
    weights = np.ones(first.size) if tokens is None else finite_vector("tokens", tokens)
    if weights.size != first.size or np.any(weights <= 0):
        raise BadInputError(f"tokens needs one positive count per document; it has {weights.size} for {first.size}, the least {weights.min():g}.")
    total = float(weights.sum())
    arm_mean, reference_mean = float(first.sum()) / total, float(second.sum()) / total
    difference = float(np.sum(first - second)) / total

    nll_interval: MaybeInterval | None = refusal(first.size, clusters)
    units = _differing(first, second, groups)[1]
    if nll_interval is None and units < MIN_DIFFERING:
        nll_interval = _too_few(units, clusters is not None)
    if nll_interval is None:
        sample = resample([first, second], rng=rng, groups=groups, sizes=weights, resamples=resamples)
        nll_interval = interval_of(evaluate(sample, difference_of_means), level=level, method=method)
    return PerplexityRatio(
        n=int(first.size),
        clusters=clusters,
        arm_perplexity=_exp(arm_mean),
        reference_perplexity=_exp(reference_mean),
        nll_difference_nats=difference,
        nll_interval_nats=nll_interval,
        value=_exp(difference),
        interval=_exp_interval(nll_interval),
    )


def average_retention(
    tasks: Mapping[str, TaskScores],
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    method: Method = "bca",
    resamples: int = RESAMPLES,
) -> AverageRetention:
    """Mean retention over tasks, every task weighing alike.

    Undefined as soon as one task's is: an average over the tasks that happen to have a value would be another average. The
    interval further needs every task to be large enough. With fewer than `MIN_DIFFERING` differing items or clusters in all it is
    `mean_of_intervals` of the tasks' own (conservative) ones.

    Args:
        tasks: scores by task name, at least one; higher is better in all.
        rng: the source of chance, used task by task in sorted order.
        level: nominal coverage.
        method: 'bca' or 'percentile'.
        resamples: how many per task.

    Raises:
        BadInputError: without tasks, or as `paired_retention`.

    Source:
        arXiv:2608.03893 (average over tasks); `intervals.average_draws`.
    """
    if not tasks:
        raise BadInputError("tasks is empty; an average retention needs at least one task.")
    names = tuple(sorted(tasks))
    samples: list[Resampled] = []
    refused: Undefined | None = None
    units = 0
    for name in names:
        task = tasks[name]
        try:
            first, second, clusters = _checked(task.arm, task.reference, task.groups, task.chance)
        except BadInputError as error:
            raise BadInputError(f"task {name}: {error}") from error
        samples.append(resample([first, second], rng=rng, groups=task.groups, resamples=resamples))
        units += _differing(first, second, task.groups)[1]
        reason = refusal(first.size, clusters)
        if reason is not None and refused is None:
            refused = Undefined(f"task {name}: {reason.reason}")
    few = refused is None and units < MIN_DIFFERING

    def bounds_of(floors: Mapping[str, float]) -> MaybeInterval:
        found: list[tuple[float, Interval]] = []
        for name in names:
            first, second, _ = _checked(tasks[name].arm, tasks[name].reference, tasks[name].groups, tasks[name].chance)
            one = _few_differing(first, second, floors[name], tasks[name].groups, _differing(first, second, tasks[name].groups)[1], level)
            if isinstance(one, Undefined):
                return Undefined(f"task {name}: {one.reason}")
            found.append(((float(first.mean()) - floors[name]) / (float(second.mean()) - floors[name]), one))
        return mean_of_intervals(found)

    def average(floors: Mapping[str, float], kind: str) -> tuple[Value, MaybeInterval]:
        draws: list[Draws] = []
        for name, sample in zip(names, samples, strict=True):
            missing = _no_divisor(float(sample.observed[1]), floors[name], kind)
            if missing is not None:
                gone = Undefined(f"task {name}: {missing.reason}")
                return gone, gone
            draws.append(evaluate(sample, _ratio_above(floors[name])))
        mean = average_draws(draws)
        if refused is not None:
            return mean.observed, refused
        return mean.observed, bounds_of(floors) if few else interval_of(mean, level=level, method=method)

    value, interval = average(dict.fromkeys(names, 0.0), "retention")
    chances = {name: chance for name in names if (chance := tasks[name].chance) is not None}
    unknown = [name for name in names if name not in chances]
    if unknown:
        normalised: Value = Undefined(f"no chance level for {', '.join(unknown)}")
        normalised_interval: MaybeInterval = Undefined(f"no chance level for {', '.join(unknown)}")
    else:
        normalised, normalised_interval = average(chances, "floor-normalised retention")
    return AverageRetention(names, value, interval, normalised, normalised_interval)


def mean_of_intervals(parts: Sequence[tuple[float, Interval]]) -> Interval:
    """Interval of the mean of independent estimates from their own intervals, by the square-and-add rule.

    Args:
        parts: estimate and interval of each, all of one level.

    Source:
        MOVER: Zou and Donner, Statistics in Medicine 27:1693-1702 (2008), equation 3, for a mean instead of a sum.
    """
    count = len(parts)
    mean = sum(value for value, _ in parts) / count
    below = math.sqrt(sum((value - bounds.lower) ** 2 for value, bounds in parts)) / count
    above = math.sqrt(sum((bounds.upper - value) ** 2 for value, bounds in parts)) / count
    return Interval(mean - below, mean + above, parts[0][1].level, f"square-and-add (2008) of the tasks' intervals ({parts[0][1].method})")


def _checked(arm: ArrayLike, reference: ArrayLike, groups: ArrayLike | None, chance: float | None) -> tuple[Vector, Vector, int | None]:
    """Both vectors and the number of clusters."""
    first, second = paired_vectors(arm, reference)
    if chance is not None and not 0 <= chance < math.inf:
        raise BadInputError(f"chance is {chance}; give the score of guessing as a number of at least 0, or None.")
    clusters = None if groups is None else int(group_codes(groups, first.size).max()) + 1
    return first, second, clusters


def _no_divisor(reference_score: float, floor: float, name: str) -> Undefined | None:
    if reference_score - floor > _ON_FLOOR:
        return None
    where = "zero or below" if floor == 0 else f"at or below chance ({floor:.4g})"
    return Undefined(f"the reference scores {reference_score:.4g}, {where}: there is no {name}")


def _ratio_above(floor: float) -> Statistic:
    """(arm - floor) / (reference - floor); where the divisor is not above zero, infinite with the sign of the numerator."""

    def ratio(means: Floats) -> Floats:
        above, divisor = means[..., 0] - floor, means[..., 1] - floor
        out = np.where(above >= 0, np.inf, -np.inf)
        np.divide(above, divisor, out=out, where=divisor > _ON_FLOOR)
        return out

    return ratio


def _differing(first: Vector, second: Vector, groups: ArrayLike | None) -> tuple[int, int]:
    """Items on which the arms differ, and the units (items, or clusters with such an item)."""
    differs = first != second
    items = int(np.sum(differs))
    return items, items if groups is None else int(np.unique(group_codes(groups, first.size)[differs]).size)


def _too_few(units: int, clustered: bool) -> Undefined:
    return Undefined(f"the arms differ on {units} {'clusters' if clustered else 'items'}; a bootstrap interval needs at least {MIN_DIFFERING}")


def _few_differing(first: Vector, second: Vector, floor: float, groups: ArrayLike | None, units: int, level: float) -> MaybeInterval:
    """Score interval, or the conservative one, instead of a bootstrap that hardly sees a difference; the reference is held fixed."""
    exact = groups is None and is_zero_one(first) and is_zero_one(second)
    bounds: MaybeInterval
    bounds = (
        tango_interval(int(np.sum(first > second)), int(np.sum(first < second)), int(first.size), level=level)
        if exact
        else bounded_difference_interval(first, second, groups=groups, level=level)
    )
    if isinstance(bounds, Undefined):
        return Undefined(f"{_too_few(units, groups is not None).reason}, and {bounds.reason}")
    divisor = float(second.mean()) - floor
    name = f"{bounds.method} of the difference over the fixed reference, {units} differing {'items' if groups is None else 'clusters'}"
    return Interval(1 + bounds.lower / divisor, 1 + bounds.upper / divisor, level, name)


def _exp(nats: float) -> Value:
    try:
        return math.exp(nats)
    except OverflowError:
        return Undefined(f"exp({nats:.4g}) is too large for a number")


def _exp_interval(bounds: MaybeInterval) -> MaybeInterval:
    if isinstance(bounds, Undefined):
        return bounds
    lower, upper = _exp(bounds.lower), _exp(bounds.upper)
    if isinstance(lower, Undefined) or isinstance(upper, Undefined):
        return Undefined(f"exp({bounds.upper:.4g}) is too large for a number")
    return Interval(lower, upper, bounds.level, bounds.method)
