"""Two arms on the same items: how often they differ, by how much, and whether by chance.

`arm` is the answer under test, `reference` what it is held against; every difference is arm minus reference, in the unit of the
score. Items are taken as independent: scores that share a conversation, an article or a subject go to `paired_values` with `groups`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as scipy_stats
from scipy.optimize import brentq

from kvbench.errors import BadInputError
from kvbench.stats.inputs import Vector, check_level, group_codes, paired_vectors, zero_one_vectors
from kvbench.stats.status import Interval, MaybeInterval, Undefined, Value

# Up to this n the null law of the signed-rank sum is computed exactly; above it the normal law is as good.
_EXACT_WILCOXON_N = 50
# Differences that vary less than rounding does are one constant: their variance is noise.
_CONSTANT = 1e-10
_LARGE_SCORE = 1e6


class McNemar(NamedTuple):
    """Result of `mcnemar`."""

    won: int
    """Items right in the arm and wrong in the reference."""
    lost: int
    """Items wrong in the arm and right in the reference."""
    p_exact: float
    """Two-sided exact conditional (binomial) p; 1 without discordant pairs."""
    p_mid: float
    """Two-sided mid-p: less conservative, and not strictly guaranteed to hold the level; 1 without discordant pairs."""


class PairedProportions(NamedTuple):
    """Result of `paired_proportions`."""

    n: int
    """Items."""
    both_right: int
    """Items that both arms got right."""
    won: int
    """Items right in the arm and wrong in the reference."""
    lost: int
    """Items wrong in the arm and right in the reference."""
    both_wrong: int
    """Items that both arms got wrong."""
    arm_accuracy: float
    """Share of items right in the arm."""
    reference_accuracy: float
    """Share of items right in the reference."""
    difference: float
    """arm_accuracy - reference_accuracy."""
    interval: Interval
    """Of the difference, `tango_interval`."""
    p_exact: float
    """As in `McNemar`."""
    p_mid: float
    """As in `McNemar`."""


class PairedValues(NamedTuple):
    """Result of `paired_values`."""

    n: int
    """Units compared: items, or clusters where `groups` was given."""
    unit: str
    """'items' or 'clusters'."""
    higher_is_better: bool
    """Direction of the score, as given."""
    mean_difference: float
    """Mean of arm - reference, in the unit of the score; with higher_is_better False a negative one is a gain."""
    interval: MaybeInterval
    """Of the mean difference, by Student's t."""
    p_t: Value
    """Two-sided paired t-test."""
    p_wilcoxon: float
    """Two-sided Wilcoxon signed-rank test, ties with the reference left out; 1 if nothing is left."""
    wilcoxon_method: str
    """'exact' or 'normal approximation'."""
    cohen_dz: Value
    """mean_difference / standard deviation of the differences; sign as mean_difference."""
    rank_biserial: Value
    """(W+ - W-) / (W+ + W-) of the signed ranks, in [-1, 1]; sign as mean_difference."""
    improved: int
    """Units better in the arm."""
    worsened: int
    """Units worse in the arm."""
    tied: int
    """Units with the same score within the tie tolerance."""


def mcnemar(won: int, lost: int) -> McNemar:
    """McNemar's test of two arms on the same right-or-wrong items.

    Args:
        won: items right in the arm and wrong in the reference.
        lost: items wrong in the arm and right in the reference.

    Raises:
        BadInputError: if a count is negative.

    Source:
        Fagerland, Lydersen, Laake, BMC Med Res Methodol 13:91 (2013): exact conditional test; mid-p = exact p minus the point
        probability of the observed table, and 1 minus half of it when the counts are equal.
    """
    if won < 0 or lost < 0:
        raise BadInputError(f"won is {won} and lost is {lost}; counts of discordant items cannot be negative.")
    won, lost = int(won), int(lost)
    discordant = won + lost
    if discordant == 0:
        return McNemar(won, lost, 1.0, 1.0)
    p_exact = float(scipy_stats.binomtest(won, discordant, 0.5).pvalue)
    point = float(scipy_stats.binom.pmf(won, discordant, 0.5))
    p_mid = 1.0 - point / 2 if won == lost else p_exact - point
    return McNemar(won, lost, min(p_exact, 1.0), max(p_mid, 0.0))


