"""From runs to a comparison: every mapper against target, source, zero and every other mapper, on identical items."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvbench.errors import BadInputError
from kvbench.reporting.averages import average_pair
from kvbench.reporting.metrics import TaskData, pool, primary_metric, read_task
from kvbench.reporting.pairwise import compare_pair, score_of, undefined_scores
from kvbench.reporting.roles import Roles, assign_roles, distinct_names
from kvbench.reporting.verdicts import Judge
from kvbench.reporting.view import ArmView, AverageView, Comparison, PairView, Policy, RunView
from kvbench.runs.measured import Extras
from kvbench.runs.pairing import PairedItems, pair
from kvbench.runs.sources import ComparableRun, TaskReading
from kvbench.stats import Value, benjamini_hochberg, holm


@dataclass(frozen=True)
class Compared:
    """A comparison and the items it rests on.

    Attributes:
        comparison: all figures.
        paired: the joined samples.
        tasks: the paired scores, by task, filter and metric.
    """

    comparison: Comparison
    paired: list[PairedItems]
    tasks: list[TaskData]


def compare(
    runs: Sequence[ComparableRun],
    policy: Policy | None = None,
    *,
    reference: str | None = None,
    source_arm: str | None = None,
    tasks: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    spared: Mapping[str, Collection[str]] | None = None,
    title: str | None = None,
) -> Compared:
    """Compare all arms of runs.

    Args:
        runs: from `kvbench.runs.load_runs`.
        policy: margins, level, minimum n, seed; fixed beforehand.
        reference: arm that all are held against; None takes the arm with the role target, else the first.
        source_arm: arm that stands for keeping the small model; None takes the arm with the role source.
        tasks: compare only these.
        arms: compare only these.
        spared: by arm, tasks that it was meant not to answer; it has no score and no comparison there, and its averages are over the others.
        title: of the report.

    Raises:
        BadInputError: runs that cannot be paired (see `kvbench.runs.pair`), or an unknown arm.
    """
    policy = policy or Policy()
    runs = distinct_names(runs)
    paired = pair(runs, tasks=tasks, arms=arms, spared=spared)
    names = list(dict.fromkeys(arm for items in paired for arm in items.frames))
    roles = assign_roles(runs, names, reference, source_arm)
    data = _task_data(runs, paired)
    names = list(roles.order)
    scores = [score_of(task, arm, policy) for task in data for arm in names]
    pairs: list[PairView] = []
    averages: list[AverageView] = []
    for arm, held, relation, in_family in roles.comparisons():
        found = [compare_pair(task, arm, held, relation, policy, in_family=in_family) for task in data if arm in task.scores and held in task.scores]
        pairs.extend(found)
        average = average_pair(data, arm, held, relation, policy, found)
        if average is not None:
            averages.append(average)
    pairs, family = _adjusted(pairs)
    views = [task.view for task in data]
    judge = Judge(views, scores, pairs, averages, policy, reference=roles.reference, source=roles.source, zero=roles.zero, foreign=roles.foreign)
    comparison = Comparison(
        title=title or _title(runs, roles),
        source=next((run.source for run in runs if run.source), None),
        target=next((run.target for run in runs if run.target), None),
        reference_arm=roles.reference,
        source_arm=roles.source,
        zero_arm=roles.zero,
        mappers=tuple(roles.mappers),
        policy=policy,
        family=family,
        arms=tuple(ArmView(name=name, role=roles.role[name], mapper=roles.mapper[name], run=roles.run[name]) for name in names),
        tasks=tuple(views),
        scores=tuple(scores),
        pairs=tuple(pairs),
        averages=tuple(averages),
        verdicts=tuple(judge.verdict(arm) for arm in roles.mappers),
        notes=tuple(_notes(runs, roles, data, policy)),
        runs=tuple(
            RunView(
                path=str(run.path),
                kind=run.kind,
                arms=tuple(arm.name for arm in run.arms),
                settings=run.settings,
                arm_details={arm.name: arm.detail for arm in run.arms if arm.detail},
                provenance=run.provenance,
            )
            for run in runs
        ),
        extras=tuple(run.extras for run in runs if run.extras != Extras()),
    )
    return Compared(comparison, paired, data)


def _task_data(runs: Sequence[ComparableRun], paired: Sequence[PairedItems]) -> list[TaskData]:
    readings: dict[str, TaskReading] = {}
    for run in reversed(runs):
        readings.update(run.reading)
    pooled = {name: members for run in runs for name, members in run.pooled.items()}
    present = [items.task for items in paired]
    pools = {name: members for name, members in pooled.items() if len(members) > 1 and all(member in present for member in members)}
    inside = {member for members in pools.values() for member in members}
    single: list[TaskData] = []
    head_filter: dict[str, str] = {}
    for items in paired:
        reading = readings.get(items.task, TaskReading())
        metrics = items.metrics
        if not metrics:
            raise BadInputError(f"task '{items.task}' (filter {items.filter}) has no per-item score in any arm; leave it out with --tasks")
        wanted = reading.primary_metric if reading.primary_metric in metrics else primary_metric(metrics)
        first = head_filter.setdefault(items.task, reading.primary_filter or items.filter)
        for metric in sorted(metrics, key=lambda name: name != wanted):
            headline = metric == wanted and items.filter == first and items.task not in inside
            single.append(read_task(items, metric, reading, primary=headline))
    groups: list[TaskData] = []
    for name, members in pools.items():
        head = next(data.view for data in single if data.view.task == members[0])
        parts = [data for data in single if data.view.task in members and (data.view.filter, data.view.metric) == (head.filter, head.metric)]
        if len(parts) == len(members):
            groups.append(pool(name, parts))
    return groups + [data for data in single if data.view.primary] + [data for data in single if not data.view.primary]


def _adjusted(pairs: Sequence[PairView]) -> tuple[list[PairView], int]:
    family: dict[str, Value] = {str(i): pair.p for i, pair in enumerate(pairs) if pair.in_family and pair.p is not None}
    by_holm, by_bh = holm(family), benjamini_hochberg(family)
    adjusted = [
        pair.model_copy(update={"p_holm": by_holm[str(i)], "p_bh": by_bh[str(i)]}) if str(i) in family else pair for i, pair in enumerate(pairs)
    ]
    return adjusted, len(family)


def _title(runs: Sequence[ComparableRun], roles: Roles) -> str:
    source = next((run.source for run in runs if run.source), None)
    target = next((run.target for run in runs if run.target), None)
    if source and target:
        return f"{source} \u2192 {target}"
    return f"{', '.join(roles.mappers)} against {roles.reference}"


def _notes(runs: Sequence[ComparableRun], roles: Roles, data: Sequence[TaskData], policy: Policy) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    for task in data:
        for arm in roles.order:
            reason = undefined_scores(task, arm) if arm in task.scores else None
            if reason is not None:
                notes.append(f"{task.view.task}, {task.view.metric}: {reason}; its figures there are undefined")
        if task.view.primary and task.view.n < policy.min_n:
            notes.append(f"{task.view.task} has {task.view.n} items, fewer than the {policy.min_n} that a disposition needs")
        if task.view.primary and not task.view.fraction and task.view.kind == "score":
            notes.append(f"{task.view.task}, {task.view.metric} is not a fraction; the margin of {policy.margin:g} counts in its own unit")
        if task.view.primary and task.view.cluster:
            what = task.view.cluster
            notes.append(
                f"{task.view.task}: the {task.view.clusters} values of '{what}' are resampled as wholes, since their items are not independent"
            )
    primary = [task for task in data if task.view.primary]
    for arm in roles.order:
        missing = [task.view.task for task in primary if arm not in task.scores]
        if missing:
            notes.append(f"{arm} was not run on {', '.join(missing)}; its averages are over the other tasks")
    if not roles.foreign:
        if roles.source is None:
            notes.append("no arm 'source': whether a mapper beats keeping the small model cannot be said; evaluate with the source arm")
        if roles.zero is None:
            notes.append("no control 'zero': whether anything gets through cannot be said; evaluate with --mapper zero")
    return notes
