"""Correlations against their definitions and an interval worked out for the published r."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import BadInputError
from kvbench.stats import Interval, Undefined, fisher_interval, pearson, spearman


def slow_pearson(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def test_interval_of_facts() -> None:
    # arXiv:2608.03893: r = +0.57 over 12 directions, 95 % interval about -0.01 to 0.86.
    interval = fisher_interval(0.57, 12)
    assert isinstance(interval, Interval)
    assert (round(interval.lower, 2), round(interval.upper, 2)) == (-0.01, 0.86)


def test_pearson_and_spearman_by_definition() -> None:
    # Edgington, IQ and hours of television, ten people: Spearman -29/165 = -0.175757..., p 0.627188 (Wikipedia, "Spearman's
    # rank correlation coefficient").
    iq = [106.0, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7.0, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    ranked = spearman(iq, hours)
    assert ranked.value == pytest.approx(-29 / 165)
    assert ranked.p == pytest.approx(0.627188, abs=5e-7)
    assert isinstance(ranked.interval, Interval)
    # Bonett and Wright (2000): z +- 1.96 sqrt((1 + r^2 / 2) / (n - 3)).
    half = 1.959964 * math.sqrt((1 + (29 / 165) ** 2 / 2) / 7)
    assert ranked.interval.upper == pytest.approx(math.tanh(math.atanh(-29 / 165) + half), abs=1e-6)
    linear = pearson(iq, hours)
    assert linear.value == pytest.approx(slow_pearson(iq, hours))
    assert linear.n == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=4, max_size=30), st.integers(1, 9), st.integers(-9, 9))
def test_symmetry_bounds_and_invariance(pairs: list[tuple[int, int]], scale: int, shift: int) -> None:
    x, y = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    for measure in (pearson, spearman):
        here, there = measure(x, y), measure(y, x)
        negated, moved = measure(x, -y), measure(scale * x + shift, y)
        if isinstance(here.value, Undefined):
            assert isinstance(there.value, Undefined)
            continue
        assert -1 <= here.value <= 1
        assert here.value == pytest.approx(there.value, abs=1e-12)
        assert here.value == pytest.approx(moved.value, abs=1e-9)
        assert not isinstance(negated.value, Undefined)
        assert here.value == pytest.approx(-negated.value, abs=1e-12)
        if isinstance(here.interval, Interval):
            assert -1 <= here.interval.lower <= here.value <= here.interval.upper <= 1
    ranks, cubed = spearman(x, y), spearman(x**3, y)
    assert isinstance(ranks.value, Undefined) or ranks.value == pytest.approx(cubed.value, abs=1e-12)


def test_more_points_narrow_the_interval() -> None:
    widths = [bound.upper - bound.lower for n in (4, 12, 50, 500) if isinstance(bound := fisher_interval(0.5, n), Interval)]
    assert widths == sorted(widths, reverse=True)
    assert len(widths) == 4


def test_undefined_with_reason() -> None:
    assert pearson([1, 2, 3], [1, 2, 4]).value == Undefined("n = 3; a correlation with an interval needs at least 4 pairs")
    assert spearman([1, 2, 3, 4], [5, 5, 5, 5]).value == Undefined("every y is 5: a constant correlates with nothing")
    assert pearson([0.1 + 0.2, 0.3, 0.3, 0.3], [1, 2, 3, 4]).p == Undefined("every x is 0.3: a constant correlates with nothing")
    perfect = pearson([1, 2, 3, 4], [2, 4, 6, 8])
    assert perfect.value == pytest.approx(1)
    assert perfect.interval == Undefined("the correlation is perfect: Fisher's z has no value")
    assert isinstance(fisher_interval(0.5, 3), Undefined)


def test_refusals() -> None:
    with pytest.raises(BadInputError, match="x has 2 values and y has 1"):
        pearson([1, 2], [1])
    with pytest.raises(BadInputError, match="y holds 1 of 4 values that are not finite"):
        spearman([1, 2, 3, 4], [1, 2, 3, math.nan])
    with pytest.raises(BadInputError, match=r"r is 1\.5"):
        fisher_interval(1.5, 10)
    with pytest.raises(BadInputError, match="level is 2"):
        pearson([1, 2, 3, 5], [1, 2, 4, 3], level=2)
