"""From an interval and a margin fixed beforehand to one of four words, and to the n that would settle the fourth."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from statsmodels.stats.power import normal_sample_size_one_tail

from kvbench.errors import BadInputError
from kvbench.stats.inputs import Vector, check_fraction, group_codes, paired_vectors
from kvbench.stats.intervals import MIN_ITEMS
from kvbench.stats.status import MaybeInterval, Undefined

# An effect this small against the spread is none: no n that anybody has settles it.
_NO_EFFECT = 1e-9


class Disposition(StrEnum):
    """What a comparison says about a task. Exactly one holds."""

    IMPROVED = "improved"
    NO_MATERIAL_LOSS = "no material loss"
    DEGRADED = "degraded"
    INCONCLUSIVE = "inconclusive"


class Decision(NamedTuple):
    """Result of `decide`."""

    disposition: Disposition
    """One of the four."""
    reason: str
    """Why, with the numbers it rests on."""
    margin: float
    """Largest loss that is not material, as given, in the unit of the figure."""
    n: int
    """Items behind the interval."""
    min_n: int
    """Fewest items accepted."""
    lower: float | None
    """Lower bound of the change against the reference, positive is better; None without an interval."""
    upper: float | None
    """Upper bound of the change; None without an interval."""
    loss_shown: bool
    """Whether a loss of any size is beyond doubt (upper < 0), material or not."""


class RequiredN(NamedTuple):
    """Result of `required_n` and `required_n_proportions`."""

    n: int
    """Items needed in all, at least those that the margin's policy asks for."""
    towards: Literal["improved", "no material loss", "degraded"]
    """What so many items would show, if the assumed change is the true one; 'improved' only for a margin of 0."""
    assumed_change: float
    """The true change that n is computed for, positive is better."""
    margin: float
    """As given."""
    alpha: float
    """Two-sided level of the interval that is to clear the margin."""
    power: float
    """Chance that it does."""


def decide(
    interval: MaybeInterval,
    *,
    null: float,
    margin: float,
    n: int,
    min_n: int = MIN_ITEMS,
    higher_is_better: bool = True,
) -> Decision:
    """Judge one figure of an arm against its reference.

    Let [lower, upper] be the interval of the change against the reference, turned so that positive is better: the bounds minus
    `null`, negated and exchanged where lower is better. The first line that holds decides:

    1. inconclusive: n < min_n, or there is no interval;
    2. improved: lower > 0;
    3. no material loss: lower >= -margin (a loss beyond the margin is ruled out; a smaller one may be certain);
    4. degraded: upper < -margin (a loss beyond the margin is certain);
    5. inconclusive: the interval straddles -margin, even where upper < 0: that something is lost is then certain
       (`loss_shown`), whether it is material is not.

    Lines 2 to 5 exclude each other and leave nothing out. With a 95 % interval each of the claims 2, 3 and 4 is wrong at most
    2.5 % of the time.

    Args:
        interval: of a difference, a retention or a ratio.
        null: the figure's value without any change: 0 for a difference, 1 for a retention or ratio.
        margin: largest loss that is not material, at least 0, in the unit of the figure; fixed before the run.
        n: items behind the interval.
        min_n: fewest items accepted.
        higher_is_better: False for negative log-likelihood and perplexity.

    Raises:
        BadInputError: if margin, null or n cannot be used.

    Source:
        docs/protocol.md; non-inferiority by interval: Piaggio et al., JAMA 308:2594-2604 (2012), figure 1.
    """
    _check_margin(margin)
    if not math.isfinite(null):
        raise BadInputError(f"null is {null}; use 0 for a difference, 1 for a retention or a ratio.")
    if n < 0 or min_n < 1:
        raise BadInputError(f"n is {n} and min_n is {min_n}; n must not be negative and min_n must be at least 1.")
    if isinstance(interval, Undefined):
        return Decision(Disposition.INCONCLUSIVE, f"no interval: {interval.reason}", margin, n, min_n, None, None, False)
    lower, upper = interval.lower - null, interval.upper - null
    if not higher_is_better:
        lower, upper = -upper, -lower
    found = f"change {lower:+.4f} to {upper:+.4f}, margin {margin:.4g}"
    if n < min_n:
        word, reason = Disposition.INCONCLUSIVE, f"n = {n} is below the minimum of {min_n} ({found})"
    elif lower > 0:
        word, reason = Disposition.IMPROVED, f"the whole interval is above no change ({found})"
    elif lower >= -margin:
        word, reason = Disposition.NO_MATERIAL_LOSS, f"a loss beyond the margin is ruled out ({found})"
    elif upper < -margin:
        word, reason = Disposition.DEGRADED, f"the whole interval is a loss beyond the margin ({found})"
    elif upper < 0:
        word, reason = Disposition.INCONCLUSIVE, f"a loss is certain, that it is beyond the margin is not ({found})"
    else:
        word, reason = Disposition.INCONCLUSIVE, f"neither a loss beyond the margin nor its absence is shown ({found})"
    return Decision(word, reason, margin, n, min_n, lower, upper, n >= min_n and upper < 0)


