"""The rows of the printed tables, the same for HTML and Markdown."""

from __future__ import annotations

from typing import NamedTuple

from kvbench.reporting import numbers
from kvbench.reporting.view import Comparison, PairView, Relation, TaskView
from kvbench.stats import Disposition

MARKS = {
    Disposition.IMPROVED.value: "\u25b2",
    Disposition.NO_MATERIAL_LOSS.value: "\u25cf",
    Disposition.DEGRADED.value: "\u25bc",
    Disposition.INCONCLUSIVE.value: "?",
}
"""One sign per disposition, so that colour is not alone."""


class Cell(NamedTuple):
    """One arm on one task in the matrix."""

    arm: str
    score: str
    interval: str
    kept: str
    mark: str
    disposition: str
    title: str
    sort: float


class Line(NamedTuple):
    """One task in the matrix."""

    label: str
    detail: str
    n: int
    chance: str
    cells: tuple[Cell, ...]


class PairRow(NamedTuple):
    """One comparison, ready to print, with the numbers to sort by."""

    task: str
    detail: str
    arm: str
    reference: str
    score: str
    score_interval: str
    reference_score: str
    difference: str
    difference_interval: str
    retention: str
    retention_interval: str
    floor: str
    floor_interval: str
    won_lost: str
    p: str
    p_holm: str
    adjusted: bool
    disposition: str
    reason: str
    settle: str
    sort: dict[str, float]


def label(task: TaskView) -> str:
    """How a task is called in tables."""
    return task.task if task.primary else f"{task.task} ({task.filter}, {task.metric})"


def detail(task: TaskView) -> str:
    """Metric, filter and what was resampled."""
    parts = [task.metric if task.kind != "nll" else f"{task.metric}, lower is better"]
    if task.filter != "none":
        parts.append(task.filter)
    if task.pooled:
        parts.append(f"{len(task.pooled)} tasks pooled, resampled by task")
    elif task.cluster:
        parts.append(f"resampled by {task.cluster} ({task.clusters})")
    return ", ".join(parts)


def matrix(comparison: Comparison) -> list[Line]:
    """Headline tasks by arms, with the share kept and the disposition against the target."""
    lines = []
    for task in comparison.primary_tasks:
        cells = []
        for arm in comparison.arms:
            score = comparison.score(task.id, arm.name)
            pair = comparison.pair(task.id, arm.name, comparison.reference_arm)
            mark = MARKS[pair.disposition] if pair is not None and arm.name in comparison.mappers else ""
            title = pair.decision_reason if pair is not None else ""
            if score.at_chance:
                title = f"not shown to be above chance. {title}"
            cells.append(
                Cell(
                    arm.name,
                    "not run" if score.not_run else numbers.score(task, score.score.value) + ("*" if score.at_chance else ""),
                    numbers.score_interval(task, score.score),
                    _kept(pair),
                    mark,
                    pair.disposition if mark and pair is not None else "",
                    score.score.reason or title,
                    score.score.value if score.score.value is not None else -1e300,
                )
            )
        chance = "" if task.chance is None else numbers.percent(task.chance, 0 if round(task.chance * 100) == round(task.chance * 100, 6) else 1)
        lines.append(Line(label(task), detail(task), task.n, chance, tuple(cells)))
    return lines


def average_line(comparison: Comparison) -> Line | None:
    """The matrix's last line: the mean over tasks with scores where higher is better; None with a single such task."""
    found = {average.arm: average for average in comparison.averages if average.reference == comparison.reference_arm}
    first = max(found.values(), key=lambda average: len(average.tasks), default=None)
    if first is None or len(first.tasks) < 2:
        return None
    cells = []
    for arm in comparison.arms:
        average = found.get(arm.name)
        score = average.arm_score if average is not None else first.reference_score
        kept = average.retention if average is not None else None
        over = f", {len(average.tasks)} tasks" if average is not None and len(average.tasks) < len(first.tasks) else ""
        cells.append(
            Cell(
                arm.name,
                "undefined" if score is None else numbers.percent(score) if comparison.task(first.tasks[0]).fraction else f"{score:.4g}",
                "",
                "" if kept is None or kept.value is None else f"{numbers.percent(kept.value)} kept{over}",
                "",
                "",
                (kept.reason or "") if kept is not None else "",
                0.0,
            )
        )
    return Line("average", f"{len(first.tasks)} tasks, weighing alike", sum(comparison.task(name).n for name in first.tasks), "", tuple(cells))


