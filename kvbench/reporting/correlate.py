"""Does any diagnostic predict what is kept? Correlations of diagnostic figures with measured outcomes over arms and pairs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from kvbench.errors import BadInputError, KVBenchError
from kvbench.paths import mappers_directory
from kvbench.reporting.comparison import compare
from kvbench.reporting.view import Estimate, Policy
from kvbench.runs.files import read_stored
from kvbench.runs.measured import FIGURE_NAMES, Diagnostics
from kvbench.runs.schema import Provenance, Role, RunSpec, Stored
from kvbench.runs.sources import ComparableRun, load_runs
from kvbench.stats import Undefined, fisher_interval, pearson, spearman
from kvbench.storage import dump_json, read_manifest

Against: TypeAlias = Literal["retention", "difference", "nll"]
CALIBRATION = ("calibration_r2_keys", "calibration_r2_values", "calibration_r2")
"""Held-out R2 of the fit, mean over target layers, from the artifact: keys, values, and their mean."""
LOWER_IS_BETTER = frozenset(
    ("relative_error_keys", "relative_error_keys_rotated", "relative_error_values", "k_concentration", "v_concentration", "kl_nats", "nll_difference")
)
AVERAGE = "average"
PAPER = {"n": 12, "attention": 0.57, "r2": -0.20}
"""arXiv:2608.03893: r with HellaSwag retention over 12 directions, of the attention-output cosine and of the calibration R2."""
FEW, FEW_ITEMS = 12, 200
"""Below: warned of."""
MEASURES: dict[Against, str] = {
    "retention": "score of the arm / score of the target",
    "difference": "score of the arm minus score of the target",
    "nll": "negative log-likelihood of the arm minus the target's, nats per token (lower is better)",
}


class Point(Stored):
    """One arm of one pair."""

    pair: str
    """source -> target."""
    arm: str
    """Its name."""
    role: Role
    """mapper or control."""
    run: str
    """Directory of its scores."""
    figures: dict[str, float]
    """Diagnostic figures by name."""
    outcomes: dict[str, float]
    """What was measured, by task, and 'average' over tasks."""


class CorrelationRow(Stored):
    """One correlation."""

    figure: str
    """Diagnostic."""
    lower_is_better: bool
    """Whether a small value of the figure is the good one: then a useful figure correlates negatively with retention."""
    outcome: str
    """Task, or average."""
    points: Literal["mappers", "mappers and controls"]
    """Which arms."""
    scope: str
    """'across' all points; 'within pairs': each pair's mean taken off; or one pair's name."""
    kind: Literal["pearson", "spearman"]
    """Coefficient."""
    n: int
    """Points."""
    pairs: int
    """Pairs of models they come from."""
    r: Estimate
    """Coefficient with its interval, or the reason why there is none."""
    p: float | None = None
    """Two-sided, unadjusted; None where it has none."""


class Correlations(Stored):
    """The file correlation.json, written by `kvbench correlate`."""

    format: Literal["kvbench-correlation"] = "kvbench-correlation"
    """Marks the file."""
    version: int = 1
    """Schema version."""
    against: Against
    """retention, difference or nll."""
    prefix: int | None = None
    """Context tokens of the diagnostics; None took the shortest of each."""
    points: tuple[Point, ...]
    """What it rests on."""
    rows: tuple[CorrelationRow, ...]
    """All correlations."""
    warnings: tuple[str, ...]
    """What a reader must know before quoting a number."""
    command: str = ""
    """Regenerates the file."""
    provenance: Provenance | None = None
    """How it was made."""

    def row(
        self, figure: str, outcome: str = AVERAGE, *, points: str = "mappers", scope: str = "across", kind: str = "pearson"
    ) -> CorrelationRow | None:
        """One correlation, if it was made."""
        wanted = (figure, outcome, points, scope, kind)
        return next((r for r in self.rows if (r.figure, r.outcome, r.points, r.scope, r.kind) == wanted), None)


@dataclass
class _Found:
    """What lies at the given paths."""

    runs: list[ComparableRun] = field(default_factory=list)
    specs: dict[str, RunSpec] = field(default_factory=dict)
    diagnostics: list[tuple[Path, Diagnostics]] = field(default_factory=list)
    items: dict[str, int] = field(default_factory=dict)
    """Fewest items by task, of tasks scored by accuracy."""


def correlate(
    paths: Sequence[Path],
    against: Against = "retention",
    *,
    prefix: int | None = None,
    tasks: Sequence[str] | None = None,
    figures: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    level: float = 0.95,
) -> Correlations:
    """Correlate every diagnostic figure with every outcome.

    Args:
        paths: runs, with diagnostics.json beside them or in further directories that `kvbench diagnose` wrote.
        against: what is to be predicted.
        prefix: context tokens of the diagnostics; None takes the shortest of each.
        tasks: only these.
        figures: only these diagnostic figures.
        leave_out: arms that are not counted, in any run.
        level: coverage of the intervals.

    Raises:
        BadInputError: runs without diagnostics, without the outcome, or too few points.
    """
    if figures is not None and (unknown := [f for f in figures if f not in (*FIGURE_NAMES, *CALIBRATION)]):
        raise BadInputError(f"figure '{unknown[0]}' is unknown; there are {', '.join((*CALIBRATION, *FIGURE_NAMES))}")
    found = _read(paths)
    names_of_arms = {arm.name for run in found.runs for arm in run.arms}
    if unknown := [name for name in leave_out if name not in names_of_arms]:
        raise BadInputError(f"there is no arm '{unknown[0]}' to leave out; there are {', '.join(sorted(names_of_arms))}")
    points, notes = _points(found, against, prefix, tasks, figures, leave_out)
    notes += [
        f"{task} has {n} items: every score on it carries a standard error of up to {50 / math.sqrt(n):.0f} percentage points, noise that no figure can predict"
        for task, n in found.items.items()
        if n < FEW_ITEMS
    ]
    if leave_out:
        notes.append(f"left out as asked: {', '.join(leave_out)}")
    names = [f for f in (*CALIBRATION, *FIGURE_NAMES) if any(f in p.figures for p in points)]
    outcomes = list(dict.fromkeys(name for p in points for name in p.outcomes))
    outcomes.sort(key=lambda name: name != AVERAGE)
    rows = [row for figure in names for outcome in outcomes for row in _rows(points, figure, outcome, level)]
    return Correlations(
        against=against,
        prefix=prefix,
        points=tuple(points),
        rows=tuple(rows),
        warnings=(*_warnings(points, names, outcomes, rows), *notes),
    )


def _read(paths: Sequence[Path]) -> _Found:
    found = _Found()
    for path in paths:
        if (path / "spec.json").is_file():
            runs = load_runs(path)
            found.runs += runs
            for run in runs:
                found.specs[str(run.path)] = read_stored(run.path / "spec.json", RunSpec)
                if run.extras.diagnostics is not None:
                    found.diagnostics.append((run.path, run.extras.diagnostics))
        elif (path / "diagnostics.json").is_file():
            found.diagnostics.append((path, read_stored(path / "diagnostics.json", Diagnostics)))
        elif (path / "sweep.json").is_file():
            raise BadInputError(
                f"'{path}' is a sweep: it holds no target's score, so nothing is kept or lost there; fit its settings, evaluate them as mappers of one run, and give that run"
            )
        else:
            raise BadInputError(f"'{path}' is neither a run of 'kvbench evaluate' nor a directory of 'kvbench diagnose'; check the path")
    if not found.runs:
        raise BadInputError("none of the paths is a run of 'kvbench evaluate'; a correlation needs scores as well as diagnostics")
    return found


def _points(
    found: _Found, against: Against, prefix: int | None, tasks: Sequence[str] | None, figures: Sequence[str] | None, leave_out: Sequence[str]
) -> tuple[list[Point], list[str]]:
    points: list[Point] = []
    bare: list[str] = []
    notes: list[str] = []
    for run in found.runs:
        pair = f"{_short(run.source)} -> {_short(run.target)}"
        measured = [d for path, d in found.diagnostics if path == run.path] or [
            d for _, d in found.diagnostics if (d.source, d.target) == (run.source, run.target)
        ]
        roles = {arm.name: arm for arm in run.arms}
        tried = [arm for arm in run.arms if arm.role in ("mapper", "control") and arm.name not in leave_out]
        if not measured:
            bare.append(f"'{run.path}': {_command(run, [a.name for a in tried if a.role == 'mapper'])}")
            continue
        missing = []
        for arm in tried:
            shown = _figures(measured, arm.name, prefix)
            if not shown:
                missing.append(arm.name)
                continue
            shown |= _calibration(arm.mapper, found.specs.get(str(run.path)), arm.name, run.path)
            outcomes = _outcomes(run, arm.name, against, tasks, found.items)
            kept = {k: v for k, v in shown.items() if figures is None or k in figures}
            if kept and outcomes:
                points.append(Point(pair=pair, arm=arm.name, role=roles[arm.name].role, run=str(run.path), figures=kept, outcomes=outcomes))
        if missing:
            notes.append(f"{pair}: no diagnostics of {', '.join(missing)}; left out")
    if bare:
        raise BadInputError("no diagnostics for " + "; ".join(bare))
    if not points:
        what = "a task scored by negative log-likelihood" if against == "nll" else "a task with scores where higher is better"
        raise BadInputError(f"there is nothing to correlate: no arm has both a diagnostic figure and {what}; name other runs, --against or --prefix")
    return points, notes


def _command(run: ComparableRun, mappers: Sequence[str]) -> str:
    specs = {arm.name: arm.mapper for arm in run.arms}
    given = " ".join(f"--mapper {name}={specs[name]}" for name in mappers)
    return f"kvbench diagnose {run.source} {run.target} {given} --data TEXT --out {run.path}"


def _figures(measured: Sequence[Diagnostics], arm: str, prefix: int | None) -> dict[str, float]:
    for diagnostics in measured:
        found = {name: figure.value for name in FIGURE_NAMES if (figure := diagnostics.figure(arm, name, prefix)) is not None}
        if found:
            return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    return {}


def _calibration(mapper: str | None, spec: RunSpec | None, arm: str, run: Path) -> dict[str, float]:
    """Held-out R2 of an artifact, if it still is the one that was evaluated; a screen's runs name theirs as seen from the run."""
    pins = {a.name: a.pin for a in spec.arms} if spec else {}
    place = Path(mapper or "")
    if mapper is not None and not (place / "manifest.json").is_file():
        place = run / mapper
    if mapper is not None and mapper.startswith("embedded:"):
        place = mappers_directory() / "artifacts" / mapper.replace(":", "-")
    if mapper is None or not (place / "manifest.json").is_file():
        return {}
    try:
        manifest = read_manifest(place, "mapper")
    except KVBenchError:
        return {}
    wanted = (pins.get(arm) or {}).get("manifest")
    if wanted is not None and wanted != hashlib.sha256(dump_json(manifest).encode()).hexdigest():
        return {}
    out = {}
    for name, key in ((CALIBRATION[0], "r2_k_heldout"), (CALIBRATION[1], "r2_v_heldout")):
        values = [v for v in manifest.get("fit", {}).get(key) or [] if v is not None]
        if values:
            out[name] = sum(values) / len(values)
    if len(out) == 2:
        out[CALIBRATION[2]] = sum(out.values()) / 2
    return out


