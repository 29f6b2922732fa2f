"""What the intervals and tests promise, held against simulated truth: coverage, false positives, power."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.stats import (
    Disposition,
    Interval,
    RequiredN,
    TaskScores,
    Undefined,
    average_retention,
    benjamini_hochberg,
    decide,
    holm,
    mcnemar,
    paired_proportions,
    paired_retention,
    paired_values,
    pearson,
    perplexity_ratio,
    required_n,
    spearman,
    tango_interval,
)

pytestmark = pytest.mark.slow

# 800 simulations see a share of 0.95 with a standard error of 0.008.
SIMULATIONS = 800
LOW, HIGH = 0.92, 0.98


def covers(interval: Interval | Undefined, truth: float) -> bool | None:
    return None if isinstance(interval, Undefined) else interval.lower <= truth <= interval.upper


def share(hits: list[bool | None]) -> float:
    """Share of hits where there is an interval; refusals must be rare."""
    given = [hit for hit in hits if hit is not None]
    assert len(given) >= 0.98 * len(hits)
    return sum(given) / len(given)


@pytest.mark.parametrize("method", ["bca", "percentile"])
@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize(
    ("accuracy", "kept", "gained"),
    [(0.6, 0.9, 0.1), (0.5, 0.7, 0.2), (0.8, 0.98, 0.08)],
    ids=["usual", "many flips", "few flips, score interval at n = 100"],
)
def test_retention_covers(method: str, n: int, accuracy: float, kept: float, gained: float) -> None:
    # Truth: the arm keeps a reference-right item with chance `kept` and gains a wrong one with chance `gained`.
    rng = np.random.default_rng(n)
    arm_accuracy = accuracy * kept + (1 - accuracy) * gained
    plain, floored = arm_accuracy / accuracy, (arm_accuracy - 0.25) / (accuracy - 0.25)
    hits: list[bool | None] = []
    floor_hits: list[bool | None] = []
    for _ in range(SIMULATIONS):
        reference = rng.random(n) < accuracy
        arm = rng.random(n) < np.where(reference, kept, gained)
        result = paired_retention(arm, reference, rng=rng, higher_is_better=True, chance=0.25, method=method, resamples=1000)  # type: ignore[arg-type]
        hits.append(covers(result.interval, plain))
        floor_hits.append(covers(result.floor_normalised_interval, floored))
    assert LOW <= share(hits) <= HIGH
    assert LOW <= share(floor_hits) <= HIGH


@pytest.mark.parametrize("method", ["bca", "percentile"])
@pytest.mark.parametrize("n", [100, 300])
def test_perplexity_ratio_covers(method: str, n: int) -> None:
    # Skewed losses per document: a shifted exponential of mean 0.05 nats.
    rng = np.random.default_rng(n)
    hits = []
    for _ in range(SIMULATIONS // 2):
        reference = rng.gamma(9, 0.3, n)
        arm = reference + rng.exponential(0.15, n) - 0.10
        hits.append(covers(perplexity_ratio(arm, reference, rng=rng, method=method, resamples=1000).interval, math.exp(0.05)))  # type: ignore[arg-type]
    assert LOW <= share(hits) <= HIGH


@pytest.mark.parametrize("clusters", [10, 24, 57])
def test_cluster_bootstrap_covers(clusters: int) -> None:
    # Ten correlated documents a cluster; the fewest clusters accepted, CoQA's conversations, MMLU's subjects.
    rng = np.random.default_rng(clusters)
    groups = np.repeat(np.arange(clusters), 10)
    hits = []
    for _ in range(SIMULATIONS):
        reference = rng.gamma(9, 0.3, groups.size)
        arm = reference + 0.05 + rng.normal(0, 0.1, clusters)[groups] + rng.normal(0, 0.2, groups.size)
        hits.append(covers(perplexity_ratio(arm, reference, rng=rng, groups=groups, resamples=1000).interval, math.exp(0.05)))
    assert LOW <= share(hits) <= HIGH


def test_average_retention_covers() -> None:
    rng = np.random.default_rng(0)
    truth, hits = (0.58 / 0.6 + 0.45 / 0.5 + 0.72 / 0.8) / 3, []
    for _ in range(SIMULATIONS):
        tasks = {}
        for name, n, accuracy, kept, gained in (("a", 100, 0.6, 0.9, 0.1), ("b", 300, 0.5, 0.7, 0.2), ("c", 150, 0.8, 0.85, 0.2)):
            reference = rng.random(n) < accuracy
            tasks[name] = TaskScores(rng.random(n) < np.where(reference, kept, gained), reference)
        hits.append(covers(average_retention(tasks, rng=rng, resamples=1000).interval, truth))
    assert LOW <= share(hits) <= HIGH


@pytest.mark.parametrize(("won", "lost"), [(0.01, 0.01), (0.0, 0.02), (0.02, 0.05), (0.1, 0.1), (0.05, 0.15)])
def test_tango_interval_covers_by_enumeration(won: float, lost: float) -> None:
    # Exact: every table of 100 items, weighed by its multinomial chance. Tango's interval may be conservative with few pairs.
    n, truth, total, covered = 100, won - lost, 0.0, 0.0
    for b in range(41):
        for c in range(41):
            logs = [math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(n - b - c + 1)]
            logs += [
                count * math.log(p) if p else (0.0 if count == 0 else -math.inf) for count, p in ((b, won), (c, lost), (n - b - c, 1 - won - lost))
            ]
            weight = math.exp(sum(logs))
            if weight > 1e-7:
                interval = tango_interval(b, c, n)
                total += weight
                covered += weight * (interval.lower <= truth + 1e-9 and truth - 1e-9 <= interval.upper)
    assert total > 0.998
    assert 0.925 <= covered / total <= 0.999


def test_false_positives_of_the_tests_stay_at_five_percent() -> None:
    # 1,500 null data sets of 60 items: a share of 0.05 has a standard error of 0.0056.
    rng = np.random.default_rng(11)
    found = {"exact": 0, "mid": 0, "t": 0, "wilcoxon": 0, "tango": 0, "pearson": 0, "spearman": 0}
    rounds = 1500
    for _ in range(rounds):
        reference = rng.random(60) < 0.6
        arm = rng.random(60) < np.where(reference, 0.8, 0.3)
        binary = paired_proportions(arm, reference)
        found["exact"] += binary.p_exact <= 0.05
        found["mid"] += binary.p_mid <= 0.05
        found["tango"] += not binary.interval.lower <= 0 <= binary.interval.upper
        graded = paired_values(rng.normal(size=60), rng.normal(size=60), higher_is_better=False)
        assert not isinstance(graded.p_t, Undefined)
        found["t"] += graded.p_t <= 0.05
        found["wilcoxon"] += graded.p_wilcoxon <= 0.05
        x, y = rng.normal(size=(2, 12))
        for name, measure in (("pearson", pearson), ("spearman", spearman)):
            bounds = measure(x, y).interval
            assert isinstance(bounds, Interval)
            found[name] += not bounds.lower <= 0 <= bounds.upper
    rates = {name: count / rounds for name, count in found.items()}
    assert rates["exact"] <= 0.06
    assert rates["mid"] <= 0.065
    for name in ("t", "wilcoxon", "tango", "pearson", "spearman"):
        assert 0.033 <= rates[name] <= 0.067, rates


def test_false_positives_of_the_exact_test_by_enumeration() -> None:
    # For every number of discordant pairs: the chance under fair coins of p at or below the level never exceeds it.
    for discordant in range(1, 80):
        for level in (0.01, 0.05):
            rate = sum(math.comb(discordant, won) / 2**discordant for won in range(discordant + 1) if mcnemar(won, discordant - won).p_exact <= level)
            assert rate <= level + 1e-12


def test_families_hold_their_level() -> None:
    # Eight true nulls and two real effects: Holm keeps the chance of any false finding, BH the expected share of false ones.
    rng = np.random.default_rng(12)
    any_false, false_share, rounds = 0, 0.0, 300
    for _ in range(rounds):
        effects = [0.0] * 8 + [0.6] * 2
        family: dict[str, float | Undefined] = {}
        for index, effect in enumerate(effects):
            family[f"{index}"] = paired_values(rng.normal(effect, 1, 40), np.zeros(40), higher_is_better=True).p_t
        strict = [name for name, p in holm(family).items() if not isinstance(p, Undefined) and p <= 0.05]
        lax = [name for name, p in benjamini_hochberg(family).items() if not isinstance(p, Undefined) and p <= 0.05]
        any_false += any(int(name) < 8 for name in strict)
        false_share += sum(int(name) < 8 for name in lax) / max(len(lax), 1)
    # Standard error of the first at 0.05: 0.0126.
    assert any_false / rounds <= 0.088
    assert false_share / rounds <= 0.06


@pytest.mark.parametrize(("kept", "word", "most"), [(0.95, Disposition.NO_MATERIAL_LOSS, 0.045), (1.0, Disposition.IMPROVED, 0.045)])
def test_false_claims_on_the_margin(kept: float, word: Disposition, most: float) -> None:
    # True retention exactly 1 - margin (or 1): each claim is wrong in about 2.5 % of runs, standard error 0.5 %.
    rng = np.random.default_rng(13)
    accuracy, gained = 0.6, 0.15
    stay = (kept * accuracy - (1 - accuracy) * gained) / accuracy
    wrong = 0
    for _ in range(SIMULATIONS):
        reference = rng.random(300) < accuracy
        arm = rng.random(300) < np.where(reference, stay, gained)
        interval = paired_retention(arm, reference, rng=rng, higher_is_better=True, resamples=1000).interval
        decided = decide(interval, null=1, margin=0.05, n=300).disposition
        wrong += decided is word or (word is Disposition.NO_MATERIAL_LOSS and decided is Disposition.IMPROVED)
    assert wrong / SIMULATIONS <= most


def test_required_n_has_the_power_it_promises() -> None:
    # Truth: retention 1.0 exactly, margin 0.08; at the n computed, 80 % of runs must rule out a loss beyond the margin.
    rng = np.random.default_rng(14)
    accuracy, gained = 0.6, 0.12
    stay = 1 - (1 - accuracy) * gained / accuracy

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        reference = rng.random(n) < accuracy
        return rng.random(n) < np.where(reference, stay, gained), reference

    pilot_arm, pilot_reference = draw(100_000)
    planned = required_n(pilot_arm, pilot_reference, margin=0.08, scale="retention", assumed_change=0.0)
    assert isinstance(planned, RequiredN)
    assert planned.towards == "no material loss"
    shown = 0
    for _ in range(SIMULATIONS):
        interval = paired_retention(*draw(planned.n), rng=rng, higher_is_better=True, resamples=1000).interval
        shown += decide(interval, null=1, margin=0.08, n=planned.n).disposition in (Disposition.NO_MATERIAL_LOSS, Disposition.IMPROVED)
    # Standard error 0.014, and some for the normal approximation.
    assert 0.74 <= shown / SIMULATIONS <= 0.86
