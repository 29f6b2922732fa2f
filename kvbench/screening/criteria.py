"""From figures and thresholds to criteria: passed, failed, or open. Nothing passes on a point estimate, and nothing passes without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvbench.reporting.view import AverageView, Comparison, Estimate, PairView, TaskView
from kvbench.runs.measured import Diagnostics, Latency
from kvbench.runs.verdict import Criterion
from kvbench.screening.policy import ScreenPolicy

WIDE = 1.0
"""Width of a retention interval, as a fraction, beyond which the reader is told why it is so wide."""

Relation = Literal["at least", "at most", "more than", "less than"]


def judge(
    name: str,
    stage: str,
    what: str,
    relation: Relation,
    threshold: float,
    estimate: Estimate,
    *,
    level: float,
    unit: str = "",
    n: int | None = None,
    min_n: int | None = None,
    required: bool = True,
) -> Criterion:
    """Hold an interval against a threshold.

    Args:
        name: stable name.
        stage: that measured it.
        what: in words.
        relation: how the bound is held against the threshold.
        threshold: from the policy.
        estimate: figure and interval, or why there is none.
        level: coverage of the interval.
        unit: of all of them.
        n: items behind the figure.
        min_n: fewest accepted; with fewer the criterion stays open.
        required: whether the verdict depends on it.
    """
    up = relation in ("at least", "more than")
    bound, other = (estimate.lower, estimate.upper) if up else (estimate.upper, estimate.lower)
    passed: bool | None
    if estimate.value is None and n is not None and min_n is not None and n < min_n:
        passed, reason = None, f"n = {n}, fewer than the {min_n} that the policy asks for"
    elif estimate.value is None:
        passed, reason = None, f"no figure: {estimate.reason or 'it was not measured'}"
    elif bound is None or other is None:
        few = f"n = {n}, fewer than the {min_n} that the policy asks for; " if n is not None and min_n is not None and n < min_n else ""
        passed, reason = None, few + f"{_number(estimate.value, unit)} without an interval: {estimate.interval_reason or 'it cannot be computed'}"
    else:
        shown = f"{_number(estimate.value, unit)} [{_number(min(bound, other), unit)}, {_number(max(bound, other), unit)}]"
        side = "lower" if up else "upper"
        wanted = f"{relation} {_number(threshold, unit)}"
        if _clears(bound, threshold, relation):
            passed, reason = True, f"{shown}: the {side} bound is {wanted}"
        elif not _clears(other, threshold, relation):
            passed, reason = False, f"{shown}: even the other bound is not {wanted}"
        else:
            passed, reason = None, f"{shown}: the interval reaches across {_number(threshold, unit)}, more items would settle it"
        if unit == "%" and abs(other - bound) > WIDE:
            reason += "; the target's own score is too near zero for a share of it to say much"
        if n is not None and min_n is not None and n < min_n:
            passed, reason = None, f"n = {n}, fewer than the {min_n} that the policy asks for ({shown})"
    return Criterion(
        id=name, stage=stage, what=what, required=required, relation=relation, threshold=threshold, figure=estimate.value, bound=bound,
        other_bound=other, level=level, unit=unit, n=n, min_n=min_n, passed=passed, reason=reason,
    )  # fmt: skip


def missing(
    name: str, stage: str, what: str, relation: Relation, threshold: float, reason: str, *, unit: str = "", required: bool = True
) -> Criterion:
    """A criterion without data. It cannot pass."""
    return Criterion(
        id=name,
        stage=stage,
        what=what,
        required=required,
        relation=relation,
        threshold=threshold,
        unit=unit,
        passed=None,
        reason=f"no data: {reason}",
    )


def canary_of(policy: ScreenPolicy, tasks: Sequence[str]) -> str | None:
    """The first of the policy's canaries among the tasks."""
    return next((name for name in policy.canary.tasks if name in tasks), None)


def quality(comparison: Comparison, arm: str, policy: ScreenPolicy, *, stage: str, canary: str | None) -> list[Criterion]:
    """Retention per task and on average, text, the canary, and the source model, from a comparison under `policy.comparison()`.

    Args:
        comparison: of the arm with target and source.
        arm: the mapper under test.
        policy: thresholds.
        stage: name for the records.
        canary: task that has a floor of its own, if it is among the tasks.
    """
    found = []
    for task in comparison.primary_tasks:
        pair = comparison.pair(task.id, arm, comparison.reference_arm)
        if pair is not None:
            found.append(_task(task, pair, policy, stage, canary))
    found += _average(comparison.average(arm, comparison.reference_arm), policy, stage)
    found += _against_source(comparison, arm, policy, stage)
    return found


