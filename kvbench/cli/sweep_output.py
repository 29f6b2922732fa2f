"""What `kvbench sweep` writes and prints: a table, csv, sweep.json for the report, a figure, the chosen recipe."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import BadInputError
from kvbench.mappers.recipes import ALIASES
from kvbench.mappers.sweep import CALIBRATION, ROWS, Fold, Trial

if TYPE_CHECKING:
    from kvbench.reporting.plots import Figure
    from kvbench.runs.measured import Sweep

SIZE = "parameters"


def named(settings: Mapping[str, str]) -> str:
    """Settings in one line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "the recipe as it is"


def write_sweep(
    out: Path,
    trials: Sequence[Trial],
    *,
    axes: Sequence[str],
    x: str | None,
    best: Mapping[str, Any],
    folds: Sequence[Fold],
    kept_out: Mapping[str, float],
) -> None:
    """Write sweep.csv, sweep.json, sweep.png, sweep.svg and recipe.yaml, and leave_one_out.csv and held_out_tasks.csv where there are any.

    Raises:
        BadInputError: `x` is no numeric axis.
    """
    from kvbench.runs.files import write_stored, write_whole
    from kvbench.storage import write_atomic

    stored = stored_sweep(trials, axes, x)
    figure = sweep_figure(stored)
    write_atomic(out / "sweep.csv", table(trials))
    write_stored(out / "sweep.json", stored)
    write_atomic(out / "sweep.svg", figure.svg)
    write_whole(out / "sweep.png", lambda path: path.write_bytes(figure.png))
    write_atomic(out / "recipe.yaml", recipe_yaml(best, trials))
    if folds:
        rows = [[f.task, named(f.settings), f.score, f.score_of_choice, f.moved] for f in folds]
        write_atomic(out / "leave_one_out.csv", _csv(["left_out", "choice_without_it", "its_score", "score_of_choice_of_all", "moved"], rows))
    if kept_out:
        write_atomic(out / "held_out_tasks.csv", _csv(["task", "accuracy"], [[task, score] for task, score in kept_out.items()]))


def table(trials: Sequence[Trial]) -> str:
    """All points as csv."""
    settings, figures = columns(trials)
    head = [*settings, *figures, "r2_k", "r2_v", "parameters", "seconds", "chosen", "failure"]
    rows = [
        [
            *(t.settings.get(name, "") for name in settings),
            *(t.scores.get(name, "") for name in figures),
            *("" if value is None else value for value in (t.r2_k, t.r2_v, t.parameters, t.seconds)),
            t.chosen,
            t.failure or "",
        ]
        for t in trials
    ]
    return _csv(head, rows)


def columns(trials: Sequence[Trial]) -> tuple[list[str], list[str]]:
    """Names of settings and of figures, in the order in which they appear."""
    return list(dict.fromkeys(n for t in trials for n in t.settings)), list(dict.fromkeys(n for t in trials for n in t.scores))


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def recipe_yaml(best: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """The chosen recipe as `kvbench fit --recipe FILE` reads it."""
    import yaml

    chosen = next(t for t in trials if t.chosen)
    figure = next(iter(chosen.scores))
    names = {field: name for name, field in ALIASES.items()}
    values = {names.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in best.items() if v is not None}
    head = f"# Chosen among {len(trials)} settings by {figure} ({chosen.scores[figure]:.4f}); calibrated on {chosen.calibration}.\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def stored_sweep(trials: Sequence[Trial], axes: Sequence[str], x: str | None) -> Sweep:
    """The sweep as the report reads it: one curve per combination of the settings that are not on the x axis.

    Raises:
        BadInputError: `x` is no numeric axis.
    """
    from kvbench.runs.measured import Sweep, SweepPoint

    done = [t for t in trials if t.score is not None]
    numeric = [name for name in [*axes, ROWS] if all(name in t.values for t in done)]
    # The axis with the most values leaves the fewest lines.
    axis = x or max(numeric, key=lambda name: len({t.values[name] for t in done}), default=SIZE)
    if axis != SIZE and axis not in numeric:
        raise BadInputError(f"--x {axis}; it is one of {', '.join([*numeric, SIZE])}")
    points = []
    for trial in done:
        # Rows and label name the same calibration, so the one goes with the other.
        left = {n: v for n, v in trial.settings.items() if n not in ({axis, ROWS, CALIBRATION} if axis == ROWS else {axis, ROWS})}
        value = float(trial.parameters or 0) if axis == SIZE else trial.values[axis]
        method = str((trial.recipe or {})["method"])
        curve = named(left) if left else method
        points.append(SweepPoint(recipe=curve, value=value, score=float(trial.score or 0.0), chosen=trial.chosen))
    values = [p.value for p in points]
    spread = min(values) > 0 and max(values) / min(values) >= 10
    return Sweep(parameter=axis, log_scale=spread, figure=next(iter(done[0].scores)), points=tuple(points))


def sweep_figure(found: Sweep) -> Figure:
    """Figure of merit over the swept parameter, one line per combination of the other settings."""
    from kvbench.reporting.curves import Curve, curves

    lines = []
    for number, recipe in enumerate(dict.fromkeys(p.recipe for p in found.points)):
        points = sorted((p for p in found.points if p.recipe == recipe), key=lambda p: p.value)
        ringed = next((i for i, p in enumerate(points) if p.chosen), None)
        lines.append(Curve(recipe, [p.value for p in points], [p.score for p in points], chosen=ringed, colour=number))
    height = max(3.2, 0.24 * len(lines) + 1.2)
    caption = "The ring marks the setting that was chosen."
    return curves(
        "sweep",
        f"{found.figure} over {found.parameter}",
        caption,
        lines,
        x_label=found.parameter,
        y_label=found.figure,
        log_x=found.log_scale,
        height_inches=height,
    )


def print_sweep(trials: Sequence[Trial], folds: Sequence[Fold], kept_out: Mapping[str, float]) -> None:
    """The table on stdout; what left-out and kept-out tasks say below it."""
    from rich.console import Console
    from rich.table import Table

    settings, figures = columns(trials)
    shown = Table()
    for name in (*settings, *figures, "K R2", "V R2", "parameters", "fit s", ""):
        shown.add_column(name, justify="right")
    for t in trials:
        cells = [f"{t.scores[n]:.4f}" if n in t.scores else "-" for n in figures]
        r2 = ["-" if value is None else f"{value:.4f}" for value in (t.r2_k, t.r2_v)]
        size = "-" if t.parameters is None else f"{t.parameters:,}"
        seconds = "-" if t.seconds is None else f"{t.seconds:.1f}"
        last = "chosen" if t.chosen else "failed" if t.failure else ""
        shown.add_row(*(t.settings.get(n, "") for n in settings), *cells, *r2, size, seconds, last)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(shown)
    if folds:
        console.print(f"leaving one task out moves the choice in {sum(f.moved for f in folds)} of {len(folds)} folds:")
        for f in folds:
            console.print(f"  without {f.task}: {named(f.settings)}; on it {f.score:.4f} (choice of all tasks {f.score_of_choice:.4f})")
    for task, score in kept_out.items():
        console.print(f"kept out of the choice: {task} {score:.4f}")
