"""The bootstrap against a published example, scipy, and loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.stats import Interval, Undefined, average_draws, difference_of_means, evaluate, interval_of, paired_bootstrap, refusal, resample
from kvbench.stats import intervals as module
from kvbench.stats.intervals import Floats, Method

# Efron and Tibshirani, An Introduction to the Bootstrap (1993), table 14.1, spatial test, A.
SPATIAL_A = [48, 36, 20, 29, 42, 42, 20, 42, 22, 41, 45, 14, 6, 0, 33, 28, 34, 4, 32, 24, 47, 41, 24, 26, 30, 41]


def variance(means: Floats) -> Floats:
    return np.asarray(means[..., 1] - means[..., 0] ** 2)


def test_bca_of_efron_and_tibshirani(rng: np.random.Generator) -> None:
    # Same book, section 14.3: variance 171.5, acceleration 0.061, z0 0.146, 90 % BCa interval 115.8 to 259.6 and percentile
    # interval 100.8 to 233.9 from 2,000 resamples: compared within the chance of their tails.
    x = np.array(SPATIAL_A, dtype=float)
    draws = evaluate(resample([x, x**2], rng=rng, resamples=40_000), variance)
    assert draws.observed == pytest.approx(171.5, abs=0.05)
    assert module._acceleration(draws.influence) == pytest.approx(0.061, abs=5e-4)
    assert module._bias(np.sort(draws.replicates), draws.observed) == pytest.approx(0.146, abs=0.04)
    bca = interval_of(draws, level=0.90, expanded=False)
    assert isinstance(bca, Interval)
    assert bca.lower == pytest.approx(115.8, abs=4)
    assert bca.upper == pytest.approx(259.6, abs=8)
    percentile = interval_of(draws, level=0.90, method="percentile", expanded=False)
    assert isinstance(percentile, Interval)
    assert percentile.lower == pytest.approx(100.8, abs=4)
    assert percentile.upper == pytest.approx(233.9, abs=4)


@pytest.mark.parametrize("method", ["bca", "percentile"])
def test_agrees_with_scipy(rng: np.random.Generator, method: str) -> None:
    x, y = rng.gamma(2, 1, 60), rng.gamma(2, 1, 60)
    draws = evaluate(resample([x, y], rng=rng, resamples=40_000), lambda means: means[..., 0] / means[..., 1])
    ours = interval_of(draws, method=method, expanded=False)  # type: ignore[arg-type]
    theirs = scipy_stats.bootstrap(
        (x, y),
        lambda a, b, axis: a.mean(axis=axis) / b.mean(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=40_000,
        method=method,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert isinstance(ours, Interval)
    width = theirs.high - theirs.low
    assert ours.lower == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.upper == pytest.approx(theirs.high, abs=0.03 * width)


def test_replicates_equal_a_loop_over_the_same_picks() -> None:
    x, y = np.random.default_rng(3).normal(size=(2, 40))
    got = resample([x, y], rng=np.random.default_rng(5), resamples=1000)
    picks = np.random.default_rng(5).integers(0, 40, size=(1000, 40))
    expected = [[sum(x[i] for i in pick) / 40, sum(y[i] for i in pick) / 40] for pick in picks]
    np.testing.assert_allclose(got.resampled, expected, rtol=1e-12)
    np.testing.assert_allclose(got.left_out[7], [np.delete(x, 7).mean(), np.delete(y, 7).mean()])


def test_clusters_are_drawn_whole() -> None:
    # Cluster sums over cluster sizes, by a loop over the same picks.
    x = np.random.default_rng(3).normal(size=35)
    labels = np.array([f"c{i % 12}" for i in range(35)])
    got = resample([x], rng=np.random.default_rng(5), groups=labels, resamples=1000)
    picks = np.random.default_rng(5).integers(0, 12, size=(1000, 12))
    names = sorted(set(labels))
    expected = [np.concatenate([x[labels == names[i]] for i in pick]).mean() for pick in picks]
    np.testing.assert_allclose(got.resampled[:, 0], expected, rtol=1e-9)
    np.testing.assert_allclose(got.left_out[3, 0], x[labels != names[3]].mean())
    assert (got.unit, got.n) == ("clusters", 35)


def test_sizes_weigh_the_mean() -> None:
    totals, tokens = np.array([10.0, 30.0] * 20), np.array([5.0, 10.0] * 20)
    got = resample([totals], rng=np.random.default_rng(0), sizes=tokens, resamples=1000)
    assert got.observed[0] == pytest.approx(40 / 15)
    # Every resample is (10 i + 30 j) / (5 i + 10 j) with i + j = 40.
    allowed = {round((10 * i + 30 * (40 - i)) / (5 * i + 10 * (40 - i)), 9) for i in range(41)}
    assert {round(float(value), 9) for value in got.resampled[:, 0]} <= allowed


def test_counting_kinds_draws_the_same_law(rng: np.random.Generator) -> None:
    # Right-or-wrong items go through multinomial counts; a hair of noise sends the same items through picked indices.
    arm, reference = np.repeat([1.0, 1.0, 0.0, 0.0], [40, 10, 20, 30]), np.repeat([1.0, 0.0, 1.0, 0.0], [40, 10, 20, 30])
    noise = rng.normal(0, 1e-9, 100)
    counted = resample([arm, reference], rng=rng, resamples=20_000).resampled
    picked = resample([arm + noise, reference], rng=rng, resamples=20_000).resampled
    differences = [np.round(drawn[:, 0] - drawn[:, 1], 6) for drawn in (counted, picked)]
    assert scipy_stats.ks_2samp(*differences).pvalue > 0.01
    np.testing.assert_allclose(np.cov(counted.T), np.cov(picked.T), rtol=0.05)


def test_same_seed_same_interval_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.random.default_rng(3).normal(size=(2, 50))
    results = []
    for cells in (2_000_000, 1_777, 1):
        monkeypatch.setattr(module, "_CHUNK_CELLS", cells)
        results.append(paired_bootstrap([x, y], difference_of_means, rng=np.random.default_rng(9), resamples=1000))
    assert results[0] == results[1] == results[2]
    assert results[0] != paired_bootstrap([x, y], difference_of_means, rng=np.random.default_rng(10), resamples=1000)


def test_memory_stays_small(rng: np.random.Generator) -> None:
    # 2,000 resamples of 10,000 items are 160 MB of indices if drawn at once.
    x, y = rng.normal(size=(2, 10_000))
    tracemalloc.start()
    resample([x, y], rng=rng, resamples=2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6


@pytest.mark.parametrize("method", ["bca", "percentile"])
def test_pairing_cancels_what_the_arms_share(rng: np.random.Generator, method: str) -> None:
    shared = rng.normal(0, 10, 200)
    x, y = shared + rng.normal(0, 0.1, 200), shared + rng.normal(0, 0.1, 200)
    paired = paired_bootstrap([x, y], difference_of_means, rng=rng, method=method, resamples=1000)  # type: ignore[arg-type]
    apart = paired_bootstrap([x, rng.permutation(y)], difference_of_means, rng=rng, method=method, resamples=1000)  # type: ignore[arg-type]
    assert isinstance(paired, Interval)
    assert isinstance(apart, Interval)
    assert paired.upper - paired.lower < 0.05 * (apart.upper - apart.lower)
    assert paired.method == f"{'BCa' if method == 'bca' else method} bootstrap, t-expanded, 1000 resamples of items"


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["bca", "percentile"]))
def test_swapping_columns_flips_the_interval(seed: int, method: str) -> None:
    x, y = np.random.default_rng(seed).normal(size=(2, 40))
    one = paired_bootstrap([x, y], difference_of_means, rng=np.random.default_rng(seed), method=method, resamples=1000)  # type: ignore[arg-type]
    other = paired_bootstrap([y, x], difference_of_means, rng=np.random.default_rng(seed), method=method, resamples=1000)  # type: ignore[arg-type]
    assert isinstance(one, Interval)
    assert isinstance(other, Interval)
    # Order statistics mirror each other up to one place.
    width = one.upper - one.lower
    assert one.lower == pytest.approx(-other.upper, abs=0.1 * width)
    assert one.upper == pytest.approx(-other.lower, abs=0.1 * width)


def test_higher_level_is_wider(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 100))
    draws = evaluate(resample([x, y], rng=rng), difference_of_means)
    bounds = [found for level in (0.8, 0.9, 0.95, 0.99) if isinstance(found := interval_of(draws, level=level), Interval)]
    assert len(bounds) == 4
    assert [bound.lower for bound in bounds] == sorted((bound.lower for bound in bounds), reverse=True)
    assert [bound.upper for bound in bounds] == sorted(bound.upper for bound in bounds)


def test_average_of_tasks_has_the_summed_variance(rng: np.random.Generator) -> None:
    draws = [evaluate(resample([rng.normal(size=n), rng.normal(size=n)], rng=rng, resamples=20_000), difference_of_means) for n in (40, 90, 400)]
    mean = average_draws(draws)
    assert mean.observed == pytest.approx(sum(draw.observed for draw in draws) / 3)
    # Independent samples: Var(mean of 3) = sum of variances / 9.
    assert float(np.var(mean.replicates)) == pytest.approx(sum(float(np.var(draw.replicates)) for draw in draws) / 9, rel=0.03)
    assert mean.unit == "items within each task"
    # One task is its own average: the acceleration of several samples reduces to that of one.
    assert interval_of(average_draws(draws[:1]))[:2] == interval_of(draws[0])[:2]


def test_acceleration_of_an_average_is_its_skewness_over_six(rng: np.random.Generator) -> None:
    # For means: skewness of the sum of independent means, from central moments; (n - 1) / n of the jackknife cancels.
    samples = [rng.exponential(1, 40), rng.exponential(3, 400)]
    draws = [evaluate(resample([x], rng=rng, resamples=1000), lambda means: means[..., 0]) for x in samples]
    third = sum(float(np.mean((x - x.mean()) ** 3)) / x.size**2 for x in samples)
    second = sum(float(np.var(x)) / x.size for x in samples)
    assert module._acceleration(average_draws(draws).influence) == pytest.approx(third / (6 * second**1.5), rel=1e-9)


def test_replicates_on_the_observed_value_count_half() -> None:
    # One below, one above, three on it but for rounding: no median bias. Two below, three on it: Phi^-1(0.7) = 0.5244.
    assert module._bias(np.array([-1.0, 0.3, 0.1 + 0.2, 0.3, 1.0]), 0.3) == pytest.approx(0)
    assert module._bias(np.array([-1.0, 0.0, 0.3, 0.3, 0.3]), 0.3) == pytest.approx(0.5244, abs=5e-5)


def test_refusals_have_reasons(rng: np.random.Generator) -> None:
    x = rng.normal(size=29)
    assert paired_bootstrap([x, -x], difference_of_means, rng=rng) == Undefined("n = 29 items; a bootstrap interval needs at least 30")
    x = rng.normal(size=90)
    few = paired_bootstrap([x, -x], difference_of_means, rng=rng, groups=np.arange(90) % 9)
    assert few == Undefined("9 clusters; a cluster bootstrap interval needs at least 10")
    flat = paired_bootstrap([x + 0.1, x], difference_of_means, rng=rng)
    assert isinstance(flat, Undefined)
    assert "no variation" in flat.reason
    assert refusal(30, None) is None


def test_a_statistic_that_runs_away_has_no_interval(rng: np.random.Generator) -> None:
    x, y = np.ones(40), np.repeat([1.0, -1.0], [22, 18])

    def ratio(means: Floats) -> Floats:
        out = np.full(means.shape[:-1], np.inf)
        np.divide(means[..., 0], means[..., 1], out=out, where=means[..., 1] > 0)
        return out

    methods: tuple[Method, ...] = ("bca", "percentile")
    for method in methods:
        result = paired_bootstrap([x, y], ratio, rng=rng, method=method)
        assert isinstance(result, Undefined)
        assert "of 10000 resamples" in result.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resamples": 100}, "resamples is 100"),
        ({"level": 1.0}, "level is 1.0"),
        ({"method": "basic"}, "method is 'basic'"),
        ({"sizes": [0.0] * 40}, "positive size"),
        ({"sizes": [1.0] * 3}, "sizes has 3 items"),
        ({"columns": [[1.0] * 40, [1.0] * 39]}, "column 1 has 39 items"),
        ({"columns": [[np.nan] * 40]}, "column 0 holds 40 of 40"),
    ],
)
def test_bad_input(rng: np.random.Generator, change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"columns": [np.arange(40.0), np.arange(40.0) ** 2], **change}
    columns = arguments.pop("columns")
    with pytest.raises(BadInputError, match=message):
        paired_bootstrap(columns, difference_of_means, rng=rng, **arguments)  # type: ignore[arg-type]