def _outcomes(run: ComparableRun, arm: str, against: Against, tasks: Sequence[str] | None, items: dict[str, int]) -> dict[str, float]:
    """Outcome by task, from the comparison of this arm with the target alone."""
    # Points need no intervals of their own, so as few resamples as the policy takes.
    target = next((a.name for a in run.arms if a.role == "target"), None)
    if target is None:
        raise BadInputError(f"the run at '{run.path}' has no arm 'target', so nothing is known to be kept; evaluate with it")
    comparison = compare([run], Policy(resamples=1_000), arms=[target, arm], tasks=tasks).comparison
    out: dict[str, float] = {}
    for task in comparison.primary_tasks:
        pair = comparison.pair(task.id, arm, target)
        if pair is None or (task.kind == "nll") != (against == "nll") or (against != "nll" and not task.higher_is_better):
            continue
        value = pair.retention.value if against == "retention" else pair.difference.value
        if value is not None:
            out[task.task] = value
            if task.kind == "accuracy":
                items[task.task] = min(task.n, items.get(task.task, task.n))
    if out:
        out[AVERAGE] = sum(out.values()) / len(out)
    return out


def _short(name: str | None) -> str:
    """Enough of a model's name to know it by: the last two parts of a path."""
    return "/".join(Path(name).parts[-2:]) if name and name.startswith(("/", ".")) else name or "unknown"


