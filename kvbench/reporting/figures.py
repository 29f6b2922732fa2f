"""Which figures a comparison has, and what each of them shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvbench.reporting.curves import Curve, curves, scatter
from kvbench.reporting.diagnostics_figures import diagnostics_figures
from kvbench.reporting.handoff_panels import handoff_figures
from kvbench.reporting.latency_figures import latency_only_figures
from kvbench.reporting.plots import AVERAGE, Bar, Figure, Flips, flips, forest
from kvbench.reporting.view import Comparison, PairView, TaskView
from kvbench.runs.measured import Diagnostics, Latency, Sweep


def forest_figure(comparison: Comparison) -> Figure | None:
    """Retention by task and mapper, with the margin of each row and the source alone."""
    bars = []
    for task in comparison.primary_tasks:
        for arm in comparison.mappers:
            pair = comparison.pair(task.id, arm, comparison.reference_arm)
            source = comparison.source_arm and comparison.pair(task.id, comparison.source_arm, comparison.reference_arm)
            bar = _kept(comparison, task, pair)
            if bar is None or pair is None:
                continue
            alone = _kept(comparison, task, source) if source else None
            bars.append(Bar(task.task, arm, *bar, margin=_margin(comparison, task, pair), mark=alone[0] if alone else None))
    for arm in comparison.mappers:
        average = comparison.average(arm, comparison.reference_arm)
        if average is not None and len(average.tasks) > 1 and average.retention.value is not None:
            bars.append(Bar(AVERAGE, arm, average.retention.value, average.retention.lower, average.retention.upper))
    if not bars:
        return None
    nll = any(task.kind == "nll" for task in comparison.primary_tasks)
    caption = (
        f"Score of the arm over the score of {comparison.reference_arm}, with {comparison.policy.level * 100:.4g} % intervals. "
        "The dashed tick is the margin; "
        "what an interval means against it is decided on the difference (table)."
        + (f" Perplexity tasks show {comparison.reference_arm} / arm, so that right is better too." if nll else "")
    )
    label = f"{comparison.source_arm} alone" if comparison.source_arm else ""
    unit = f"% of {comparison.reference_arm} kept"
    return forest("retention", "What is kept", caption, bars, null=1.0, unit=unit, mark_label=label)


def source_figure(comparison: Comparison) -> Figure | None:
    """Difference to the source alone."""
    source = comparison.source_arm
    if source is None:
        return None
    bars = []
    for task in comparison.primary_tasks:
        for arm in comparison.mappers:
            pair = comparison.pair(task.id, arm, source)
            if pair is not None and task.fraction and pair.difference.value is not None:
                bars.append(Bar(task.task, arm, pair.difference.value, pair.difference.lower, pair.difference.upper))
    for arm in comparison.mappers:
        average = comparison.average(arm, source)
        if average is not None and len(average.tasks) > 1 and average.difference.value is not None:
            bars.append(Bar(AVERAGE, arm, average.difference.value, average.difference.lower, average.difference.upper))
    if not bars:
        return None
    caption = f"Score of the mapper minus score of {source}, in percentage points. Left of zero, keeping the small model is better."
    return forest("against_source", f"Against {source} alone", caption, bars, null=0.0, unit=f"percentage points above {source} alone")


def flips_figure(comparison: Comparison) -> Figure | None:
    """Won and lost items against the target."""
    rows = [
        Flips(task.task, arm, pair.won, pair.lost)
        for task in comparison.primary_tasks
        if task.kind == "accuracy"
        for arm in comparison.mappers
        if (pair := comparison.pair(task.id, arm, comparison.reference_arm)) is not None and pair.won is not None and pair.lost is not None
    ]
    return flips(rows, comparison.reference_arm) if rows else None


def sweep_figure(found: Sweep, comparison: Comparison) -> Figure:
    """Figure of merit over the swept parameter."""
    lines: list[Curve] = []
    for recipe in dict.fromkeys(point.recipe for point in found.points):
        points = sorted((p for p in found.points if p.recipe == recipe), key=lambda p: p.value)
        chosen = next((i for i, p in enumerate(points) if p.chosen), None)
        lower, upper = [p.lower for p in points], [p.upper for p in points]
        colour = _colour_of(recipe, comparison, default=len(comparison.mappers) + len(lines))
        lines.append(Curve(recipe, [p.value for p in points], [p.score for p in points], lower, upper, chosen, colour))
    caption = "The ring marks the setting that was chosen."
    return curves(
        "sweep", f"{found.figure} over {found.parameter}", caption, lines, x_label=found.parameter, y_label=found.figure, log_x=found.log_scale
    )


def latency_figures(found: Latency, comparison: Comparison) -> list[Figure]:
    """Latency over length, and score against latency."""
    figures = latency_only_figures(found, lambda arm: _colour_of(arm, comparison))
    batch = found.batches()[0]
    longest = found.lengths(batch)[-1]
    at = {
        ("target" if p.arm == "re-prefill" else p.arm): 1000 * p.p50_seconds
        for p in found.points
        if (p.tokens, p.batch) == (longest, batch) and not p.cold and not p.error
    }
    scores = {arm: average.arm_score for arm in comparison.mappers if (average := comparison.average(arm, comparison.reference_arm)) is not None}
    reference = next((average.reference_score for average in comparison.averages if average.reference == comparison.reference_arm), None)
    scores[comparison.reference_arm] = reference
    points_ = [(arm, at[arm], 100 * score, _colour_of(arm, comparison)) for arm, score in scores.items() if score is not None and arm in at]
    if len(points_) > 1:
        caption = f"Mean score of the tasks against the median time to the first token at {longest:,} tokens, warm. Up and left is better. {found.conditions}."
        figures.append(
            scatter(
                "accuracy_latency",
                "Accuracy against latency",
                caption,
                points_,
                x_label=f"milliseconds at {longest:,} tokens",
                y_label="mean score, %",
            )
        )
    return figures


def _diagnostics(found: Diagnostics | None, comparison: Comparison) -> list[Figure]:
    if found is None:
        return []
    others = [arm for arm in found.arms() if arm not in comparison.mappers and arm != "source"]
    # Arms that the run does not have get the colours behind those of its mappers.
    return diagnostics_figures(found, lambda arm: _colour_of(arm, comparison, len(comparison.mappers) + others.index(arm) if arm in others else None))


def _colour_of(arm: str, comparison: Comparison, default: int | None = None) -> int | None:
    """An arm has one colour in all figures; target, source and re-prefill are grey."""
    return comparison.mappers.index(arm) if arm in comparison.mappers else default


def _kept(comparison: Comparison, task: TaskView, pair: PairView | None) -> tuple[float, float | None, float | None] | None:
    """Retention and its bounds; for perplexities reference / arm."""
    if pair is None:
        return None
    if task.kind != "nll":
        kept = pair.retention
        return None if kept.value is None else (kept.value, kept.lower, kept.upper)
    ratio = pair.perplexity_ratio
    if ratio is None or not ratio.value:
        return None
    return 1 / ratio.value, (1 / ratio.upper if ratio.upper else None), (1 / ratio.lower if ratio.lower else None)


def _margin(comparison: Comparison, task: TaskView, pair: PairView) -> float | None:
    """The margin on the scale of retention: the reference's score being fixed, a loss of `margin` is this share."""
    if task.kind == "nll":
        return math.exp(-pair.margin)
    floor = comparison.policy.floor(task.task)
    if floor is not None and task.higher_is_better:
        return floor
    score = comparison.score(task.id, pair.reference).score.value
    return None if not score else 1 - pair.margin / score


def all_figures(comparison: Comparison) -> dict[str, Sequence[Figure]]:
    """Figures by section of the page; a section without data has none."""
    found: dict[str, list[Figure]] = {"diagnostics": [], "sweep": [], "latency": [], "handoff": []}
    for name, figure in (
        ("retention", forest_figure(comparison)),
        ("source", source_figure(comparison)),
        ("flips", flips_figure(comparison)),
    ):
        found[name] = [figure] if figure is not None else []
    for number, extras in enumerate(comparison.extras):
        here: dict[str, list[Figure]] = {"diagnostics": _diagnostics(extras.diagnostics, comparison)}
        here["sweep"] = [sweep_figure(extras.sweep, comparison)] if extras.sweep is not None and extras.sweep.points else []
        here["latency"] = latency_figures(extras.latency, comparison) if extras.latency is not None and extras.latency.points else []
        here["handoff"] = handoff_figures(extras.handoff) if extras.handoff is not None else []
        for section, figures in here.items():
            found[section] += [replace(figure, name=f"{figure.name}_run{number + 1}") if number else figure for figure in figures]
    return dict(found)
