"""Criteria are held against bounds, never against point estimates; nothing passes without data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.reporting.view import Estimate
from kvbench.runs.verdict import Criterion
from kvbench.screening.criteria import judge, missing
from kvbench.screening.decide import decide

FIGURES = st.floats(-2, 2).map(lambda v: round(v, 3))


def held(relation, threshold, low, value, high, **more):
    estimate = Estimate(value=value, lower=low, upper=high)
    return judge("retention.task.x", "suite", "x", relation, threshold, estimate, level=0.95, **more)


@pytest.mark.parametrize(
    ("relation", "low", "high", "passed"),
    [
        ("at least", 0.90, 1.0, True),
        ("at least", 0.89, 1.0, None),
        ("at least", 0.80, 0.89, False),
        ("at most", 0.80, 0.90, True),
        ("at most", 0.80, 0.91, None),
        ("at most", 0.91, 0.95, False),
        ("more than", 0.90, 1.0, None),
        ("more than", 0.901, 1.0, True),
        ("more than", 0.8, 0.90, False),
        ("less than", 0.8, 0.899, True),
        ("less than", 0.8, 0.90, None),
    ],
)
def test_the_bound_decides(relation, low, high, passed):
    assert held(relation, 0.90, low, (low + high) / 2, high).passed is passed


@given(FIGURES, FIGURES, FIGURES, st.sampled_from(["at least", "at most"]))
def test_a_wider_interval_never_turns_open_into_decided(threshold, value, half, relation):
    half = abs(half)
    narrow = held(relation, threshold, value - half, value, value + half).passed
    wide = held(relation, threshold, value - 2 * half - 0.1, value, value + 2 * half + 0.1).passed
    assert wide in (narrow, None)


def test_few_items_and_no_figure_stay_open():
    assert held("at least", 0.9, 0.99, 1.0, 1.0, n=20, min_n=50).passed is None
    assert "fewer than the 50" in held("at least", 0.9, 0.99, 1.0, 1.0, n=20, min_n=50).reason
    assert held("at least", 0.9, 0.1, 0.2, 0.3, n=20, min_n=50).passed is None
    assert judge("a", "b", "c", "at least", 0.9, Estimate.missing("the target scores 0"), level=0.95).passed is None
    assert judge("a", "b", "c", "at least", 0.9, Estimate(value=1.0, interval_reason="n = 1"), level=0.95).passed is None


def test_few_items_are_named_by_the_policys_number_even_without_an_interval():
    """The reason once quoted the bootstrap's own minimum, which no policy states."""
    for estimate in (Estimate.missing("30 items at least"), Estimate(value=0.5, interval_reason="30 items at least")):
        found = judge("a", "b", "c", "at least", 0.9, estimate, level=0.95, n=20, min_n=50)
        assert found.passed is None
        assert found.reason.startswith("n = 20, fewer than the 50 that the policy asks for")


def test_a_share_of_next_to_nothing_is_explained():
    wide = held("at least", 0.9, -4.2, 0.5, 3.6, unit="%")
    assert "the target's own score is too near zero" in wide.reason
    assert "too near zero" not in held("at least", 0.9, 0.8, 0.95, 1.1, unit="%").reason


def made(name, passed, required=True):
    return Criterion(
        id=name, stage="suite", what=name, required=required, relation="at least", threshold=math.pi, figure=1.0, passed=passed, reason="because"
    )


def test_verdicts():
    assert decide([made("retention.a", True), made("speed.warm", True)], complete=True)[:2] == ("deploy", "passed")
    assert decide([made("retention.a", True), made("speed.warm", None)], complete=True)[:2] == ("inconclusive", "open")
    assert decide([made("retention.a", None), made("speed.warm", False)], complete=True)[:2] == ("do-not-deploy", "speed")
    assert decide([made("retention.a", True)], complete=False).verdict == "inconclusive"
    assert decide([], complete=True).verdict == "inconclusive"


def test_warnings_never_decide():
    answer = decide([made("retention.a", True), made("warning.kl_nats", False, required=False)], complete=True)
    assert answer.verdict == "deploy"
    assert "1 warning: warning.kl_nats" in answer.sentence
    assert decide([made("warning.kl_nats", True, required=False)], complete=True).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (["check.pair"], "refused"),
        (["gate.zero.target"], "gate"),
        (["canary.gsm8k", "better_than_source.average"], "quality"),
        (["better_than_source.average", "speed.warm.512"], "source is as good"),
        (["gain.other_model"], "nothing to gain"),
        (["speed.cold.512"], "speed"),
    ],
)
def test_the_reason_is_the_gravest(failed, reason):
    assert decide([made(name, False) for name in failed], complete=True).reason == reason


def test_what_is_missing_cannot_pass():
    assert missing("a", "b", "c", "at least", 0.5, "never run").passed is None
    assert (
        decide([made("retention.a", True), missing("canary", "canary", "c", "at least", 0.5, "never run")], complete=True).verdict == "inconclusive"
    )