def _rows(points: Sequence[Point], figure: str, outcome: str, level: float) -> list[CorrelationRow]:
    rows = []
    groups: tuple[Literal["mappers", "mappers and controls"], ...] = ("mappers", "mappers and controls")
    for group in groups:
        chosen = [p for p in points if figure in p.figures and outcome in p.outcomes and (group != "mappers" or p.role == "mapper")]
        if group != "mappers" and all(p.role == "mapper" for p in chosen):
            continue
        pairs = list(dict.fromkeys(p.pair for p in chosen))
        if not chosen:
            continue
        x, y = np.array([p.figures[figure] for p in chosen]), np.array([p.outcomes[outcome] for p in chosen])
        which = np.array([pairs.index(p.pair) for p in chosen])
        for kind in ("pearson", "spearman"):
            rows.append(_row(figure, outcome, group, "across", kind, x, y, len(pairs), level))
            if len(pairs) > 1 and len(chosen) > len(pairs):
                rows.append(_row(figure, outcome, group, "within pairs", kind, *_centred(x, y, which, ranks=kind == "spearman"), len(pairs), level))
                for number, name in enumerate(pairs):
                    here = which == number
                    if here.sum() >= 4:
                        rows.append(_row(figure, outcome, group, name, kind, x[here], y[here], 1, level))
    return rows