def tango_interval(won: int, lost: int, n: int, *, level: float = 0.95) -> Interval:
    """Interval of the paired difference of two proportions, (won - lost) / n.

    All differences that McNemar's score test, extended to a difference other than zero, does not reject: it agrees with that
    test, and has a width even without discordant pairs, where a bootstrap has none.

    Args:
        won: items right in the arm only.
        lost: items right in the reference only.
        n: items in all.
        level: nominal coverage.

    Raises:
        BadInputError: if the counts contradict each other, or the level is no level.

    Source:
        Tango, Statistics in Medicine 17:891-908 (1998).
    """
    if won < 0 or lost < 0 or n < 1 or won + lost > n:
        raise BadInputError(f"won {won}, lost {lost} and n {n} contradict each other; won + lost is at most n.")
    level = check_level(level)
    z = float(scipy_stats.norm.isf((1 - level) / 2))
    observed = (won - lost) / n

    def beyond(difference: float, bound: float) -> float:
        return _tango_score(difference, won, lost, n) - bound

    lower = -1.0 if lost == n else float(brentq(beyond, -1.0, observed, args=(z,), xtol=1e-12))
    upper = 1.0 if won == n else float(brentq(beyond, observed, 1.0, args=(-z,), xtol=1e-12))
    return Interval(lower, upper, level, "Tango score (1998)")


def _tango_score(difference: float, won: int, lost: int, n: int) -> float:
    """Score statistic of a true difference: standardised with the likeliest share of lost items given that difference."""
    linear = (2 * n - won + lost) * difference - won - lost
    product = lost * difference * (1 - difference)
    share_lost = (math.sqrt(max(linear**2 + 8 * n * product, 0.0)) - linear) / (4 * n)
    variance = n * (2 * share_lost + difference * (1 - difference))
    excess = won - lost - n * difference
    if abs(excess) < 1e-9:
        return 0.0
    # At the ends of the range the variance vanishes; a large finite score keeps the root finder on its feet.
    return math.copysign(_LARGE_SCORE, excess) if variance <= 0 else max(min(excess / math.sqrt(variance), _LARGE_SCORE), -_LARGE_SCORE)


def paired_proportions(arm: ArrayLike, reference: ArrayLike, *, level: float = 0.95) -> PairedProportions:
    """Compare two arms on right-or-wrong items.

    Args:
        arm: `[n]` of 0 and 1 (or booleans).
        reference: `[n]`, the same items in the same order.
        level: nominal coverage of the interval.

    Raises:
        BadInputError: on empty, unequal, non-finite or other than 0/1 scores.

    Source:
        `mcnemar` and `tango_interval`.
    """
    first, second = zero_one_vectors(arm, reference)
    n = int(first.size)
    both, won, lost = int(np.sum(first & second)), int(np.sum(first & ~second)), int(np.sum(~first & second))
    neither = n - both - won - lost
    test = mcnemar(won, lost)
    return PairedProportions(
        n=n,
        both_right=both,
        won=won,
        lost=lost,
        both_wrong=neither,
        arm_accuracy=(both + won) / n,
        reference_accuracy=(both + lost) / n,
        difference=(won - lost) / n,
        interval=tango_interval(won, lost, n, level=level),
        p_exact=test.p_exact,
        p_mid=test.p_mid,
    )


def paired_values(
    arm: ArrayLike,
    reference: ArrayLike,
    *,
    higher_is_better: bool,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    tie_tolerance: float = 0.0,
) -> PairedValues:
    """Compare two arms on graded scores: negative log-likelihood per document, F1 per turn.

    Args:
        arm: `[n]` scores.
        reference: `[n]`, the same items in the same order.
        higher_is_better: the direction of the score (False for a negative log-likelihood).
        groups: `[n]` cluster labels; then each cluster's mean difference is one unit, clusters weighing alike.
        level: nominal coverage of the interval.
        tie_tolerance: an absolute difference up to this one counts as a tie and leaves the signed-rank test.

    Raises:
        BadInputError: on empty, unequal or non-finite scores, or a negative tolerance.

    Source:
        Student's paired t; Wilcoxon's signed ranks; dz: Cohen (1988) section 2.3.5; rank-biserial: Kerby, Comprehensive
        Psychology 3:1 (2014).
    """
    first, second = paired_vectors(arm, reference)
    level = check_level(level)
    if not 0 <= tie_tolerance < np.inf:
        raise BadInputError(f"tie_tolerance is {tie_tolerance}; it must be 0 or a positive number in the unit of the score.")
    differences = first - second
    scale = float(max(np.abs(first).max(), np.abs(second).max()))
    unit = "items"
    if groups is not None:
        codes = group_codes(groups, differences.size)
        differences = np.bincount(codes, weights=differences) / np.bincount(codes)
        unit = "clusters"

    mean = float(differences.mean())
    interval, p_t, dz = _student(differences, scale, unit, level)
    moved = differences[np.abs(differences) > tie_tolerance]
    p_wilcoxon, wilcoxon_method, biserial = _signed_ranks(moved)
    up, down = int(np.sum(moved > 0)), int(np.sum(moved < 0))
    return PairedValues(
        n=int(differences.size),
        unit=unit,
        higher_is_better=higher_is_better,
        mean_difference=mean,
        interval=interval,
        p_t=p_t,
        p_wilcoxon=p_wilcoxon,
        wilcoxon_method=wilcoxon_method,
        cohen_dz=dz,
        rank_biserial=biserial,
        improved=up if higher_is_better else down,
        worsened=down if higher_is_better else up,
        tied=int(differences.size - moved.size),
    )


