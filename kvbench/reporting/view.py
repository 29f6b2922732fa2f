"""Everything a report says, as data: the schema of comparison.json."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from kvbench.runs.measured import Extras
from kvbench.runs.schema import Provenance, Role, Stored
from kvbench.runs.verdict import Verdict
from kvbench.stats import Interval, MaybeInterval, Undefined, Value

COMPARISON_VERSION = 1
"""Of comparison.json; raised when an older reader could misread it."""

Relation: TypeAlias = Literal["target", "source", "zero", "mapper", "context"]
"""What the reference of a comparison is; 'context' compares a control or the source with the target, outside the claims about mappers."""
Kind: TypeAlias = Literal["accuracy", "score", "nll"]
"""Right-or-wrong items, graded items, or negative log-likelihoods."""


class Estimate(Stored):
    """A number with its interval, or the reason why there is none."""

    value: float | None = None
    """The number; None with a reason."""
    reason: str | None = None
    """Why there is no number."""
    lower: float | None = None
    """Lower bound."""
    upper: float | None = None
    """Upper bound."""
    method: str | None = None
    """How the interval was computed."""
    interval_reason: str | None = None
    """Why there is no interval."""

    @classmethod
    def of(cls, value: Value, interval: MaybeInterval) -> Estimate:
        """From a statistic and its interval."""
        bounds = interval if isinstance(interval, Interval) else None
        return cls(
            value=None if isinstance(value, Undefined) else float(value),
            reason=value.reason if isinstance(value, Undefined) else None,
            lower=float(bounds.lower) if bounds else None,
            upper=float(bounds.upper) if bounds else None,
            method=bounds.method if bounds else None,
            interval_reason=interval.reason if isinstance(interval, Undefined) else None,
        )

    @classmethod
    def missing(cls, reason: str) -> Estimate:
        """No number and no interval."""
        return cls(reason=reason, interval_reason=reason)


class Policy(Stored):
    """What was fixed before the comparison."""

    margin: float = Field(default=0.02, ge=0)
    """Largest loss of a score that is not material, absolute (0.02 = 2 percentage points of accuracy or F1)."""
    nll_margin: float = Field(default=0.02, ge=0)
    """Largest rise of the negative log-likelihood that is not material, nats per token (0.02 is about 2 % of perplexity)."""
    level: float = Field(default=0.95, gt=0.5, lt=1)
    """Coverage of all intervals; adjusted p below 1 - level count as significant."""
    min_n: int = Field(default=30, ge=1)
    """Fewest items (or documents) a disposition other than inconclusive needs."""
    seed: int = Field(default=0, ge=0)
    """Of the bootstrap."""
    resamples: int = Field(default=10_000, ge=1_000)
    """Of the bootstrap."""
    retention: float | None = Field(default=None, gt=0, le=1)
    """Share of the target's score that a task must keep. Where it is set, a mapper's scores are judged against the target on retention instead of on
    `margin`: 0.9 means that a loss of a tenth of the target's score is not material."""
    floors: dict[str, float] = Field(default_factory=dict)
    """Tasks with a floor of their own in place of `retention`, e.g. the canary."""
    average_retention: float | None = Field(default=None, gt=0, le=1)
    """Share that must be kept on average over the tasks; None asks for no average."""
    name: str | None = None
    """Of the policy file."""
    fingerprint: str | None = None
    """SHA-256 of the policy file."""

    def floor(self, task: str) -> float | None:
        """Share of the target's score that a task must keep; None where the margin counts."""
        return None if self.retention is None else self.floors.get(task, self.retention)


class ArmView(Stored):
    """One arm of the comparison."""

    name: str
    """In tables."""
    role: Role
    """Its part; `target` is what all are held against, also in a comparison of foreign runs."""
    mapper: str | None = None
    """What maps."""
    run: str
    """Directory of its run."""


class TaskView(Stored):
    """One task, filter and metric."""

    id: str
    """Key of this record: task, filter and metric joined by '|'."""
    task: str
    """lm-eval task or pooled group."""
    filter: str
    """lm-eval filter."""
    metric: str
    """lm-eval metric."""
    kind: Kind
    """Decides the statistics."""
    higher_is_better: bool
    """Direction."""
    fraction: bool
    """Whether scores lie between 0 and 1, so that they print as per cent."""
    primary: bool
    """Whether it is the headline of its task; only these are tests of the family."""
    n: int
    """Items."""
    cluster: str | None = None
    """Label that was resampled as a whole; None where items were."""
    clusters: int | None = None
    """How many of them."""
    chance: float | None = None
    """Score of guessing."""
    chance_source: str = ""
    """Where the chance level comes from."""
    pooled: tuple[str, ...] = ()
    """Tasks that were pooled."""


class ScoreView(Stored):
    """One arm on one task."""

    task_id: str
    """See `TaskView.id`."""
    arm: str
    """Who answered."""
    score: Estimate
    """Mean score; for a negative log-likelihood the perplexity."""
    not_run: bool = False
    """Whether the arm was spared this task."""
    at_chance: bool = False
    """Whether the interval does not exclude guessing."""


