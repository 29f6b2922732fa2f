"""Bootstrap intervals for two arms on the same items.

Both arms are resampled together, item by item or cluster by cluster, so what they share cancels. A statistic is a function of the
column means, which keeps 10,000 resamples of 10,000 items in a few tens of megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.stats.inputs import Vector, check_level, finite_vector, group_codes
from kvbench.stats.status import Interval, MaybeInterval, Undefined

Floats: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[Floats], Floats]
"""Column means `[..., c]` to a figure `[...]`; +-inf where the figure is out of bounds, never NaN."""
Method: TypeAlias = Literal["bca", "percentile"]

MIN_ITEMS = 30
"""Fewest items for which a bootstrap interval is given."""
MIN_CLUSTERS = 10
"""Fewest clusters for which a cluster bootstrap interval is given."""
RESAMPLES = 10_000
"""Resamples unless told otherwise."""
_MIN_RESAMPLES = 1_000
# Drawn indices held at a time: 2 million int64 are 16 MB.
_CHUNK_CELLS = 2_000_000
# Replicates that spread less than rounding does are one constant.
_CONSTANT = 1e-12


class Resampled(NamedTuple):
    """Column means of the data, of each resample, and with each unit left out in turn."""

    observed: Floats
    """`[c]`."""
    resampled: Floats
    """`[resamples, c]`."""
    left_out: Floats
    """`[units, c]`; for the acceleration of BCa."""
    unit: str
    """What was resampled: 'items' or 'clusters'."""
    n: int
    """Items."""


class Draws(NamedTuple):
    """A statistic on the data, on each resample, and how much each unit moves it."""

    observed: float
    """The statistic of the data."""
    replicates: Floats
    """`[resamples]`."""
    influence: Floats
    """`[units]`, jackknife influence divided by the number of units."""
    unit: str
    """What was resampled: 'items' or 'clusters'."""
    degrees: int
    """Units minus the number of samples they come from."""


def refusal(n: int, clusters: int | None, *, min_items: int = MIN_ITEMS, min_clusters: int = MIN_CLUSTERS) -> Undefined | None:
    """Say why a bootstrap interval is refused, or None if it is not.

    Args:
        n: items.
        clusters: clusters they fall in, None without clusters.
        min_items: fewest items accepted.
        min_clusters: fewest clusters accepted.
    """
    if n < min_items:
        return Undefined(f"n = {n} items; a bootstrap interval needs at least {min_items}")
    if clusters is not None and clusters < min_clusters:
        return Undefined(f"{clusters} clusters; a cluster bootstrap interval needs at least {min_clusters}")
    return None


def resample(
    columns: Sequence[ArrayLike],
    *,
    rng: np.random.Generator,
    groups: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    resamples: int = RESAMPLES,
) -> Resampled:
    """Draw items (or whole clusters) with replacement, the same ones for every column.

    Args:
        columns: c vectors `[n]`, one per arm; per-item scores, or per-item totals where `sizes` is given.
        rng: the source of chance; the same state gives the same draws.
        groups: `[n]` cluster labels; None resamples items.
        sizes: `[n]` positive sizes behind the totals (tokens); a mean is then sum of totals / sum of sizes.
        resamples: how many, at least 1,000.

    Raises:
        BadInputError: on unequal, empty or non-finite columns, sizes that are not positive, or too few resamples.
    """
    if resamples < _MIN_RESAMPLES:
        raise BadInputError(f"resamples is {resamples}; the tails of an interval need at least {_MIN_RESAMPLES}.")
    vectors = [finite_vector(f"column {index}", column) for index, column in enumerate(columns)]
    n = vectors[0].size
    weights = np.ones(n) if sizes is None else finite_vector("sizes", sizes)
    for name, vector in [*((f"column {index}", vector) for index, vector in enumerate(vectors)), ("sizes", weights)]:
        if vector.size != n:
            raise BadInputError(f"{name} has {vector.size} items where column 0 has {n}; every column needs the same items.")
    if np.any(weights <= 0):
        raise BadInputError(f"sizes holds {weights.min():g}; every item needs a positive size.")

    rows = np.column_stack([*vectors, weights])
    unit = "items"
    if groups is not None:
        codes = group_codes(groups, n)
        rows = np.column_stack([np.bincount(codes, weights=column) for column in rows.T])
        unit = "clusters"
    totals = rows.sum(axis=0)
    drawn = _draw_totals(rows, rng, resamples)
    # With a single unit nothing is left to leave out; intervals are refused long before.
    rest = totals - rows if len(rows) > 1 else rows
    return Resampled(totals[:-1] / totals[-1], drawn[:, :-1] / drawn[:, -1:], rest[:, :-1] / rest[:, -1:], unit, n)


def _draw_totals(rows: Floats, rng: np.random.Generator, resamples: int) -> Floats:
    """Column totals of each resample, `[resamples, c + 1]`."""
    units = len(rows)
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    if 4 * len(kinds) <= units:
        # Right-or-wrong items come in four kinds: counting kinds is the same draw at a fraction of the work.
        drawn: Floats = rng.multinomial(units, counts / units, size=resamples).astype(np.float64) @ kinds
        return drawn
    totals = np.empty((resamples, rows.shape[1]))
    step = max(1, _CHUNK_CELLS // units)
    constant = np.all(rows == rows[0], axis=0)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        picks = rng.integers(0, units, size=(stop - start, units))
        for column in range(rows.shape[1]):
            totals[start:stop, column] = rows[0, column] * units if constant[column] else rows[:, column][picks].sum(axis=1)
    return totals


def evaluate(sample: Resampled, statistic: Statistic) -> Draws:
    """Apply a statistic to resampled means.

    Args:
        sample: from `resample`.
        statistic: see `Statistic`.
    """
    observed = float(statistic(sample.observed[np.newaxis])[0])
    left_out = statistic(sample.left_out)
    units = len(left_out)
    centre = left_out.mean() if np.all(np.isfinite(left_out)) else np.inf
    influence = (units - 1) * (centre - left_out) / units if np.isfinite(centre) else np.full(units, np.inf)
    return Draws(observed, statistic(sample.resampled), influence, sample.unit, units - 1)


def average_draws(draws: Sequence[Draws]) -> Draws:
    """The average of statistics of independent samples (tasks), each resampled within itself.

    Args:
        draws: one per task, equally many resamples each.

    Source:
        Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.2.1 (several samples) and 5.3.2: the
        acceleration is that of all influences together, each over the size of its own sample.
    """
    count = len(draws)
    # Where one task's resample is +inf and another's -inf (references at chance), their average is NaN: out of bounds, like either.
    with np.errstate(invalid="ignore"):
        replicates = np.sum([draw.replicates for draw in draws], axis=0) / count
    units = sorted({draw.unit for draw in draws})
    return Draws(
        observed=math.fsum(draw.observed for draw in draws) / count,
        replicates=replicates,
        influence=np.concatenate([draw.influence for draw in draws]) / count,
        unit=" and ".join(units) + " within each task",
        degrees=sum(draw.degrees for draw in draws),
    )


def interval_of(draws: Draws, *, level: float = 0.95, method: Method = "bca", expanded: bool = True) -> MaybeInterval:
    """Turn the replicates of a statistic into an interval.

    Args:
        draws: from `evaluate` or `average_draws`.
        level: nominal coverage.
        method: 'bca' (bias-corrected and accelerated) or 'percentile'.
        expanded: widen the tails as Student's t does, so that small samples keep their coverage.

    Returns:
        The interval, its bounds order statistics of the replicates, or why there is none.

    Source:
        BCa: Efron, JASA 82:171-185 (1987); the expansion, quantile sqrt(n/(n-1)) t for z: Hesterberg, The American
        Statistician 69:371-386 (2015), applied here to BCa too.
    """
    level = check_level(level)
    if method not in ("bca", "percentile"):
        raise BadInputError(f"method is {method!r}; use 'bca' or 'percentile'.")
    replicates = np.sort(draws.replicates)
    unbounded = int(np.sum(~np.isfinite(replicates)))
    if unbounded == 0 and replicates[-1] - replicates[0] <= _CONSTANT * float(np.abs(replicates).max()):
        return Undefined("every resample gives the same value: the data hold no variation to resample")

    reach = float(scipy_stats.norm.isf((1 - level) / 2))
    if expanded and draws.degrees > 0:
        reach = math.sqrt((draws.degrees + 1) / draws.degrees) * float(scipy_stats.t.isf((1 - level) / 2, draws.degrees))
    z = np.array([-reach, reach])
    if method == "bca":
        shift, acceleration = _bias(replicates, draws.observed), _acceleration(draws.influence)
        if not math.isfinite(shift) or not math.isfinite(acceleration):
            if unbounded:
                return Undefined(
                    f"in {unbounded:,} of {replicates.size:,} resamples the figure has no finite value (the score that it is divided by is zero there)"
                )
            return Undefined("the BCa correction has no value: all resamples lie on one side of the figure, or leaving one out changes nothing")
        slope = 1 - acceleration * (shift + z)
        if np.any(slope <= 0):
            return Undefined(f"the BCa correction has no value: the data are too skewed (acceleration {acceleration:.2f})")
        z = shift + (shift + z) / slope
    tails = scipy_stats.norm.cdf(z) * (replicates.size + 1)
    first = min(max(math.floor(tails[0]) - 1, 0), replicates.size - 1)
    last = min(max(math.ceil(tails[1]) - 1, 0), replicates.size - 1)
    lower, upper = float(replicates[first]), float(replicates[last])
    if not math.isfinite(lower) or not math.isfinite(upper):
        return Undefined(f"the interval is unbounded: in {unbounded} of {replicates.size} resamples the statistic has no value")
    name = "BCa" if method == "bca" else "percentile"
    return Interval(lower, upper, level, f"{name} bootstrap{', t-expanded' if expanded else ''}, {replicates.size} resamples of {draws.unit}")


def _bias(replicates: Floats, observed: float) -> float:
    """Median bias z0; a replicate equal to the observed value, but for rounding, counts half on either side."""
    slack = _CONSTANT * abs(observed)
    below = (float(np.mean(replicates < observed - slack)) + float(np.mean(replicates <= observed + slack))) / 2
    return float(scipy_stats.norm.ppf(below))


def _acceleration(influence: Floats) -> float:
    """Skewness of the influences, over six."""
    if not np.all(np.isfinite(influence)):
        return math.inf
    spread = float(np.sum(influence**2))
    return 0.0 if spread == 0 else float(np.sum(influence**3)) / (6 * spread**1.5)


def paired_bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Statistic,
    *,
    rng: np.random.Generator,
    groups: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    level: float = 0.95,
    method: Method = "bca",
    resamples: int = RESAMPLES,
    min_items: int = MIN_ITEMS,
    min_clusters: int = MIN_CLUSTERS,
) -> MaybeInterval:
    """Bootstrap interval of a function of column means, the same resampled items in every column.

    Args:
        columns: c vectors `[n]`, one per arm.
        statistic: see `Statistic`, e.g. `difference_of_means`.
        rng: the source of chance.
        groups: `[n]` cluster labels; whole clusters are then resampled.
        sizes: `[n]`, see `resample`.
        level: nominal coverage.
        method: 'bca' or 'percentile'; the result names it.
        resamples: how many.
        min_items: refused below this many items.
        min_clusters: refused below this many clusters.

    Raises:
        BadInputError: as `resample`.
    """
    n = finite_vector("column 0", columns[0]).size
    clusters = None if groups is None else int(group_codes(groups, n).max()) + 1
    check_level(level)
    refused = refusal(n, clusters, min_items=min_items, min_clusters=min_clusters)
    if refused is not None:
        return refused
    sample = resample(columns, rng=rng, groups=groups, sizes=sizes, resamples=resamples)
    return interval_of(evaluate(sample, statistic), level=level, method=method)


def difference_of_means(means: Floats) -> Vector:
    """First column minus second: the statistic of a paired difference."""
    difference: Vector = means[..., 0] - means[..., 1]
    return difference