def required_n(
    arm: ArrayLike,
    reference: ArrayLike,
    *,
    margin: float,
    scale: Literal["difference", "retention"],
    floor: float = 0.0,
    higher_is_better: bool = True,
    groups: ArrayLike | None = None,
    assumed_change: float | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
    min_n: int = MIN_ITEMS,
) -> RequiredN | Undefined:
    """The n at which the interval would clear the margin, if what was observed is the truth.

    On the scale of the difference the items' arm - reference + margin are tested against a mean of zero; on that of retention
    their (arm - floor) - (1 - margin) (reference - floor), whose mean is above zero exactly if retention is above 1 - margin, so
    that the uncertainty of the reference counts too. The observed change is itself uncertain: read n as an order of magnitude.

    For a perplexity ratio with margin m: the per-document negative log-likelihoods, scale 'difference', margin log(1 + m),
    higher_is_better False.

    Args:
        arm: `[n]` scores.
        reference: `[n]`, the same items in the same order.
        margin: as in `decide`, on the same scale.
        scale: 'difference' or 'retention' (of higher-is-better scores).
        floor: chance level for floor-normalised retention, else 0; 'difference' takes none.
        higher_is_better: direction of the score, for 'difference'.
        groups: `[n]` cluster labels: the spread is then that of clusters, and n counts items of clusters like these.
        assumed_change: true change to plan for, positive is better (0: the arms are alike); None takes the observed one.
        alpha: two-sided level of the interval.
        power: wanted chance of clearing the margin.
        min_n: n is at least this.

    Returns:
        The n, or why none settles it: the change lies on the margin, its spread is unknown, or there is no retention.

    Raises:
        BadInputError: on unusable scores, margin, alpha, power, or a retention of scores where lower is better.

    Source:
        n = ((z_alpha/2 + z_power) sd / mean)^2 of the one-sample test of a mean; clusters: the sandwich variance of a mean.
    """
    first, second = paired_vectors(arm, reference)
    _check_margin(margin)
    check_fraction("alpha", alpha)
    check_fraction("power", power)
    if scale == "retention":
        if not higher_is_better:
            raise BadInputError("retention needs scores where higher is better; use scale 'difference' for negative log-likelihoods.")
        divisor = float(second.mean()) - floor
        if divisor <= 0:
            return Undefined(f"the reference scores {float(second.mean()):.4g}, at or below {floor:.4g}: there is no retention to settle")
        contrast = (first - floor) - (1 - margin) * (second - floor)
        change = float((first - second).mean()) / divisor
    elif scale == "difference":
        if floor != 0:
            raise BadInputError(f"floor is {floor} on the scale of the difference, which has none; leave it at 0.")
        divisor = 1.0
        gain = first - second if higher_is_better else second - first
        contrast, change = gain + margin, float(gain.mean())
    else:
        raise BadInputError(f"scale is {scale!r}; use 'difference' or 'retention'.")

    if first.size < 2:
        return Undefined("n = 1: one item says nothing about the spread")
    if np.array_equal(first, second):
        return Undefined("every item scores the same in both arms: how often they differ is unknown")
    spread = _spread(contrast, groups) / divisor
    scale_of_items = float(np.abs(contrast).max()) / divisor
    if spread <= _NO_EFFECT * scale_of_items:
        return Undefined("the change is the same for every item, or all lie in one cluster: the spread is unknown")
    return _settle(change if assumed_change is None else assumed_change, margin, spread, spread, alpha, power, min_n)