class PairView(Stored):
    """One arm against one reference on one task. Differences are arm minus reference."""

    task_id: str
    """See `TaskView.id`."""
    arm: str
    """Under test."""
    reference: str
    """Held against."""
    relation: Relation
    """What the reference is."""
    in_family: bool
    """Whether its p-value belongs to the adjusted family."""
    n: int
    """Items."""
    difference: Estimate
    """Mean score difference; nats per token for a negative log-likelihood."""
    retention: Estimate
    """arm / reference."""
    floor_normalised: Estimate
    """(arm - chance) / (reference - chance)."""
    perplexity_ratio: Estimate | None = None
    """arm / reference; below 1 is better."""
    won: int | None = None
    """Items right in the arm only, or better in the arm."""
    lost: int | None = None
    """Items right in the reference only, or worse in the arm."""
    tied: int | None = None
    """Items alike in both."""
    p: float | None = None
    """Two-sided."""
    p_reason: str | None = None
    """Why there is no p."""
    test: str | None = None
    """Name of the test."""
    p_second: float | None = None
    """Of a second, less assuming or less conservative test; never adjusted."""
    second_test: str | None = None
    """Its name."""
    p_holm: float | None = None
    """Holm-adjusted over the family."""
    p_bh: float | None = None
    """Benjamini-Hochberg-adjusted over the family."""
    disposition: str
    """improved, no material loss, degraded or inconclusive, against the reference."""
    decision_reason: str
    """With the numbers it rests on."""
    margin: float
    """Applied margin, in the unit of the score; where the policy states a retention, the share of the reference's score that may be lost."""
    loss_shown: bool = False
    """Whether a loss of any size is beyond doubt."""
    required_n: int | None = None
    """Items that would settle an inconclusive one."""
    required_reason: str | None = None
    """Towards what, or why no number settles it."""


class AverageView(Stored):
    """One arm against one reference over all primary tasks that have scores where higher is better; tasks weigh alike."""

    arm: str
    """Under test."""
    reference: str
    """Held against."""
    relation: Relation
    """What the reference is."""
    tasks: tuple[str, ...]
    """Ids of the tasks averaged."""
    arm_score: float | None
    """Mean score."""
    reference_score: float | None
    """Mean score."""
    difference: Estimate
    """Mean of the tasks' differences."""
    retention: Estimate
    """Mean of the tasks' retentions."""
    floor_normalised: Estimate
    """Mean of the tasks' floor-normalised retentions."""


Standing: TypeAlias = Literal["better", "not better", "worse", "unknown"]


class VerdictView(Stored):
    """What the comparison says about one mapper (or one arm of foreign runs)."""

    arm: str
    """Whom it is about."""
    reading: str
    """One of: supports deploying, do not deploy, keep the source model, inconclusive; against a bare reference the disposition."""
    tone: Literal["good", "bad", "open"]
    """Colour of the badge."""
    sentence: str
    """The verdict with its uncertainty."""
    points: tuple[str, ...]
    """What it rests on, one claim each: against target, source, zero, and what would settle it."""
    against_source: Standing
    """Better than keeping the small model?"""
    against_zero: Standing
    """Does anything get through?"""
    counts: dict[str, int]
    """Tasks by disposition against the target."""


class RunView(Stored):
    """Where the scores come from."""

    path: str
    """Directory."""
    kind: str
    """kvbench or lm-eval."""
    arms: tuple[str, ...]
    """Its arms."""
    settings: dict[str, str]
    """Models, dtype, batch size, seeds, fingerprints."""
    arm_details: dict[str, dict[str, str]]
    """Pins by arm."""
    provenance: Provenance | None = None
    """How it was made."""


class Comparison(Stored):
    """The file comparison.json."""

    format: Literal["kvbench-comparison"] = "kvbench-comparison"
    """Marks the file."""
    version: int = COMPARISON_VERSION
    """Schema version."""
    title: str
    """Of the report."""
    source: str | None
    """Source model."""
    target: str | None
    """Target model."""
    reference_arm: str
    """Arm that all are held against."""
    source_arm: str | None
    """Arm that is the source model alone."""
    zero_arm: str | None
    """Arm with an empty prefix."""
    mappers: tuple[str, ...]
    """Arms that a verdict is given on."""
    policy: Policy
    """Margins and levels."""
    family: int
    """Tests in the adjusted family."""
    arms: tuple[ArmView, ...]
    """All arms."""
    tasks: tuple[TaskView, ...]
    """All tasks, primary and further metrics."""
    scores: tuple[ScoreView, ...]
    """All arms on all tasks."""
    pairs: tuple[PairView, ...]
    """All comparisons."""
    averages: tuple[AverageView, ...]
    """Averages over tasks."""
    verdicts: tuple[VerdictView, ...]
    """One per mapper."""
    notes: tuple[str, ...]
    """What a reader must know: undefined scores, missing controls, unfinished runs."""
    runs: tuple[RunView, ...]
    """Inputs."""
    extras: tuple[Extras, ...] = ()
    """Optional measurements found beside the runs."""
    screen: Verdict | None = None
    """The verdict of `kvbench screen`, in its own report."""
    command: str = ""
    """Regenerates the report."""
    provenance: Provenance | None = None
    """How the report was made."""

    def task(self, task_id: str) -> TaskView:
        """The task of an id."""
        return next(task for task in self.tasks if task.id == task_id)

    def score(self, task_id: str, arm: str) -> ScoreView:
        """One arm on one task."""
        return next(score for score in self.scores if score.task_id == task_id and score.arm == arm)

    def pair(self, task_id: str, arm: str, reference: str) -> PairView | None:
        """One comparison, if it was made."""
        return next((p for p in self.pairs if (p.task_id, p.arm, p.reference) == (task_id, arm, reference)), None)

    def average(self, arm: str, reference: str) -> AverageView | None:
        """One average, if it was made."""
        return next((a for a in self.averages if (a.arm, a.reference) == (arm, reference)), None)

    @property
    def primary_tasks(self) -> tuple[TaskView, ...]:
        """The headline tasks."""
        return tuple(task for task in self.tasks if task.primary)
