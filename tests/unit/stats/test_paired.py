"""McNemar, Tango, paired t and signed ranks against published examples and slow definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.stats import Interval, Undefined, mcnemar, paired_proportions, paired_values, tango_interval

bits = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
scores = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("won", "lost", "p_exact", "p_mid"),
    [
        # Bentur et al. (2009) and Cavo et al. (2012) as tested by Fagerland, Lydersen, Laake, BMC Med Res Methodol 13:91 (2013).
        (1, 7, 0.070, 0.039),
        (6, 16, 0.052, 0.035),
    ],
)
def test_mcnemar_of_fagerland_2013(won: int, lost: int, p_exact: float, p_mid: float) -> None:
    result = mcnemar(won, lost)
    assert result.p_exact == pytest.approx(p_exact, abs=5e-4)
    assert result.p_mid == pytest.approx(p_mid, abs=5e-4)


def test_mcnemar_of_armitage_and_berry() -> None:
    # Armitage and Berry (1994) p. 127, two media for sputum cultures; exact p after Liddell (1983): 0.0129.
    assert mcnemar(12, 2).p_exact == pytest.approx(0.0129, abs=5e-5)


@pytest.mark.parametrize(("won", "lost"), [(0, 1), (1, 1), (3, 0), (4, 4), (2, 9), (15, 6), (30, 31)])
def test_mcnemar_equals_enumeration(won: int, lost: int) -> None:
    # Definition: the chance under fair coins of a table at least as uneven; mid-p counts the equally uneven ones half.
    n, gap = won + lost, abs(won - lost)
    chance = {k: math.comb(n, k) / 2**n for k in range(n + 1)}
    at_least = sum(p for k, p in chance.items() if abs(2 * k - n) >= gap)
    equally = sum(p for k, p in chance.items() if abs(2 * k - n) == gap)
    result = mcnemar(won, lost)
    assert result.p_exact == pytest.approx(at_least)
    assert result.p_mid == pytest.approx(at_least - equally / 2)


def test_mcnemar_without_discordant_pairs_is_one() -> None:
    assert mcnemar(0, 0)[2:] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("won", "lost", "n", "level", "lower", "upper", "digits"),
    [
        # Fagerland, Lydersen, Laake, Statistical Analysis of Contingency Tables (2017) chapter 8: Cavo (2012), Bentur (2009).
        (6, 16, 161, 0.95, -0.1240, -0.0054, 4),
        (1, 7, 21, 0.95, -0.517, -0.026, 3),
        # R package PropCIs, scoreci.mp(25, 28, 618, 0.90), whose estimand is (28 - 25) / 618.
        (28, 25, 618, 0.90, -0.0148, 0.0247, 4),
    ],
)
def test_tango_interval_published(won: int, lost: int, n: int, level: float, lower: float, upper: float, digits: int) -> None:
    interval = tango_interval(won, lost, n, level=level)
    assert (round(interval.lower, digits), round(interval.upper, digits)) == (lower, upper)


def test_tango_interval_without_discordant_pairs() -> None:
    # With b = c = 0 the score equation has the solution z^2 / (n + z^2).
    z2 = 1.959963984540054**2
    interval = tango_interval(0, 0, 300)
    assert interval.upper == pytest.approx(z2 / (300 + z2))
    assert interval.lower == pytest.approx(-interval.upper)


@pytest.mark.parametrize(("won", "lost", "n"), [(3, 8, 40), (0, 4, 60), (20, 11, 100), (1, 1, 12)])
def test_tango_bounds_are_where_the_score_test_turns(won: int, lost: int, n: int) -> None:
    # Independent: the restricted likelihood is maximised numerically instead of through Tango's quadratic.
    def z(difference: float) -> float:
        def loss(share: float) -> float:
            cells = (won, share + difference), (lost, share), (n - won - lost, 1 - 2 * share - difference)
            return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

        low, high = max(0.0, -difference), (1 - difference) / 2
        share = float(optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x)
        return (won - lost - n * difference) / math.sqrt(n * (2 * share + difference - difference**2))

    interval = tango_interval(won, lost, n)
    assert z(interval.lower) == pytest.approx(1.959964, abs=1e-3)
    assert z(interval.upper) == pytest.approx(-1.959964, abs=1e-3)


def test_every_small_table_has_an_interval_around_its_estimate() -> None:
    for n in range(1, 11):
        for won in range(n + 1):
            for lost in range(n + 1 - won):
                interval = tango_interval(won, lost, n)
                assert -1 <= interval.lower <= (won - lost) / n <= interval.upper <= 1, (won, lost, n)
                assert interval.lower < interval.upper


def test_paired_proportions_counts_by_hand() -> None:
    result = paired_proportions([1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1])
    assert (result.both_right, result.won, result.lost, result.both_wrong) == (2, 1, 2, 1)
    assert result.arm_accuracy == 0.5
    assert result.reference_accuracy == pytest.approx(4 / 6)
    assert result.difference == pytest.approx(-1 / 6)
    assert result.p_exact == 1.0


@settings(deadline=None)
@given(bits)
def test_swapping_arms_flips_the_difference(pairs: list[tuple[bool, bool]]) -> None:
    arm, reference = zip(*pairs, strict=True)
    one, other = paired_proportions(arm, reference), paired_proportions(reference, arm)
    assert (one.won, one.lost) == (other.lost, other.won)
    assert one.difference == -other.difference
    assert one.interval.lower == pytest.approx(-other.interval.upper, abs=1e-9)
    assert one.interval.upper == pytest.approx(-other.interval.lower, abs=1e-9)
    assert one.p_exact == pytest.approx(other.p_exact)
    assert 0 <= one.p_mid <= one.p_exact <= 1


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 60))
def test_one_more_item_won_never_lowers_the_interval(won: int, lost: int, other: int) -> None:
    n = won + lost + other + 1
    before, after = tango_interval(won, lost, n), tango_interval(won + 1, lost, n)
    assert after.lower >= before.lower - 1e-9
    assert after.upper >= before.upper - 1e-9


def test_paired_t_of_student_1908() -> None:
    # Student (1908), two soporifics on ten patients; R: t.test(extra ~ group, data = sleep, paired) gives p = 0.002833,
    # mean difference -1.58, 95 % interval -2.4598858 to -0.7001142.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_values(first, second, higher_is_better=True)
    assert result.p_t == pytest.approx(0.002833, abs=5e-7)
    assert result.mean_difference == pytest.approx(-1.58)
    assert isinstance(result.interval, Interval)
    assert result.interval.lower == pytest.approx(-2.4598858, abs=5e-7)
    assert result.interval.upper == pytest.approx(-0.7001142, abs=5e-7)
    # t = dz sqrt(n), and R's t is -4.0621.
    assert result.cohen_dz == pytest.approx(-4.0621 / math.sqrt(10), abs=2e-5)
    assert (result.improved, result.worsened, result.tied) == (0, 9, 1)


def test_signed_ranks_of_hollander_and_wolfe() -> None:
    # Hollander and Wolfe (1973) p. 29, Hamilton depression scale; R: wilcox.test(x, y, paired = TRUE): V = 40, and one-sided
    # p = 0.01953125 = 10 / 512, so twice that two-sided.
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    result = paired_values(before, after, higher_is_better=False)
    assert result.p_wilcoxon == pytest.approx(2 * 0.01953125)
    assert result.wilcoxon_method == "exact"
    assert result.rank_biserial == pytest.approx((40 - 5) / 45)
    assert (result.improved, result.worsened) == (2, 7)


@pytest.mark.parametrize("values", [[1, 1, -1, 2], [3, -3, 3, 3, 0, 5], [1, 2, 2, -2, 4, -1, 1, 6, 6, -3], [-1]])
def test_signed_ranks_with_ties_equal_enumeration(values: list[int]) -> None:
    # Definition: of all 2^n signs, the share whose positive rank sum is at least as extreme, one tail doubled.
    moved = [value for value in values if value]
    ranks = scipy_stats.rankdata(np.abs(moved))
    observed = sum(rank for rank, value in zip(ranks, moved, strict=True) if value > 0)
    sums = [sum(rank for rank, plus in zip(ranks, signs, strict=True) if plus) for signs in itertools.product((0, 1), repeat=len(moved))]
    tails = [np.mean([total <= observed for total in sums]), np.mean([total >= observed for total in sums])]
    result = paired_values(values, [0] * len(values), higher_is_better=True)
    assert result.p_wilcoxon == pytest.approx(min(1.0, 2 * min(tails)))


def test_large_samples_take_the_normal_law_near_the_exact_one(rng: np.random.Generator) -> None:
    x = rng.normal(0.15, 1, 80)
    result = paired_values(x, np.zeros(80), higher_is_better=True)
    assert result.wilcoxon_method == "normal approximation"
    assert result.p_wilcoxon == pytest.approx(float(scipy_stats.wilcoxon(x, method="exact").pvalue), abs=0.003)


@settings(deadline=None)
@given(scores)
def test_swapping_arms_flips_every_sign(pairs: list[tuple[int, int]]) -> None:
    arm, reference = zip(*pairs, strict=True)
    one = paired_values(arm, reference, higher_is_better=False)
    other = paired_values(reference, arm, higher_is_better=False)
    assert one.mean_difference == pytest.approx(-other.mean_difference)
    assert (one.improved, one.worsened, one.tied) == (other.worsened, other.improved, other.tied)
    assert one.p_wilcoxon == pytest.approx(other.p_wilcoxon)
    for here, there in ((one.cohen_dz, other.cohen_dz), (one.rank_biserial, other.rank_biserial)):
        assert isinstance(here, Undefined) == isinstance(there, Undefined)
        if not isinstance(here, Undefined) and not isinstance(there, Undefined):
            assert here == pytest.approx(-there)
    if not isinstance(one.rank_biserial, Undefined):
        assert -1 <= one.rank_biserial <= 1


def test_direction_changes_only_who_improved() -> None:
    up = paired_values([1, 2, 3, 9], [2, 2, 5, 1], higher_is_better=True)
    down = paired_values([1, 2, 3, 9], [2, 2, 5, 1], higher_is_better=False)
    assert (up.improved, up.worsened, up.tied) == (1, 2, 1)
    assert (down.improved, down.worsened, down.tied) == (2, 1, 1)
    assert up.mean_difference == down.mean_difference


def test_groups_make_clusters_the_unit() -> None:
    arm, reference = [1.0, 3.0, 5.0, 0.0, 2.0], [0.0, 0.0, 4.0, 1.0, 0.0]
    clustered = paired_values(arm, reference, higher_is_better=True, groups=["a", "a", "b", "b", "c"])
    # Cluster means of the differences 1, 3 | 1, -1 | 2.
    plain = paired_values([2.0, 0.0, 2.0], [0.0, 0.0, 0.0], higher_is_better=True)
    assert clustered[:1] + clustered[2:] == plain[:1] + plain[2:]
    assert clustered.unit == "clusters"


def test_equal_arms_and_single_items_are_said() -> None:
    same = paired_values([1.0, 2.0], [1.0, 2.0], higher_is_better=True)
    assert isinstance(same.p_t, Undefined)
    assert "no variance" in same.p_t.reason
    assert same.p_wilcoxon == 1.0
    assert isinstance(same.rank_biserial, Undefined)
    one = paired_values([1.0], [0.0], higher_is_better=True)
    assert one.p_t == Undefined("n = 1 items: a t interval needs at least 2")
    constant = paired_values([1.1, 2.1, 3.1], [1.0, 2.0, 3.0], higher_is_better=True)
    assert isinstance(constant.cohen_dz, Undefined)
    assert constant.mean_difference == pytest.approx(0.1)


def test_tie_tolerance_counts_rounding_as_a_tie() -> None:
    result = paired_values([1.0, 2.0, 3.0], [1.0005, 2.0, 2.0], higher_is_better=True, tie_tolerance=0.001)
    assert (result.improved, result.worsened, result.tied) == (1, 0, 2)


@pytest.mark.parametrize(
    ("arm", "reference", "message"),
    [
        ([], [], "arm is empty"),
        ([1, 0], [1], "arm has 2 items and reference has 1"),
        ([1.0, math.nan], [1, 0], r"arm holds 1 of 2 values that are not finite \(first: item 1 is nan\)"),
        ([1, 0], [math.inf, 0], "reference holds 1 of 2"),
        ([[1, 0]], [[1, 0]], "shape"),
        (["x"], ["y"], "must be a vector of numbers"),
    ],
)
def test_unusable_scores_are_refused(arm: list[object], reference: list[object], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        paired_proportions(arm, reference)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=message):
        paired_values(arm, reference, higher_is_better=True)  # type: ignore[arg-type]


def test_other_refusals() -> None:
    with pytest.raises(BadInputError, match=r"arm holds 0\.5 at item 1, neither 0 nor 1; use paired_values"):
        paired_proportions([1, 0.5], [1, 0])
    with pytest.raises(BadInputError, match="cannot be negative"):
        mcnemar(-1, 2)
    with pytest.raises(BadInputError, match="contradict each other"):
        tango_interval(3, 2, 4)
    with pytest.raises(BadInputError, match="confidence level lies between"):
        tango_interval(1, 1, 4, level=95)
    with pytest.raises(BadInputError, match="tie_tolerance"):
        paired_values([1], [1], higher_is_better=True, tie_tolerance=-1)
    with pytest.raises(BadInputError, match="one cluster label per item"):
        paired_values([1, 2], [1, 1], higher_is_better=True, groups=["a"])
    with pytest.raises(BadInputError, match="cannot be sorted"):
        paired_values([1, 2], [1, 1], higher_is_better=True, groups=np.array(["a", None], dtype=object))
    with pytest.raises(BadInputError, match="label that is not finite"):
        paired_values([1, 2], [1, 1], higher_is_better=True, groups=[1.0, math.nan])
