"""Retention, perplexity ratio and their averages: values by hand, and everything that has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from kvbench.errors import BadInputError
from kvbench.stats import Interval, TaskScores, Undefined, average_retention, paired_retention, perplexity_ratio, tango_interval


def table(both: int, won: int, lost: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    counts = [both, won, lost, neither]
    return np.repeat([1.0, 1.0, 0.0, 0.0], counts), np.repeat([1.0, 0.0, 1.0, 0.0], counts)


def test_values_by_hand(rng: np.random.Generator) -> None:
    arm, reference = table(50, 10, 30, 110)
    result = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.25)
    assert (result.arm_score, result.reference_score, result.differing) == (0.3, 0.4, 40)
    assert result.value == pytest.approx(0.75)
    assert result.floor_normalised == pytest.approx(0.05 / 0.15)
    assert isinstance(result.interval, Interval)
    assert result.interval.lower < 0.75 < result.interval.upper
    assert result.interval.method.startswith("BCa bootstrap")
    # Delta method, independent of any resampling: Var(a/r) = Var(a_i - R r_i) / (n r^2).
    error = float(np.std(arm - 0.75 * reference, ddof=1)) / math.sqrt(200) / 0.4
    assert result.interval.upper - result.interval.lower == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_percentile_bounds_by_a_loop() -> None:
    # The same picks, the ratio of means in a loop, the order statistics of a t-expanded 95 % interval.
    generator = np.random.default_rng(4)
    arm, reference = generator.random((2, 50))
    result = paired_retention(arm, reference, rng=np.random.default_rng(8), higher_is_better=True, method="percentile", resamples=1000)
    picks = np.random.default_rng(8).integers(0, 50, size=(1000, 50))
    ratios = sorted(float(arm[pick].mean() / reference[pick].mean()) for pick in picks)
    # Student's t quantile with 49 degrees is 2.00958; Phi(-2.00958 sqrt(50/49)) = 0.021184, of 1,001 places.
    assert isinstance(result.interval, Interval)
    assert result.interval.lower == pytest.approx(ratios[math.floor(1001 * 0.021184) - 1])
    assert result.interval.upper == pytest.approx(ratios[math.ceil(1001 * (1 - 0.021184)) - 1])


def test_no_retention_without_something_to_keep(rng: np.random.Generator) -> None:
    arm, reference = table(0, 20, 0, 40)
    zero = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.0)
    assert zero.value == Undefined("the reference scores 0, zero or below: there is no retention")
    assert zero.floor_normalised == Undefined("the reference scores 0, zero or below: there is no floor-normalised retention")
    assert isinstance(zero.interval, Undefined)
    arm, reference = table(10, 10, 5, 35)
    chance = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.25)
    assert chance.value == pytest.approx(20 / 15)
    assert chance.floor_normalised == Undefined("the reference scores 0.25, at or below chance (0.25): there is no floor-normalised retention")


def test_a_reference_barely_above_chance_has_no_bounded_interval(rng: np.random.Generator) -> None:
    arm, reference = table(10, 10, 6, 36)
    result = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.25)
    assert not isinstance(result.floor_normalised, Undefined)
    assert isinstance(result.floor_normalised_interval, Undefined)
    assert isinstance(result.interval, Interval)


def test_lower_is_better_and_unknown_chance_are_said(rng: np.random.Generator) -> None:
    arm, reference = table(20, 10, 10, 20)
    result = paired_retention(arm, reference, rng=rng, higher_is_better=False)
    assert isinstance(result.value, Undefined)
    assert "higher is better" in result.value.reason
    result = paired_retention(arm, reference, rng=rng, higher_is_better=True)
    assert result.floor_normalised == Undefined("the task has no chance level")


def test_small_samples_are_refused(rng: np.random.Generator) -> None:
    # Reported in the field: 15 CoQA answers at retention 1.0 passed a gate of 0.90. Here they have a value and no interval.
    result = paired_retention(np.ones(15), np.ones(15), rng=rng, higher_is_better=True)
    assert result.value == 1.0
    assert result.interval == Undefined("n = 15 items; a bootstrap interval needs at least 30")
    result = paired_retention([1.0], [1.0], rng=rng, higher_is_better=True)
    assert isinstance(result.interval, Undefined)


def test_arms_that_hardly_differ_get_a_score_interval(rng: np.random.Generator) -> None:
    arm, reference = table(200, 0, 0, 100)
    result = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.25)
    bounds, divisor = tango_interval(0, 0, 300), 200 / 300
    assert isinstance(result.interval, Interval)
    assert isinstance(result.floor_normalised_interval, Interval)
    assert result.interval.lower == pytest.approx(1 + bounds.lower / divisor)
    assert result.floor_normalised_interval.lower == pytest.approx(1 + bounds.lower / (divisor - 0.25))
    assert result.interval.method == "Tango score (1998) of the difference over the fixed reference, 0 differing items"
    # No bootstrap sees what clusters or graded scores might still lose: the binomial bound on how many of them differ, each by all there is.
    clustered = paired_retention(arm, reference, rng=rng, higher_is_better=True, groups=np.arange(300) % 30)
    assert isinstance(clustered.interval, Interval)
    assert clustered.interval.lower == pytest.approx(1 - (1 - 0.025 ** (1 / 30)) / divisor)
    graded = paired_retention(arm / 2, reference / 2, rng=rng, higher_is_better=True)
    assert isinstance(graded.interval, Interval)
    assert graded.interval.lower == pytest.approx(1 - (1 - 0.025 ** (1 / 300)) / (divisor / 2))
    marks = paired_retention(5 * arm, 5 * reference, rng=rng, higher_is_better=True, groups=np.arange(300) % 30)
    assert isinstance(marks.interval, Undefined)
    assert "outside 0 to 1" in marks.interval.reason


def test_clusters_widen_the_interval(rng: np.random.Generator) -> None:
    # Losses come by whole clusters of ten: the spread is that of 40 clusters, not of 400 items.
    lost = np.repeat(np.arange(40) % 5 < 2, 10)
    reference = np.ones(400)
    arm = np.where(lost, 0.0, 1.0)
    items = paired_retention(arm, reference, rng=rng, higher_is_better=True)
    clusters = paired_retention(arm, reference, rng=rng, higher_is_better=True, groups=np.repeat(np.arange(40), 10))
    assert isinstance(items.interval, Interval)
    assert isinstance(clusters.interval, Interval)
    ratio = (clusters.interval.upper - clusters.interval.lower) / (items.interval.upper - items.interval.lower)
    assert ratio == pytest.approx(math.sqrt(10), rel=0.15)
    assert clusters.clusters == 40
    # Sixty losses in six clusters are six, not sixty.
    six = np.where(np.repeat(np.arange(40) < 6, 10), 0.0, 1.0)
    few = paired_retention(six, reference, rng=rng, higher_is_better=True, groups=np.repeat(np.arange(40), 10))
    assert few.differing == 60
    assert isinstance(few.interval, Interval)
    assert few.interval.lower == pytest.approx(1 - beta.ppf(0.975, 7, 34))
    assert few.interval.upper == pytest.approx(1 + beta.ppf(0.975, 1, 40))
    assert "resamples of clusters" in clusters.interval.method


@settings(deadline=None, max_examples=40)
@given(st.tuples(*[st.integers(0, 40)] * 4).filter(lambda cells: sum(cells) >= 30 and cells[0] + cells[2] > 0), st.integers(0, 1000))
def test_interval_holds_the_value_and_swapping_inverts_it(cells: tuple[int, int, int, int], seed: int) -> None:
    arm, reference = table(*cells)
    one = paired_retention(arm, reference, rng=np.random.default_rng(seed), higher_is_better=True, resamples=1000)
    other = paired_retention(reference, arm, rng=np.random.default_rng(seed), higher_is_better=True, resamples=1000)
    assert not isinstance(one.value, Undefined)
    assert one.value >= 0
    assert one.differing == other.differing
    if not isinstance(other.value, Undefined):
        assert one.value == pytest.approx(1 / other.value)
    if isinstance(one.interval, Interval):
        assert one.interval.lower - 1e-12 <= one.value <= one.interval.upper + 1e-12


@settings(deadline=None, max_examples=25)
@given(st.integers(15, 60), st.integers(15, 60), st.integers(20, 60))
def test_winning_an_item_raises_retention(both: int, lost: int, neither: int) -> None:
    before = paired_retention(*table(both, 10, lost, neither), rng=np.random.default_rng(0), higher_is_better=True, resamples=1000)
    after = paired_retention(*table(both + 1, 10, lost - 1, neither), rng=np.random.default_rng(0), higher_is_better=True, resamples=1000)
    assert not isinstance(before.value, Undefined)
    assert not isinstance(after.value, Undefined)
    assert after.value > before.value


def test_perplexity_ratio_by_hand(rng: np.random.Generator) -> None:
    reference = rng.gamma(9, 0.3, 64)
    arm = reference + rng.normal(-0.042, 0.045, 64)
    result = perplexity_ratio(arm, reference, rng=rng)
    assert result.arm_perplexity == pytest.approx(math.exp(float(np.mean(arm))))
    assert result.reference_perplexity == pytest.approx(math.exp(float(np.mean(reference))))
    assert result.value == pytest.approx(math.exp(float(np.mean(arm - reference))))
    assert isinstance(result.interval, Interval)
    assert isinstance(result.nll_interval_nats, Interval)
    assert result.interval.upper == pytest.approx(math.exp(result.nll_interval_nats.upper))
    # The t interval of the same mean is an independent computation of nearly the same bounds.
    half = 1.998 * float(np.std(arm - reference, ddof=1)) / 8
    assert result.nll_interval_nats.upper - result.nll_interval_nats.lower == pytest.approx(2 * half, rel=0.1)


def test_perplexity_ratio_weighs_tokens(rng: np.random.Generator) -> None:
    tokens = rng.integers(5, 500, 40)
    reference = 2.5 * tokens + rng.normal(0, 5, 40)
    arm = reference + 0.1 * tokens
    result = perplexity_ratio(arm, reference, rng=rng, tokens=tokens)
    assert result.nll_difference_nats == pytest.approx(0.1)
    assert result.arm_perplexity == pytest.approx(math.exp(float(arm.sum()) / float(tokens.sum())))
    # A constant loss per token leaves nothing to resample.
    assert isinstance(result.interval, Undefined)


def test_perplexity_ratio_without_a_value(rng: np.random.Generator) -> None:
    huge = perplexity_ratio(np.full(40, 800.0), np.full(40, 2.0), rng=rng)
    assert huge.arm_perplexity == Undefined("exp(800) is too large for a number")
    same = perplexity_ratio(np.full(40, 2.0), np.full(40, 2.0), rng=rng)
    assert same.value == 1.0
    assert same.interval == Undefined("the arms differ on 0 items; a bootstrap interval needs at least 10")
    assert perplexity_ratio([2.0], [1.0], rng=rng).interval == Undefined("n = 1 items; a bootstrap interval needs at least 30")


def test_average_of_tasks_by_hand(rng: np.random.Generator) -> None:
    tasks = {
        "b": TaskScores(*table(60, 10, 30, 100), chance=0.25),
        "a": TaskScores(*table(30, 20, 30, 20), chance=0.5),
    }
    result = average_retention(tasks, rng=rng)
    assert result.tasks == ("a", "b")
    assert result.value == pytest.approx((50 / 60 + 70 / 90) / 2)
    assert result.floor_normalised == pytest.approx((0 / 0.1 + (0.35 - 0.25) / (0.45 - 0.25)) / 2)
    assert isinstance(result.interval, Interval)
    # Delta method, task by task: the average of two has a quarter of the summed variances.
    variance = 0.0
    for task in tasks.values():
        arm, reference = np.asarray(task.arm), np.asarray(task.reference)
        ratio = arm.mean() / reference.mean()
        variance += float(np.var(arm - ratio * reference, ddof=1)) / arm.size / float(reference.mean()) ** 2
    assert result.interval.upper - result.interval.lower == pytest.approx(2 * 1.96 * math.sqrt(variance) / 2, rel=0.08)
    assert result.interval.method.endswith("resamples of items within each task")


def test_average_is_undefined_when_a_task_is(rng: np.random.Generator) -> None:
    good = TaskScores(*table(60, 10, 30, 100), chance=0.25)
    result = average_retention({"good": good, "none": TaskScores(*table(0, 20, 0, 40), chance=0.25)}, rng=rng)
    assert result.value == Undefined("task none: the reference scores 0, zero or below: there is no retention")
    small = average_retention({"good": good, "small": TaskScores(*table(5, 1, 1, 5))}, rng=rng)
    assert small.value == pytest.approx((70 / 90 + 1) / 2)
    assert small.interval == Undefined("task small: n = 12 items; a bootstrap interval needs at least 30")
    assert small.floor_normalised == Undefined("no chance level for small")
    same = average_retention({"same": TaskScores(*table(30, 0, 0, 30))}, rng=rng)
    bounds, small_bounds = tango_interval(0, 0, 60), tango_interval(1, 0, 40)
    assert isinstance(same.interval, Interval)
    assert same.interval.lower == pytest.approx(1 + bounds.lower / 0.5)
    both = average_retention({"same": TaskScores(*table(30, 0, 0, 30)), "won": TaskScores(*table(20, 1, 0, 19))}, rng=rng)
    assert isinstance(both.interval, Interval)
    # Square and add: the deviations of independent tasks do not happen at once.
    below = (bounds.lower / 0.5, (1 + small_bounds.lower / 0.5) - 21 / 20)
    assert both.interval.lower == pytest.approx((1 + 21 / 20) / 2 - math.hypot(*below) / 2)


def test_an_arm_that_is_never_right_still_has_an_interval(rng: np.random.Generator) -> None:
    arm, reference = table(0, 0, 40, 20)
    result = paired_retention(arm, reference, rng=rng, higher_is_better=True)
    assert result.value == 0
    assert isinstance(result.interval, Interval)
    assert result.interval.upper == pytest.approx(1 + tango_interval(0, 40, 60).upper / (40 / 60))


def test_refusals(rng: np.random.Generator) -> None:
    with pytest.raises(BadInputError, match="chance is nan"):
        paired_retention([1.0], [1.0], rng=rng, higher_is_better=True, chance=math.nan)
    with pytest.raises(BadInputError, match="arm has 2 items"):
        paired_retention([1.0, 0.0], [1.0], rng=rng, higher_is_better=True)
    with pytest.raises(BadInputError, match="tokens needs one positive count"):
        perplexity_ratio([1.0, 2.0], [1.0, 2.0], rng=rng, tokens=[3, 0])
    with pytest.raises(BadInputError, match="task x: arm is empty"):
        average_retention({"x": TaskScores([], [])}, rng=rng)
    with pytest.raises(BadInputError, match="tasks is empty"):
        average_retention({}, rng=rng)