def required_n_proportions(
    won: int,
    lost: int,
    n: int,
    *,
    margin: float = 0.0,
    assumed_change: float | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
    min_n: int = MIN_ITEMS,
) -> RequiredN | Undefined:
    """The n for right-or-wrong items, from the counts of the discordant ones.

    Args:
        won: items right in the arm only.
        lost: items right in the reference only.
        n: items in all.
        margin: largest loss of accuracy that is not material; 0 asks for the n of McNemar's test.
        assumed_change: true change of accuracy to plan for; None takes the observed one.
        alpha: two-sided level.
        power: wanted power.
        min_n: n is at least this.

    Returns:
        The n, or why none settles it: no discordant items, or a change on the margin.

    Raises:
        BadInputError: if the counts contradict each other, or margin, alpha, power are unusable.

    Source:
        Connor, Biometrics 43:207-211 (1987): with margin 0, n = (z_alpha/2 sqrt(psi) + z_power sqrt(psi - d^2))^2 / d^2, psi the
        share of discordant items, d the change. With a margin the null variance is psi - margin^2, psi at least margin.
    """
    if won < 0 or lost < 0 or n < 1 or won + lost > n:
        raise BadInputError(f"won {won}, lost {lost} and n {n} contradict each other; won + lost is at most n.")
    _check_margin(margin)
    check_fraction("alpha", alpha)
    check_fraction("power", power)
    discordant = (won + lost) / n
    if discordant == 0:
        return Undefined("no item is won or lost: how often the arms differ is unknown")
    change = (won - lost) / n if assumed_change is None else assumed_change
    if abs(change) > discordant:
        return Undefined(f"a change of {change:.4g} cannot come from a share of {discordant:.4g} discordant items")
    null_spread = math.sqrt(max(max(discordant, margin) - margin**2, 0.0))
    return _settle(change, margin, null_spread, math.sqrt(max(discordant - change**2, 0.0)), alpha, power, min_n)


def _check_margin(margin: float) -> None:
    if not 0 <= margin < math.inf:
        raise BadInputError(f"margin is {margin}; give the largest loss that is not material as a number of at least 0.")


def _spread(contrast: Vector, groups: ArrayLike | None) -> float:
    """Standard deviation per item that gives the mean its standard error, clusters heeded."""
    if groups is None:
        return float(contrast.std(ddof=1))
    codes = group_codes(groups, contrast.size)
    sums = np.bincount(codes, weights=contrast - contrast.mean())
    if sums.size < 2:
        return 0.0
    return math.sqrt(float(np.sum(sums**2)) * sums.size / (sums.size - 1) / contrast.size)


def _settle(change: float, margin: float, null_spread: float, true_spread: float, alpha: float, power: float, min_n: int) -> RequiredN | Undefined:
    distance = change + margin
    if abs(distance) <= _NO_EFFECT * max(null_spread, true_spread):
        return Undefined(f"the change of {change:+.4g} lies on the margin of -{margin:.4g}: no number of items settles it")
    wanted = float(normal_sample_size_one_tail(abs(distance), power, alpha / 2, std_null=null_spread, std_alternative=true_spread))
    # One part in a billion keeps an exact integer from being rounded up.
    needed = max(math.ceil(wanted * (1 - 1e-9)), min_n)
    if distance < 0:
        return RequiredN(needed, "degraded", change, margin, alpha, power)
    return RequiredN(needed, "no material loss" if margin > 0 else "improved", change, margin, alpha, power)
