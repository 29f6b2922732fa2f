"""Adjusted p-values against the example of Benjamini and Hochberg and slow definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import BadInputError
from kvbench.stats import Undefined, benjamini_hochberg, holm

# Benjamini and Hochberg (1995), section 4.1: fifteen p-values of a study of thrombolysis.
THROMBOLYSIS = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
families = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def named(values: list[float]) -> dict[str, float | Undefined]:
    return {f"t{index}": value for index, value in enumerate(values)}


def rejected(adjusted: dict[str, float | Undefined]) -> int:
    return sum(1 for p in adjusted.values() if not isinstance(p, Undefined) and p <= 0.05)


def slow_holm(values: list[float], index: int) -> float:
    # Every p at most this one, times the number of p-values not smaller than it; the largest, at most 1. Ties count each other.
    order = sorted(range(len(values)), key=lambda i: values[i])
    return min(1.0, max(values[order[j]] * (len(values) - j) for j in range(order.index(index) + 1)))


def slow_bh(values: list[float], index: int) -> float:
    # The smallest, over p-values q at least this one, of q m / (number of p-values at most q).
    return min(1.0, min(q * len(values) / sum(p <= q for p in values) for q in values if q >= values[index]))


def test_example_of_benjamini_and_hochberg() -> None:
    # Section 4.1: at 5 % Bonferroni rejects the three smallest, their procedure the four smallest. Holm: 0.0095 x 12 > 0.05.
    assert rejected(benjamini_hochberg(named(THROMBOLYSIS))) == 4
    assert rejected(holm(named(THROMBOLYSIS))) == 3
    assert benjamini_hochberg(named(THROMBOLYSIS))["t3"] == pytest.approx(0.0095 * 15 / 4)
    assert holm(named(THROMBOLYSIS))["t2"] == pytest.approx(0.0019 * 13)


@settings(deadline=None, max_examples=30)
@given(families)
def test_equals_the_definitions(values: list[float]) -> None:
    stepdown, stepup = holm(named(values)), benjamini_hochberg(named(values))
    for index in range(len(values)):
        assert stepup[f"t{index}"] == pytest.approx(slow_bh(values, index), abs=1e-12)
        assert stepdown[f"t{index}"] == pytest.approx(slow_holm(values, index), abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(families)
def test_order_bounds_and_monotonicity(values: list[float]) -> None:
    family = named(values)
    for adjust in (holm, benjamini_hochberg):
        adjusted = adjust(family)
        assert list(adjusted) == list(family)
        result = [p for p in adjusted.values() if not isinstance(p, Undefined)]
        assert all(before - 1e-12 <= after <= 1 for before, after in zip(values, result, strict=True))
        by_size = [after for _, after in sorted(zip(values, result, strict=True))]
        assert by_size == sorted(by_size)


def test_undefined_passes_through_and_is_not_counted() -> None:
    gone = Undefined("all equal")
    family: dict[str, float | Undefined] = {"b": 0.02, "gone": gone, "a": 0.01}
    assert holm(family) == {"b": pytest.approx(0.02), "gone": gone, "a": pytest.approx(0.02)}
    assert list(holm(family)) == ["b", "gone", "a"]
    assert benjamini_hochberg({"gone": gone}) == {"gone": gone}
    assert holm({}) == {}


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_refuses_what_is_no_p_value(p: float) -> None:
    with pytest.raises(BadInputError, match="the p-value of x is"):
        holm({"x": p})
