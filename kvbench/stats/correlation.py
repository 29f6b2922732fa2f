"""Whether two figures move together, with the interval that a dozen points deserve."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.stats.inputs import Vector, check_level, finite_vector
from kvbench.stats.status import Interval, MaybeInterval, Undefined, Value

# A column that varies less than rounding does is constant.
_CONSTANT = 1e-12


class Correlation(NamedTuple):
    """Result of `pearson` and `spearman`."""

    kind: str
    """'pearson' or 'spearman'."""
    n: int
    """Pairs of values."""
    value: Value
    """The coefficient, in [-1, 1]."""
    interval: MaybeInterval
    """By Fisher's z."""
    p: Value
    """Two-sided, against no correlation, by Student's t."""


def fisher_interval(r: float, n: int, *, level: float = 0.95) -> MaybeInterval:
    """Interval of Pearson's r by Fisher's z, standard error 1 / sqrt(n - 3).

    Args:
        r: the coefficient.
        n: pairs behind it.
        level: nominal coverage.

    Raises:
        BadInputError: if r is no correlation.

    Source:
        Fisher, Metron 1:3-32 (1921).
    """
    return _z_interval(r, n, 1.0, level, "Fisher z")


def pearson(x: ArrayLike, y: ArrayLike, *, level: float = 0.95) -> Correlation:
    """Pearson's linear correlation.

    Args:
        x: `[n]`.
        y: `[n]`, in the same order.
        level: nominal coverage.

    Raises:
        BadInputError: on empty, unequal or non-finite values.

    Source:
        `fisher_interval`; the t-test of r is exact for a bivariate normal law.
    """
    first, second = _columns(x, y)
    check_level(level)
    missing = _missing(first, second)
    if missing is not None:
        return Correlation("pearson", int(first.size), missing, missing, missing)
    result = scipy_stats.pearsonr(first, second)
    r = _clipped(float(result.statistic))
    return Correlation("pearson", int(first.size), r, fisher_interval(r, first.size, level=level), float(result.pvalue))


def spearman(x: ArrayLike, y: ArrayLike, *, level: float = 0.95) -> Correlation:
    """Spearman's rank correlation.

    Args:
        x: `[n]`.
        y: `[n]`, in the same order.
        level: nominal coverage.

    Raises:
        BadInputError: on empty, unequal or non-finite values.

    Source:
        Interval: Fisher's z with the standard error sqrt((1 + r^2 / 2) / (n - 3)), Bonett and Wright, Psychometrika
        65:23-28 (2000).
    """
    first, second = _columns(x, y)
    check_level(level)
    missing = _missing(first, second)
    if missing is not None:
        return Correlation("spearman", int(first.size), missing, missing, missing)
    result = scipy_stats.spearmanr(first, second)
    r = _clipped(float(result.statistic))
    bounds = _z_interval(r, first.size, 1 + r * r / 2, level, "Fisher z, Bonett-Wright standard error")
    return Correlation("spearman", int(first.size), r, bounds, float(result.pvalue))


def _columns(x: ArrayLike, y: ArrayLike) -> tuple[Vector, Vector]:
    first, second = finite_vector("x", x), finite_vector("y", y)
    if first.size != second.size:
        raise BadInputError(f"x has {first.size} values and y has {second.size}; a correlation needs pairs.")
    return first, second


def _missing(first: Vector, second: Vector) -> Undefined | None:
    if first.size < 4:
        return Undefined(f"n = {first.size}; a correlation with an interval needs at least 4 pairs")
    for name, column in (("x", first), ("y", second)):
        if np.ptp(column) <= _CONSTANT * np.abs(column).max():
            return Undefined(f"every {name} is {column[0]:.6g}: a constant correlates with nothing")
    return None


def _clipped(r: float) -> float:
    return min(max(r, -1.0), 1.0)


def _z_interval(r: float, n: int, inflation: float, level: float, method: str) -> MaybeInterval:
    if not -1 <= r <= 1:
        raise BadInputError(f"r is {r}; a correlation lies between -1 and 1.")
    level = check_level(level)
    if n < 4:
        return Undefined(f"n = {n}; a correlation with an interval needs at least 4 pairs")
    if 1 - abs(r) < _CONSTANT:
        return Undefined("the correlation is perfect: Fisher's z has no value")
    half = float(scipy_stats.norm.isf((1 - level) / 2)) * math.sqrt(inflation / (n - 3))
    centre = math.atanh(r)
    return Interval(math.tanh(centre - half), math.tanh(centre + half), level, method)