def _student(differences: Vector, scale: float, unit: str, level: float) -> tuple[MaybeInterval, Value, Value]:
    if differences.size < 2:
        gone = Undefined(f"n = {differences.size} {unit}: a t interval needs at least 2")
        return gone, gone, gone
    if np.ptp(differences) <= _CONSTANT * scale:
        gone = Undefined(f"all {differences.size} differences are equal ({differences[0]:.6g}): they have no variance to test against")
        return gone, gone, gone
    test = scipy_stats.ttest_1samp(differences, 0.0)
    bounds = test.confidence_interval(confidence_level=level)
    dz = float(differences.mean() / differences.std(ddof=1))
    return Interval(float(bounds.low), float(bounds.high), level, "paired t"), float(test.pvalue), dz


def _signed_ranks(moved: Vector) -> tuple[float, str, Value]:
    """P, method and rank-biserial correlation of the non-zero differences."""
    if moved.size == 0:
        return 1.0, "exact", Undefined("every score equals its reference: there are no ranks to compare")
    ranks = scipy_stats.rankdata(np.abs(moved))
    total, up = float(np.sum(ranks)), float(np.sum(ranks[moved > 0]))
    biserial = (2 * up - total) / total
    if moved.size <= _EXACT_WILCOXON_N:
        return _exact_signed_rank_p(ranks, up), "exact", biserial
    p = float(scipy_stats.wilcoxon(moved, correction=True).pvalue)
    return min(p, 1.0), "normal approximation", biserial


def _exact_signed_rank_p(ranks: Vector, up: float) -> float:
    """Two-sided p given the ranks, each sign as likely as the other; tied ranks included, which scipy's exact law leaves out."""
    # Mid-ranks are multiples of one half: doubled, they index an array.
    doubled = np.rint(2 * ranks).astype(np.int64)
    chance = np.zeros(int(doubled.sum()) + 1)
    chance[0] = 1.0
    for rank in doubled:
        chance[rank:] = (chance[rank:] + chance[:-rank]) / 2
        chance[:rank] /= 2
    observed = round(2 * up)
    tail = min(float(chance[: observed + 1].sum()), float(chance[observed:].sum()))
    return min(2 * tail, 1.0)


def bounded_difference_interval(arm: ArrayLike, reference: ArrayLike, *, groups: ArrayLike | None = None, level: float = 0.95) -> MaybeInterval:
    """Conservative interval of the mean difference of scores between 0 and 1, for arms that hardly differ.

    A bootstrap of data without differences knows none. Here the shares of losing and of winning units (items, or clusters) are bounded by
    Clopper and Pearson, and every such unit is taken to lose or win all there is: the truth lies between minus the first bound and the second.

    Args:
        arm: `[n]` scores in [0, 1].
        reference: `[n]`, the same items in the same order.
        groups: `[n]` cluster labels; a cluster whose mean differs counts as one unit.
        level: nominal coverage, each side taking half of what is left.

    Returns:
        The interval, or Undefined for scores outside [0, 1].

    Raises:
        BadInputError: on empty, unequal or non-finite scores.

    Source:
        Clopper and Pearson, Biometrika 26:404-413 (1934).
    """
    from statsmodels.stats.proportion import proportion_confint

    first, second = paired_vectors(arm, reference)
    check_level(level)
    if min(first.min(), second.min()) < 0 or max(first.max(), second.max()) > 1:
        return Undefined("scores outside 0 to 1 have no largest difference to fall back on")
    change = first - second
    if groups is not None:
        codes = group_codes(groups, first.size)
        change = np.bincount(codes, weights=change) / np.bincount(codes)
    units = int(change.size)
    lost, won = (float(proportion_confint(int(np.sum(side)), units, alpha=1 - level, method="beta")[1]) for side in (change < 0, change > 0))
    return Interval(-lost, won, level, f"Clopper-Pearson of the {'clusters' if groups is not None else 'items'} that differ, each by all there is")
