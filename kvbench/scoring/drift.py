"""F1 by turn, drift, and its slope, from the answers of a handoff run. Conversations are the units of chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.runs.measured import DriftSlope, Handoff, HandoffTurn
from kvbench.scoring.handoff import TurnAnswer
from kvbench.stats import MIN_CLUSTERS, RESAMPLES, Interval, MaybeInterval, Undefined, Value, difference_of_means, paired_bootstrap

OWN_PREFILL = "own prefill"
"""The alternation without any transfer: whoever's turn it is answers from its own prefill. Only a gold history makes it comparable."""
Floats = NDArray[np.float64]


class TurnFigure(NamedTuple):
    """One arm at one turn."""

    protocol: str
    """per_turn, once, alternate, or the model alone."""
    arm: str
    """Mapper, or the model alone."""
    answered_by: str
    """Which model answered."""
    turn: int
    """1 is the first question."""
    n: int
    """Conversations that have this turn."""
    few: bool
    """Too few of them for an interval."""
    f1: float
    """Mean F1."""
    exact_match: float
    """Mean exact match."""
    drift: float | None
    """F1 of the target alone minus this; None for the target itself."""
    interval: MaybeInterval | None
    """Of the drift."""


class ArmFigure(NamedTuple):
    """One arm over all turns from its handoff on."""

    protocol: str
    """As in `TurnFigure`."""
    arm: str
    """As in `TurnFigure`."""
    conversations: int
    """How many have such a turn."""
    answers: int
    """Answers in all."""
    f1: float
    """Mean over answers."""
    exact_match: float
    """Mean over answers."""
    drift: float | None
    """F1 of the target alone minus this, mean over answers; None for the target itself."""
    drift_interval: MaybeInterval | None
    """Whole conversations resampled."""
    slope: Value | None
    """Change of the drift per turn."""
    slope_interval: MaybeInterval | None
    """Whole conversations resampled."""


class HandoffFigures(NamedTuple):
    """All figures of a run."""

    turns: list[TurnFigure]
    """By protocol, arm, turn."""
    arms: list[ArmFigure]
    """By protocol and arm."""


def summarise(
    answers: Sequence[TurnAnswer], *, handoff_turn: int = 1, gold_history: bool = True, seed: int = 0, resamples: int = RESAMPLES
) -> HandoffFigures:
    """Compare every arm with the target alone, turn by turn and over all turns.

    Answers of the protocol `once` before the handoff are the source's and left out.

    Args:
        answers: of one run.
        handoff_turn: of the protocol `once`.
        gold_history: whether all arms saw the same history.
        seed: of the resampling.
        resamples: how many.
    """
    kept = [a for a in answers if a.protocol != "once" or a.turn >= handoff_turn]
    if gold_history:
        kept += _own_prefill(kept)
    target = {(a.conversation, a.turn): a for a in kept if a.protocol == "target"}
    turns, arms = [], []
    for protocol, arm in dict.fromkeys((a.protocol, a.arm) for a in kept):
        own = [a for a in kept if (a.protocol, a.arm) == (protocol, arm)]
        for number in sorted({a.turn for a in own}):
            turns.append(_turn_figure([a for a in own if a.turn == number], target, np.random.default_rng([seed, number]), resamples))
        arms.append(_arm_figure(own, target, np.random.default_rng(seed), resamples))
    return HandoffFigures(turns, arms)


def _own_prefill(answers: Sequence[TurnAnswer]) -> list[TurnAnswer]:
    """What the two models would have answered in the places that `alternate` gives them, had nothing been transferred."""
    roles = {(a.conversation, a.turn): a.answered_by for a in answers if a.protocol == "alternate"}
    return [
        a.model_copy(update={"protocol": "alternate", "arm": OWN_PREFILL})
        for a in answers
        if a.protocol in ("target", "source") and roles.get((a.conversation, a.turn)) == a.protocol
    ]


def _pairs(own: Iterable[TurnAnswer], target: dict[tuple[str, int], TurnAnswer]) -> tuple[Floats, Floats]:
    pairs = [(target[a.conversation, a.turn].f1, a.f1) for a in own]
    first, second = np.array(pairs, dtype=np.float64).T
    return first, second