def _centred(x: np.ndarray, y: np.ndarray, which: np.ndarray, *, ranks: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values (or ranks within the pair, scaled to its size) minus their pair's mean."""
    out = []
    for column in (x, y):
        moved = np.empty_like(column, dtype=float)
        for number in np.unique(which):
            here = which == number
            values = pd.Series(column[here]).rank().to_numpy() / here.sum() if ranks else column[here]
            moved[here] = values - values.mean()
        out.append(moved)
    return out[0], out[1]


def _row(
    figure: str,
    outcome: str,
    group: Literal["mappers", "mappers and controls"],
    scope: str,
    kind: str,
    x: np.ndarray,
    y: np.ndarray,
    pairs: int,
    level: float,
) -> CorrelationRow:
    name: Literal["pearson", "spearman"] = "pearson" if kind == "pearson" else "spearman"
    within = scope == "within pairs"
    # Centred ranks are correlated as they are: ranking them again would undo the centring.
    found = pearson(x, y, level=level) if name == "pearson" or within else spearman(x, y, level=level)
    value, interval, p = found.value, found.interval, found.p
    if within and not isinstance(value, Undefined):
        # Each pair's mean costs one degree of freedom.
        interval, p = fisher_interval(float(value), len(x) - pairs + 1, level=level), Undefined("points within pairs")
    return CorrelationRow(
        figure=figure,
        lower_is_better=figure in LOWER_IS_BETTER,
        outcome=outcome,
        points=group,
        scope=scope,
        kind=name,
        n=len(x),
        pairs=pairs,
        r=Estimate.of(value, interval),
        p=None if isinstance(p, Undefined) else float(p),
    )


def _warnings(points: Sequence[Point], names: Sequence[str], outcomes: Sequence[str], rows: Sequence[CorrelationRow]) -> list[str]:
    mappers = [p for p in points if p.role == "mapper"]
    pairs = list(dict.fromkeys(p.pair for p in mappers))
    told = [f"{len(mappers)} mapper points from {len(pairs)} ordered pairs, {len(points) - len(mappers)} control points"]
    undirected = {frozenset(p.split(" -> ")) for p in pairs}
    if len(undirected) < len(pairs):
        couples = "couple" if len(undirected) == 1 else "couples"
        told.append(
            f"the {len(pairs)} ordered pairs come from {len(undirected)} {couples} of models, both directions of one: they share models, text and items"
        )
    if len(mappers) > len(pairs):
        told.append(
            f"not independent: about {len(mappers) / max(1, len(pairs)):.0f} mappers stand for each pair, so the intervals 'across' are too narrow, and a difference between "
            "pairs can pass for a correlation; read 'within pairs' for 'which mapper of this pair', and the number of pairs for 'which pair'"
        )
    if len(mappers) < FEW:
        told.append(f"n = {len(mappers)}: fewer points than the paper's {FEW}, whose interval for r = +0.57 was -0.01 to 0.86")
    if any(p.role == "control" for p in points):
        told.append(
            "with controls, a figure is asked to tell broken from working, which is easier than to rank working mappers; 'mappers' asks the latter"
        )
    tested = sum(1 for r in rows if r.points == "mappers" and r.scope == "across" and r.kind == "pearson" and r.outcome == AVERAGE)
    if tested > 1:
        told.append(f"{tested} figures are correlated with the same outcome; the p-values are not adjusted for that")
    return told


def correlations_frame(found: Correlations) -> pd.DataFrame:
    """One row per correlation."""
    columns = ("figure", "lower_is_better", "outcome", "points", "scope", "kind", "n", "pairs")
    return pd.DataFrame(
        [{**{c: getattr(r, c) for c in columns}, "r": r.r.value, "lower": r.r.lower, "upper": r.r.upper, "p": r.p, "reason": r.r.reason or r.r.interval_reason} for r in found.rows]
    )  # fmt: skip


def points_frame(found: Correlations) -> pd.DataFrame:
    """One row per arm and pair: figures, then outcomes."""
    return pd.DataFrame(
        [{"pair": p.pair, "arm": p.arm, "role": p.role, **p.figures, **{f"outcome {k}": v for k, v in p.outcomes.items()}, "run": p.run} for p in found.points]
    )  # fmt: skip