def _task(task: TaskView, pair: PairView, policy: ScreenPolicy, stage: str, canary: str | None) -> Criterion:
    level = policy.level
    if task.kind == "nll":
        what = f"{task.task}: rise of the target's negative log-likelihood"
        bound = policy.text.rise_nats
        return judge(
            f"text.{task.task}", stage, what, "at most", bound, pair.difference, level=level, unit="nats/token", n=pair.n, min_n=policy.min_items
        )
    if task.task == canary:
        name, floor, least = f"canary.{task.task}", policy.canary.retention, policy.canary.min_items
        what = f"{task.task} (canary): share of the target's score kept"
    else:
        name, floor, least = f"retention.task.{task.task}", policy.retention.task, policy.min_items
        what = f"{task.task}: share of the target's score kept"
    return judge(name, stage, what, "at least", floor, pair.retention, level=level, unit="%", n=pair.n, min_n=least)


def _average(average: AverageView | None, policy: ScreenPolicy, stage: str) -> list[Criterion]:
    name, what = "retention.average", "share of the target's score kept, mean over the tasks"
    if average is None:
        reason = "no task with answers was evaluated"
        return [missing(name, stage, what, "at least", policy.retention.average, reason, unit="%")]
    return [judge(name, stage, what, "at least", policy.retention.average, average.retention, level=policy.level, unit="%", n=len(average.tasks))]


def _against_source(comparison: Comparison, arm: str, policy: ScreenPolicy, stage: str) -> list[Criterion]:
    found: list[Criterion] = []
    source = comparison.source_arm
    if policy.better_than_source.average:
        name, what = "better_than_source.average", "mean score minus that of the source model alone, same items"
        average = comparison.average(arm, source) if source else None
        if average is None:
            found.append(missing(name, stage, what, "more than", 0.0, "no arm 'source', or no task with answers", unit="pp"))
        else:
            least = min(task.n for task in comparison.primary_tasks if task.id in average.tasks)
            estimate = average.difference
            found.append(judge(name, stage, what, "more than", 0.0, estimate, level=policy.level, unit="pp", n=least, min_n=policy.min_items))
    if policy.better_than_source.text:
        for task in comparison.primary_tasks:
            pair = comparison.pair(task.id, arm, source) if task.kind == "nll" and source else None
            if pair is not None:
                name, what = f"better_than_source.{task.task}", f"{task.task}: negative log-likelihood minus the source model's"
                found.append(
                    judge(
                        name, stage, what, "less than", 0.0, pair.difference, level=policy.level, unit="nats/token", n=pair.n, min_n=policy.min_items
                    )
                )
    return found


def diagnostics(found: Diagnostics | None, arm: str, policy: ScreenPolicy) -> list[Criterion]:
    """The figures that warn."""
    criteria = []
    for name, floor in policy.warnings.items():
        relation: Relation = "at least" if floor.at_least is not None else "at most"
        threshold = floor.at_least if floor.at_least is not None else floor.at_most
        assert threshold is not None
        figure = found.figure(arm, name) if found is not None else None
        if figure is None:
            criteria.append(missing(f"warning.{name}", "diagnose", name, relation, threshold, "not measured", required=False))
            continue
        estimate = Estimate(value=figure.value, reason=figure.reason, lower=figure.lower, upper=figure.upper)
        criteria.append(
            judge(
                f"warning.{name}", "diagnose", name.replace("_", " "), relation, threshold, estimate,
                level=policy.level, unit=figure.unit, n=figure.n, required=False,
            )
        )  # fmt: skip
    return criteria


def speed(found: Latency | None, arm: str, policy: ScreenPolicy, lengths: Sequence[int]) -> list[Criterion]:
    """Warm and cold speed-up at the lengths that matter."""
    criteria = []
    for cold, threshold in ((False, policy.speed.warm), (True, policy.speed.cold)):
        kind = "cold" if cold else "warm"
        for length in lengths:
            name, what = f"speed.{kind}.{length}", f"{kind} speed-up to the first token at {length:,} tokens"
            gain = found.speedup(arm, length, cold=cold) if found is not None else None
            required, bound = threshold is not None, threshold if threshold is not None else 1.0
            if gain is None:
                criteria.append(missing(name, "timing", what, "at least", bound, "not measured", unit="x", required=required))
                continue
            estimate = Estimate(value=gain.value, lower=gain.lower, upper=gain.upper)
            criteria.append(judge(name, "timing", what, "at least", bound, estimate, level=policy.level, unit="x", n=gain.n, required=required))
        if not lengths:
            what = f"{kind} speed-up to the first token"
            criteria.append(missing(f"speed.{kind}", "timing", what, "at least", threshold or 1.0, "no length fits the models", unit="x"))
    return criteria


def _clears(value: float, threshold: float, relation: Relation) -> bool:
    return {
        "at least": value >= threshold,
        "at most": value <= threshold,
        "more than": value > threshold,
        "less than": value < threshold,
    }[relation]


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "pp":
        return f"{100 * value:+.1f} pp"
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:.4g} {unit}".rstrip()
