"""One arm against one reference on one task: difference, retention, test, disposition, and the n that would settle it."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from statsmodels.stats.proportion import proportion_confint

from kvbench.reporting.metrics import TaskData
from kvbench.reporting.view import Estimate, PairView, Policy, Relation, ScoreView
from kvbench.stats import (
    MIN_DIFFERING,
    Decision,
    Disposition,
    Interval,
    MaybeInterval,
    RequiredN,
    Undefined,
    Value,
    bounded_difference_interval,
    decide,
    difference_of_means,
    paired_bootstrap,
    paired_proportions,
    paired_retention,
    paired_values,
    perplexity_ratio,
    required_n,
    required_n_proportions,
)

Vector = NDArray[np.float64]


def generator(policy: Policy, *parts: str) -> np.random.Generator:
    """A random generator of its own for each comparison, so that adding an arm moves no other figure."""
    return np.random.default_rng([policy.seed, zlib.crc32("|".join(parts).encode())])


def undefined_scores(data: TaskData, arm: str) -> str | None:
    """Why an arm has no score on a task, or None if every item has one."""
    if arm not in data.scores:
        return f"arm '{arm}' was not run on it"
    missing = np.flatnonzero(~np.isfinite(data.scores[arm]))
    if not missing.size:
        return None
    shown = ", ".join(str(data.items[i][1]) for i in missing[:3]) + (", ..." if missing.size > 3 else "")
    return f"arm '{arm}' has no finite score on {missing.size} of {data.view.n} items (doc_id {shown})"


def score_of(data: TaskData, arm: str, policy: Policy) -> ScoreView:
    """Mean score of one arm with its interval; the perplexity for negative log-likelihoods."""
    view = data.view
    reason = undefined_scores(data, arm)
    if reason is not None:
        return ScoreView(task_id=view.id, arm=arm, score=Estimate.missing(reason), not_run=arm not in data.scores)
    scores = data.scores[arm]
    rng = generator(policy, view.id, arm)
    if view.kind == "nll":
        sizes = data.sizes if data.sizes is not None else np.ones(view.n)
        interval = paired_bootstrap([scores], _first, rng=rng, groups=data.groups, sizes=sizes, level=policy.level, resamples=policy.resamples)
        if isinstance(interval, Interval):
            interval = interval._replace(lower=math.exp(min(interval.lower, 700)), upper=math.exp(min(interval.upper, 700)))
        return ScoreView(task_id=view.id, arm=arm, score=Estimate.of(_exp(float(scores.sum() / sizes.sum())), interval))
    mean = float(scores.mean())
    if view.kind == "accuracy" and data.groups is None:
        low, high = proportion_confint(int(scores.sum()), view.n, alpha=1 - policy.level, method="wilson")
        interval = Interval(float(low), float(high), policy.level, "Wilson score")
    else:
        interval = paired_bootstrap([scores], _first, rng=rng, groups=data.groups, level=policy.level, resamples=policy.resamples)
    at_chance = view.chance is not None and view.chance > 0 and (interval.lower if isinstance(interval, Interval) else mean) <= view.chance
    return ScoreView(task_id=view.id, arm=arm, score=Estimate.of(mean, interval), at_chance=at_chance)


def compare_pair(data: TaskData, arm: str, reference: str, relation: Relation, policy: Policy, *, in_family: bool) -> PairView:
    """Compare two arms on one task.

    Right-or-wrong items without clusters: McNemar's exact test and Tango's interval. Graded or clustered items: paired t-test (cluster
    means where there are clusters) and bootstrap interval. Negative log-likelihoods: paired t-test on the documents' means, bootstrap
    interval of the token-weighted difference.
    """
    view = data.view
    margin = policy.nll_margin if view.kind == "nll" else policy.margin
    reason = undefined_scores(data, arm) or undefined_scores(data, reference)
    if reason is not None:
        gone = Estimate.missing(reason)
        return PairView(
            task_id=view.id,
            arm=arm,
            reference=reference,
            relation=relation,
            in_family=in_family and view.primary,
            n=view.n,
            difference=gone,
            retention=gone,
            floor_normalised=gone,
            p_reason=reason,
            disposition=Disposition.INCONCLUSIVE.value,
            decision_reason=reason,
            margin=margin,
        )
    compare = _nll if view.kind == "nll" else _proportions if view.kind == "accuracy" and data.groups is None else _graded
    found = compare(data, data.scores[arm], data.scores[reference], policy, generator(policy, view.id, arm, reference))
    floor = policy.floor(view.task)
    if floor is not None and relation in ("target", "context") and view.kind != "nll" and view.higher_is_better:
        margin = 1 - floor
        found = _on_retention(found, data, data.scores[arm], data.scores[reference], policy, margin)
    required = found.required if found.decision.disposition is Disposition.INCONCLUSIVE else None
    p = found.p
    return PairView(
        task_id=view.id,
        arm=arm,
        reference=reference,
        relation=relation,
        in_family=in_family and view.primary,
        n=view.n,
        difference=found.difference,
        retention=found.retention,
        floor_normalised=found.floor,
        perplexity_ratio=found.ratio,
        won=found.counts[0],
        lost=found.counts[1],
        tied=found.counts[2],
        p=None if isinstance(p, Undefined) else p,
        p_reason=p.reason if isinstance(p, Undefined) else None,
        test=found.test,
        p_second=found.p_second,
        second_test=found.second_test,
        disposition=found.decision.disposition.value,
        decision_reason=found.decision.reason,
        margin=margin,
        loss_shown=found.decision.loss_shown,
        required_n=required.n if isinstance(required, RequiredN) else None,
        required_reason=_required_words(required),
    )


class _Found(NamedTuple):
    """What the three ways of comparing have in common."""

    difference: Estimate
    retention: Estimate
    floor: Estimate
    counts: tuple[int, int, int]
    p: Value
    test: str
    p_second: float
    second_test: str
    decision: Decision
    required: RequiredN | Undefined
    ratio: Estimate | None = None


def _retentions(data: TaskData, arm: Vector, reference: Vector, policy: Policy, rng: np.random.Generator) -> tuple[Estimate, Estimate]:
    view = data.view
    kept = paired_retention(
        arm,
        reference,
        rng=rng,
        higher_is_better=view.higher_is_better,
        chance=view.chance,
        groups=data.groups,
        level=policy.level,
        resamples=policy.resamples,
    )
    return Estimate.of(kept.value, kept.interval), Estimate.of(kept.floor_normalised, kept.floor_normalised_interval)


def _proportions(data: TaskData, arm: Vector, reference: Vector, policy: Policy, rng: np.random.Generator) -> _Found:
    found = paired_proportions(arm, reference, level=policy.level)
    retention, floor = _retentions(data, arm, reference, policy, rng)
    better = data.view.higher_is_better
    won, lost = (found.won, found.lost) if better else (found.lost, found.won)
    return _Found(
        difference=Estimate.of(found.difference, found.interval),
        retention=retention,
        floor=floor,
        counts=(won, lost, found.both_right + found.both_wrong),
        p=found.p_exact,
        test="McNemar exact",
        p_second=found.p_mid,
        second_test="McNemar mid-p",
        decision=decide(found.interval, null=0.0, margin=policy.margin, n=found.n, min_n=policy.min_n, higher_is_better=better),
        required=required_n_proportions(won, lost, found.n, margin=policy.margin, alpha=1 - policy.level, min_n=policy.min_n),
    )


def _graded(data: TaskData, arm: Vector, reference: Vector, policy: Policy, rng: np.random.Generator) -> _Found:
    better, groups = data.view.higher_is_better, data.groups
    tested = paired_values(arm, reference, higher_is_better=better, groups=groups, level=policy.level)
    interval: MaybeInterval
    differing = int(np.sum(arm != reference))
    if differing < MIN_DIFFERING:
        interval = bounded_difference_interval(arm, reference, groups=groups, level=policy.level)
    else:
        interval = paired_bootstrap([arm, reference], difference_of_means, rng=rng, groups=groups, level=policy.level, resamples=policy.resamples)
    retention, floor = _retentions(data, arm, reference, policy, rng)
    gain = arm - reference if better else reference - arm
    return _Found(
        difference=Estimate.of(float(arm.mean() - reference.mean()), interval),
        retention=retention,
        floor=floor,
        counts=(int(np.sum(gain > 0)), int(np.sum(gain < 0)), int(np.sum(gain == 0))),
        p=tested.p_t,
        test=f"paired t over {tested.unit}",
        p_second=tested.p_wilcoxon,
        second_test=f"Wilcoxon signed ranks ({tested.wilcoxon_method})",
        decision=decide(interval, null=0.0, margin=policy.margin, n=data.view.n, min_n=policy.min_n, higher_is_better=better),
        required=required_n(
            arm,
            reference,
            margin=policy.margin,
            scale="difference",
            higher_is_better=better,
            groups=groups,
            alpha=1 - policy.level,
            min_n=policy.min_n,
        ),
    )


def _on_retention(found: _Found, data: TaskData, arm: Vector, reference: Vector, policy: Policy, margin: float) -> _Found:
    """Judge the share of the reference's score that is kept, for policies that state one."""
    kept = found.retention
    bounds: MaybeInterval
    if kept.lower is None or kept.upper is None:
        bounds = Undefined(kept.reason or kept.interval_reason or "retention is undefined")
    else:
        bounds = Interval(kept.lower, kept.upper, policy.level, kept.method or "")
    decision = decide(bounds, null=1.0, margin=margin, n=data.view.n, min_n=policy.min_n)
    required = required_n(
        arm, reference, margin=margin, scale="retention", groups=data.groups, alpha=1 - policy.level, min_n=policy.min_n
    )  # fmt: skip
    return found._replace(decision=decision, required=required)