def _turn_figure(own: Sequence[TurnAnswer], target: dict[tuple[str, int], TurnAnswer], rng: np.random.Generator, resamples: int) -> TurnFigure:
    reference, scores = _pairs(own, target)
    drift: float | None = None
    interval: MaybeInterval | None = None
    if own[0].protocol != "target":
        drift = float(np.mean(reference - scores))
        interval = _interval([reference, scores], difference_of_means, own, rng, resamples)
    exact = float(np.mean([a.exact_match for a in own]))
    few = len(own) < MIN_CLUSTERS
    return TurnFigure(own[0].protocol, own[0].arm, own[0].answered_by, own[0].turn, len(own), few, float(np.mean(scores)), exact, drift, interval)


def _arm_figure(own: Sequence[TurnAnswer], target: dict[tuple[str, int], TurnAnswer], rng: np.random.Generator, resamples: int) -> ArmFigure:
    reference, scores = _pairs(own, target)
    exact, conversations = float(np.mean([a.exact_match for a in own])), len({a.conversation for a in own})
    start = (own[0].protocol, own[0].arm, conversations, len(own), float(np.mean(scores)), exact)
    if own[0].protocol == "target":
        return ArmFigure(*start, None, None, None, None)
    numbers, drift = np.array([a.turn for a in own], dtype=np.float64), reference - scores
    interval = _interval([reference, scores], difference_of_means, own, rng, resamples)
    if len(set(numbers)) < 2:
        alone = Undefined("a slope needs at least two turns")
        return ArmFigure(*start, float(drift.mean()), interval, alone, alone)
    columns = slope_columns(numbers, drift)
    slope = float(slope_of_means(np.array([column.mean() for column in columns])))
    return ArmFigure(*start, float(drift.mean()), interval, slope, _interval(columns, slope_of_means, own, rng, resamples))


def _interval(columns: Sequence[Floats], statistic: object, own: Sequence[TurnAnswer], rng: np.random.Generator, resamples: int) -> MaybeInterval:
    names = [a.conversation for a in own]
    # The conversations are what is independent, so their number is what has to suffice, not that of the answers.
    return paired_bootstrap(columns, statistic, rng=rng, groups=names, resamples=resamples, min_items=1)  # type: ignore[arg-type]


def slope_columns(turns: Floats, drift: Floats) -> list[Floats]:
    """The columns whose means decide a least-squares slope, per answer: t, d, t d, t^2."""
    return [turns, drift, turns * drift, turns**2]


def slope_of_means(means: Floats) -> Floats:
    """Least-squares slope of d over t from the means of t, d, t d and t^2, `[..., 4]` to `[...]`; infinite where t does not vary.

    Every answer counts once, so a turn that few conversations reach moves it little.
    """
    t, d, td, tt = np.moveaxis(np.asarray(means, dtype=np.float64), -1, 0)
    spread = tt - t * t
    varies = spread > 1e-9
    slope: Floats = np.where(varies, (td - t * d) / np.where(varies, spread, 1.0), np.inf)
    return slope


def as_stored(figures: HandoffFigures) -> Handoff:
    """The file handoff.json, which the report reads."""

    def bounds(interval: MaybeInterval | None) -> tuple[float | None, float | None]:
        return (interval.lower, interval.upper) if isinstance(interval, Interval) else (None, None)

    turns = []
    for t in figures.turns:
        lower, upper = bounds(t.interval)
        turns.append(HandoffTurn(protocol=t.protocol, arm=t.arm, turn=t.turn, n=t.n, f1=t.f1, drift=t.drift, lower=lower, upper=upper))
    slopes = []
    for a in figures.arms:
        if isinstance(a.slope, float):
            lower, upper = bounds(a.slope_interval)
            slopes.append(DriftSlope(protocol=a.protocol, arm=a.arm, per_turn=a.slope, lower=lower, upper=upper))
    return Handoff(turns=tuple(turns), slopes=tuple(slopes))