def _kept(pair: PairView | None) -> str:
    if pair is None:
        return ""
    if pair.perplexity_ratio is not None and pair.perplexity_ratio.value is not None:
        return f"\u00d7{pair.perplexity_ratio.value:.3f}"
    return "" if pair.retention.value is None else f"{numbers.percent(pair.retention.value)} kept"


def pair_rows(comparison: Comparison, relation: Relation, *, primary: bool = True) -> list[PairRow]:
    """All comparisons of one relation; primary ones, or those of further metrics and of pooled tasks' parts."""
    rows = []
    for pair in comparison.pairs:
        task = comparison.task(pair.task_id)
        if pair.relation != relation or task.primary != primary:
            continue
        score, reference = (comparison.score(task.id, who).score for who in (pair.arm, pair.reference))
        kept = pair.perplexity_ratio or pair.retention
        as_ratio = pair.perplexity_ratio is not None
        rows.append(
            PairRow(
                task=label(task),
                detail=detail(task),
                arm=pair.arm,
                reference=pair.reference,
                score=numbers.score(task, score.value),
                score_interval=numbers.score_interval(task, score),
                reference_score=numbers.score(task, reference.value),
                difference=numbers.difference(task, pair.difference.value),
                difference_interval=numbers.difference_interval(task, pair.difference),
                retention=_ratio(kept.value, as_ratio),
                retention_interval=_ratio_bounds(kept.lower, kept.upper, as_ratio),
                floor=_ratio(pair.floor_normalised.value, False) if task.kind != "nll" else "\u2013",
                floor_interval=_ratio_bounds(pair.floor_normalised.lower, pair.floor_normalised.upper, False),
                won_lost="\u2013" if pair.won is None else f"{pair.won} / {pair.lost}",
                p=numbers.p_value(pair.p),
                p_holm=numbers.p_value(pair.p_holm),
                adjusted=pair.p_holm is not None,
                disposition=pair.disposition,
                reason=pair.decision_reason + (f"; {pair.required_reason}" if pair.required_reason else ""),
                settle=f"needs n \u2248 {pair.required_n:,}" if pair.required_n else "",
                sort={
                    "score": _number(score.value),
                    "difference": _number(pair.difference.value),
                    "retention": _number(kept.value),
                    "floor": _number(pair.floor_normalised.value),
                    "p": _number(pair.p, 2.0),
                    "won": _number(pair.won),
                },
            )
        )
    return rows


def headline(comparison: Comparison) -> str:
    """One sentence over all mappers: which beat the source alone, which do not."""
    if comparison.source_arm is None:
        words = [f"{v.arm}: {v.reading} against {comparison.reference_arm}" for v in comparison.verdicts]
        return "; ".join(words) + "." if words else "Nothing to compare."
    worse = [v.arm for v in comparison.verdicts if v.against_source == "worse"]
    weak = [v.arm for v in comparison.verdicts if v.against_source == "not better"]
    strong = [v.arm for v in comparison.verdicts if v.against_source == "better"]
    good = [v.arm for v in comparison.verdicts if v.tone == "good"]
    parts = []
    if weak or worse:
        who = "Mapped" if not strong else f"{_and(weak + worse)}: mapped"
        tail = "" if not worse else f", {_and(worse)} worse" if weak else ": it is worse"
        parts.append(f"{who} is no better than the source model{tail}.")
    if strong:
        kept = "" if good else ", but is not shown to keep all that matters of the target" if len(strong) == 1 else _BUT_MANY
        parts.append(f"{_and(strong)} {'beats' if len(strong) == 1 else 'beat'} the source model{kept}.")
    if good:
        parts.append(f"{_and(good)} {'loses' if len(good) == 1 else 'lose'} nothing material against the target.")
    alone = comparison.average(comparison.source_arm, comparison.reference_arm)
    if alone is not None and alone.difference.upper is not None and alone.difference.upper >= 0:
        parts.append("The target itself is not shown to beat the source on these tasks: there is nothing to gain on them.")
    return " ".join(parts) or "Whether mapping beats the source model is not known."


_BUT_MANY = ", but none is shown to keep all that matters of the target"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _ratio(value: float | None, as_ratio: bool) -> str:
    if value is None:
        return "undefined"
    return f"\u00d7{value:.3f}" if as_ratio else numbers.percent(value)


def _ratio_bounds(lower: float | None, upper: float | None, as_ratio: bool) -> str:
    if lower is None or upper is None:
        return ""
    if as_ratio:
        return f"{lower:.3f} to {upper:.3f}"
    return f"{numbers.percent(lower).removesuffix(' %')} to {numbers.percent(upper).removesuffix(' %')}"


def _number(value: float | None, missing: float = -1e300) -> float:
    return missing if value is None else float(value)
