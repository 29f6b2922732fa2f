"""Four words, each exactly where its definition puts it, and the n that settles the fourth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import BadInputError
from kvbench.stats import Disposition, Interval, RequiredN, Undefined, decide, paired_retention, required_n, required_n_proportions

bounds = st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(sorted)


def interval(lower: float, upper: float) -> Interval:
    return Interval(lower, upper, 0.95, "given")


@pytest.mark.parametrize(
    ("lower", "upper", "word", "loss_shown"),
    [
        (0.01, 0.05, Disposition.IMPROVED, False),
        (0.0, 0.05, Disposition.NO_MATERIAL_LOSS, False),
        (-0.02, 0.05, Disposition.NO_MATERIAL_LOSS, False),
        (-0.02, -0.01, Disposition.NO_MATERIAL_LOSS, True),
        (-0.021, 0.05, Disposition.INCONCLUSIVE, False),
        (-0.05, -0.001, Disposition.INCONCLUSIVE, True),
        (-0.05, -0.02, Disposition.INCONCLUSIVE, True),
        (-0.05, -0.021, Disposition.DEGRADED, True),
    ],
)
def test_each_line_of_the_definition(lower: float, upper: float, word: Disposition, loss_shown: bool) -> None:
    on_difference = decide(interval(lower, upper), null=0, margin=0.02, n=100)
    assert (on_difference.disposition, on_difference.loss_shown) == (word, loss_shown)
    # A number of nats lost where lower is better is the mirror image.
    mirrored = decide(interval(-upper, -lower), null=0, margin=0.02, n=100, higher_is_better=False)
    assert mirrored == on_difference


def test_retention_and_ratio_are_judged_around_one() -> None:
    kept = decide(interval(0.985, 0.999), null=1, margin=0.02, n=100)
    assert kept.disposition is Disposition.NO_MATERIAL_LOSS
    assert kept.lower == pytest.approx(-0.015)
    worse = decide(interval(1.05, 1.09), null=1, margin=0.02, n=100, higher_is_better=False)
    assert worse.disposition is Disposition.DEGRADED
    assert worse.reason == "the whole interval is a loss beyond the margin (change -0.0900 to -0.0500, margin 0.02)"


def test_too_few_items_decide_nothing(rng: np.random.Generator) -> None:
    # Reported in the field: 15 CoQA answers at retention 1.0 must not pass.
    result = paired_retention(np.ones(15), np.ones(15), rng=rng, higher_is_better=True)
    decision = decide(result.interval, null=1, margin=0.10, n=15)
    assert decision.disposition is Disposition.INCONCLUSIVE
    assert decision.reason == "no interval: n = 15 items; a bootstrap interval needs at least 30"
    assert (decision.lower, decision.upper) == (None, None)
    few = decide(interval(0.1, 0.2), null=0, margin=0.02, n=99, min_n=100)
    assert few.disposition is Disposition.INCONCLUSIVE
    assert few.reason.startswith("n = 99 is below the minimum of 100")


@settings(deadline=None)
@given(bounds, st.floats(0, 1))
def test_claims_follow_from_the_bounds_alone(pair: list[float], margin: float) -> None:
    lower, upper = pair
    word = decide(interval(lower, upper), null=0, margin=margin, n=100).disposition
    claims = [lower > 0, -margin <= lower <= 0, upper < -margin]
    assert sum(claims) <= 1
    expected = {(True, False, False): "improved", (False, True, False): "no material loss", (False, False, True): "degraded"}
    assert word == expected.get(tuple(claims), "inconclusive")  # type: ignore[arg-type]


@settings(deadline=None)
@given(bounds, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_a_wider_margin_or_a_better_interval_is_never_a_worse_word(pair: list[float], first: float, second: float, shift: float) -> None:
    rank = {Disposition.DEGRADED: 0, Disposition.INCONCLUSIVE: 1, Disposition.NO_MATERIAL_LOSS: 2, Disposition.IMPROVED: 3}
    strict, lax = sorted((first, second))
    one = decide(interval(*pair), null=0, margin=strict, n=100)
    other = decide(interval(pair[0] + shift, pair[1] + shift), null=0, margin=lax, n=100)
    assert rank[other.disposition] >= rank[one.disposition]


def test_required_n_of_connor() -> None:
    # Connor (1987) p. 209 as published by powerandsamplesize.com (McNemar, two-sided): p01 = 0.45, p10 = 0.05, alpha 0.05,
    # power 0.80 gives n = 23.
    result = required_n_proportions(45, 5, 100, min_n=1)
    assert result == RequiredN(23, "improved", 0.4, 0.0, 0.05, 0.8)


def test_required_n_of_a_mean_by_its_formula() -> None:
    # n = (1.959964 + 0.841621)^2 (sd / distance)^2 with sd 1 and distance 0.3: 87.2.
    arm = np.array([1.0, -1.0] * 50) * math.sqrt(99 / 100)
    result = required_n(arm, np.zeros(100), margin=0.3, scale="difference", min_n=1)
    assert isinstance(result, RequiredN)
    assert (result.n, result.towards) == (88, "no material loss")
    assert result.assumed_change == pytest.approx(0, abs=1e-12)


def test_required_n_counts_and_items_agree() -> None:
    arm, reference = np.repeat([1.0, 1.0, 0.0, 0.0], [400, 40, 60, 500]), np.repeat([1.0, 0.0, 1.0, 0.0], [400, 40, 60, 500])
    items = required_n(arm, reference, margin=0.03, scale="difference")
    counts = required_n_proportions(40, 60, 1000, margin=0.03)
    assert isinstance(items, RequiredN)
    assert isinstance(counts, RequiredN)
    assert items.n == pytest.approx(counts.n, rel=0.02)
    # Retention of 0.46 with margin m is a difference with margin 0.46 m where the reference hardly varies the contrast.
    kept = required_n(arm, reference, margin=0.03 / 0.46, scale="retention")
    assert isinstance(kept, RequiredN)
    assert kept.n == pytest.approx(items.n, rel=0.1)
    assert kept.assumed_change == pytest.approx(440 / 460 - 1)


def test_required_n_for_retention_tests_the_contrast() -> None:
    # Floor 0.25, margin 0.1: the items' (arm - 0.25) - 0.9 (reference - 0.25) against zero, counted in full.
    arm, reference = np.repeat([1.0, 1.0, 0.0, 0.0], [90, 30, 20, 60]), np.repeat([1.0, 0.0, 1.0, 0.0], [90, 30, 20, 60])
    items = [(a - 0.25) - 0.9 * (r - 0.25) for a, r in zip(arm, reference, strict=True)]
    mean = sum(items) / 200
    spread = math.sqrt(sum((item - mean) ** 2 for item in items) / 199)
    planned = required_n(arm, reference, margin=0.1, scale="retention", floor=0.25, min_n=1)
    assert isinstance(planned, RequiredN)
    assert planned.n == math.ceil(((1.959964 + 0.841621) * spread / mean) ** 2)
    assert planned.assumed_change == pytest.approx((0.60 - 0.25) / (0.55 - 0.25) - 1)


def test_clusters_need_more_items() -> None:
    # Ten identical items a cluster: ten times as many items carry the same information.
    rng = np.random.default_rng(1)
    change = np.repeat(rng.normal(0, 1, 60), 10)
    alone = required_n(change[::10], np.zeros(60), margin=0.2, scale="difference", min_n=1, assumed_change=0.0)
    together = required_n(change, np.zeros(600), margin=0.2, scale="difference", min_n=1, assumed_change=0.0, groups=np.arange(600) // 10)
    assert isinstance(alone, RequiredN)
    assert isinstance(together, RequiredN)
    assert together.n == pytest.approx(10 * alone.n, rel=0.02)


def test_direction_and_lower_is_better() -> None:
    rng = np.random.default_rng(2)
    reference = rng.gamma(9, 0.3, 80)
    arm = reference + rng.normal(0.05, 0.3, 80)
    loss = required_n(arm, reference, margin=math.log(1.01), scale="difference", higher_is_better=False, assumed_change=-0.05)
    gain = required_n(reference, arm, margin=math.log(1.01), scale="difference", higher_is_better=True, assumed_change=-0.05)
    assert isinstance(loss, RequiredN)
    assert loss == gain
    assert loss.towards == "degraded"


def test_nothing_settles_what_has_no_spread_or_lies_on_the_margin(rng: np.random.Generator) -> None:
    same = required_n([1.0] * 40, [1.0] * 40, margin=0.1, scale="retention")
    assert same == Undefined("every item scores the same in both arms: how often they differ is unknown")
    assert isinstance(required_n([0.5] * 40, [1.0] * 40, margin=0.1, scale="difference"), Undefined)
    on_it = required_n_proportions(10, 20, 100, margin=0.1)
    assert on_it == Undefined("the change of -0.1 lies on the margin of -0.1: no number of items settles it")
    assert isinstance(required_n_proportions(0, 0, 100, margin=0.1), Undefined)
    assert isinstance(required_n_proportions(1, 1, 100, margin=0.1, assumed_change=0.3), Undefined)
    assert isinstance(required_n([1.0, 0.0], [0.0, 0.0], margin=0.1, scale="retention"), Undefined)
    assert required_n([1.0], [0.0], margin=0.1, scale="difference") == Undefined("n = 1: one item says nothing about the spread")
    easy = required_n(rng.normal(5, 1, 40), np.zeros(40), margin=0.1, scale="difference", min_n=50)
    assert isinstance(easy, RequiredN)
    assert easy.n == 50


def test_refusals() -> None:
    some = interval(0, 1)
    with pytest.raises(BadInputError, match=r"margin is -0\.1"):
        decide(some, null=0, margin=-0.1, n=100)
    with pytest.raises(BadInputError, match="null is nan"):
        decide(some, null=math.nan, margin=0.1, n=100)
    with pytest.raises(BadInputError, match="n must not be negative"):
        decide(some, null=0, margin=0.1, n=-1)
    with pytest.raises(BadInputError, match="retention needs scores where higher is better"):
        required_n([1, 0], [0, 1], margin=0.1, scale="retention", higher_is_better=False)
    with pytest.raises(BadInputError, match=r"floor is 0\.25"):
        required_n([1, 0], [0, 1], margin=0.1, scale="difference", floor=0.25)
    with pytest.raises(BadInputError, match="scale is 'odds'"):
        required_n([1, 0], [0, 1], margin=0.1, scale="odds")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="power is 1"):
        required_n([1, 0], [0, 1], margin=0.1, scale="difference", power=1)
    with pytest.raises(BadInputError, match="contradict each other"):
        required_n_proportions(5, 5, 9)