def _nll(data: TaskData, arm: Vector, reference: Vector, policy: Policy, rng: np.random.Generator) -> _Found:
    groups = data.groups
    sizes = data.sizes if data.sizes is not None else np.ones(data.view.n)
    ratio = perplexity_ratio(arm, reference, rng=rng, tokens=data.sizes, groups=groups, level=policy.level, resamples=policy.resamples)
    per_arm, per_reference = arm / sizes, reference / sizes
    tested = paired_values(per_arm, per_reference, higher_is_better=False, groups=groups, level=policy.level)
    kept = Estimate.missing("retention is defined for scores where higher is better; see the perplexity ratio")
    return _Found(
        difference=Estimate.of(ratio.nll_difference_nats, ratio.nll_interval_nats),
        retention=kept,
        floor=kept,
        ratio=Estimate.of(ratio.value, ratio.interval),
        counts=(int(np.sum(per_arm < per_reference)), int(np.sum(per_arm > per_reference)), int(np.sum(per_arm == per_reference))),
        p=tested.p_t,
        test=f"paired t over {tested.unit}",
        p_second=tested.p_wilcoxon,
        second_test=f"Wilcoxon signed ranks ({tested.wilcoxon_method})",
        decision=decide(ratio.nll_interval_nats, null=0.0, margin=policy.nll_margin, n=data.view.n, min_n=policy.min_n, higher_is_better=False),
        required=required_n(
            per_arm,
            per_reference,
            margin=policy.nll_margin,
            scale="difference",
            higher_is_better=False,
            groups=groups,
            alpha=1 - policy.level,
            min_n=policy.min_n,
        ),
    )


def _required_words(required: RequiredN | Undefined | None) -> str | None:
    if required is None:
        return None
    if isinstance(required, Undefined):
        return required.reason
    return f"about {required.n:,} items would show '{required.towards}' with 80 % power, if the observed change is the true one"


def _first(means: Vector) -> Vector:
    column: Vector = means[..., 0]
    return column


def _exp(nats: float) -> Value:
    return math.exp(nats) if nats < 700 else Undefined(f"exp({nats:.4g}) is too large for a number")
