"""Figures of a multi-turn handoff: a panel per protocol, the models alone in grey, an arm in one colour throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.reporting.plots import INK, MARKERS, NEUTRAL, PALETTE, Figure, draw
from kvbench.runs.measured import Handoff, HandoffTurn
from kvbench.stats import MIN_CLUSTERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

ALONE = ("target", "source")


def handoff_figures(found: Handoff) -> list[Figure]:
    """F1 by turn, and drift by turn, of what was measured.

    Turns that fewer than `kvbench.stats.MIN_CLUSTERS` conversations reach are in the data but not drawn, unless there are no others.
    """
    if not found.turns:
        return []
    reliable = [turn for turn in found.turns if turn.n >= MIN_CLUSTERS]
    note = f" Turns that at least {MIN_CLUSTERS} conversations reach." if 0 < len(reliable) < len(found.turns) else ""
    shown = reliable or list(found.turns)
    drift = "F1 of the target alone minus F1 of the arm: above zero, it loses. Bars are 95 % intervals, whole conversations resampled."
    return [
        _panels("handoff_f1", "F1 by turn", f"Mean F1 against the gold answers.{note}", found, shown, "F1, %", lambda t: 100 * t.f1),
        _panels(
            "handoff_drift",
            "Handoff drift by turn",
            drift + note,
            found,
            shown,
            "drift, points of F1",
            lambda t: None if t.drift is None else 100 * t.drift,
        ),
    ]


def _panels(
    name: str, title: str, caption: str, found: Handoff, shown: Sequence[HandoffTurn], label: str, value: Callable[[HandoffTurn], float | None]
) -> Figure:
    panels = [p for p in dict.fromkeys(t.protocol for t in shown) if p not in ALONE] or ["alone"]
    arms = [arm for arm in dict.fromkeys(t.arm for t in shown if value(t) is not None)]
    coloured = [arm for arm in arms if arm not in ALONE]
    drift = name == "handoff_drift"
    columns = min(2, len(panels))
    rows_of_panels = -(-len(panels) // columns)

    def paint(figure: MatplotlibFigure) -> None:
        # Two panels a row: the page scales every figure to one width, and text in a wider one would come out too small to read.
        grid = figure.subplots(rows_of_panels, columns, sharey=True, squeeze=False).flatten()
        for spare in grid[len(panels) :]:
            spare.set_axis_off()
        for axes, panel in zip(grid, panels, strict=False):
            if drift:
                axes.axhline(0, color=INK, linewidth=1)
            for arm in arms:
                turns = sorted((t for t in shown if t.arm == arm and t.protocol in (panel, arm)), key=lambda t: t.turn)
                if turns:
                    _line(axes, turns, value, _style(arm, coloured), _shift(arm, coloured), bars=drift and arm not in ALONE)
            axes.set_title(panel, fontsize=9)
            axes.set_xlabel("turn")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(True, axis="y")
            axes.set_axisbelow(True)
        grid[0].set_ylabel(label)
        handles = {str(line.get_label()): line for axes in grid for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
        figure.legend(
            handles=[handles[arm] for arm in arms if arm in handles], loc="outside upper left", ncols=5, handlelength=1.6, columnspacing=1.4
        )

    rows = [t.model_dump() for t in found.turns]
    return draw(name, title, caption, pd.DataFrame(rows), 3.2 * rows_of_panels, paint)


def _style(arm: str, coloured: Sequence[str]) -> tuple[str, str, str]:
    """Colour, line, marker."""
    if arm in ALONE:
        return NEUTRAL, "-" if arm == "target" else "--", "o" if arm == "target" else "s"
    index = coloured.index(arm)
    return PALETTE[index % len(PALETTE)], "-", MARKERS[(index + 2) % len(MARKERS)]


def _shift(arm: str, coloured: Sequence[str]) -> float:
    """Arms stand side by side at a turn, so that one does not hide another's interval."""
    return 0.0 if arm in ALONE else 0.12 * (coloured.index(arm) - (len(coloured) - 1) / 2)


def _line(
    axes: Axes, turns: Sequence[HandoffTurn], value: Callable[[HandoffTurn], float | None], style: tuple[str, str, str], shift: float, *, bars: bool
) -> None:
    colour, dash, marker = style
    points = [(t, y) for t in turns if (y := value(t)) is not None]
    x, label = [t.turn + shift for t, _ in points], points[0][0].arm
    axes.plot(x, [y for _, y in points], dash, color=colour, marker=marker, markersize=4, linewidth=1.6, label=label)
    if bars:
        # Bars, not bands: a turn may have no interval, and turns of `alternate` are not of one kind.
        for t, _ in points:
            if t.lower is not None and t.upper is not None:
                axes.plot([t.turn + shift] * 2, [100 * t.lower, 100 * t.upper], color=colour, linewidth=1.1, alpha=0.7)
