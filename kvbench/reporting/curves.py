"""Figures of curves, heatmaps and points: what the optional measurements of a run show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.reporting.plots import INK, MARKERS, NEUTRAL, PALETTE, Figure, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MatplotlibFigure


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        label: at its end.
        x: values.
        y: values.
        lower: bounds, None for none.
        upper: bounds.
        chosen: index of a point to ring, None for none.
        colour: index into the palette, the same for an arm in every figure; None draws in grey.
        dashed: a variant of another line of that colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    lower: Sequence[float | None] | None = None
    upper: Sequence[float | None] | None = None
    chosen: int | None = None
    colour: int | None = None
    dashed: bool = False


def curves(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
    rule: float | None = None,
    height_inches: float = 3.2,
    footnote: str = "",
) -> Figure:
    """Lines with their names at the right end and, where known, bands; `rule` draws a line across at a value."""

    def paint(figure: MatplotlibFigure) -> None:
        axes = figure.add_subplot()
        if zero or rule is not None:
            axes.axhline(rule or 0, color=INK, linewidth=1)
        for index, line in enumerate(lines):
            colour, style = _colour(line.colour), "--" if line.dashed else "-"
            axes.plot(line.x, line.y, style, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4.5, linewidth=1.8)
            if line.lower and line.upper and all(b is not None for b in (*line.lower, *line.upper)):
                axes.fill_between(line.x, [b or 0.0 for b in line.lower], [b or 0.0 for b in line.upper], color=colour, alpha=0.15, linewidth=0)
            if line.chosen is not None:
                axes.plot([line.x[line.chosen]], [line.y[line.chosen]], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)
        if log_x:
            axes.set_xscale("log")
            _plain(axes.xaxis)
        asked = sorted({x for line in lines for x in line.x})
        if len(asked) <= 8:
            # Few settings: name them, instead of decades or of values in between that nobody tried.
            axes.set_xticks(asked, [f"{x:,.6g}" for x in asked])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
            _plain(axes.yaxis)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(True, axis="y")
        axes.set_axisbelow(True)
        _end_labels(axes, lines, log_y=log_y)

    rows = []
    for line in lines:
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            lower, upper = (bounds[i] if bounds else None for bounds in (line.lower, line.upper))
            rows.append({"series": line.label, "x": x, "y": y, "lower": lower, "upper": upper})
    return draw(name, title, caption, pd.DataFrame(rows), height_inches, paint, footnote=footnote)


def _end_labels(axes: Axes, lines: Sequence[Curve], *, log_y: bool) -> None:
    """Names at the line ends, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    height = (lambda v: math.log(v)) if log_y else (lambda v: v)
    span = height(high) - height(low)
    ends = sorted(((height(line.y[-1]) - height(low)) / span, index) for index, line in enumerate(lines) if len(line.y))
    spot = -1.0
    for fraction, index in ends:
        spot = max(fraction, spot + 0.07)
        colour = _colour(lines[index].colour)
        axes.annotate(lines[index].label, (1.0, spot), xycoords="axes fraction", xytext=(6, 0), textcoords="offset points", color=colour, va="center")


def _plain(axis: Axis) -> None:
    """Whole numbers instead of powers of ten; a name with a dollar sign must not become a formula."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    # Over more than four decades a label at every 1 and 3 would collide.
    axis.set_major_locator(LogLocator(subs=(1.0,) if low > 0 and high / low > 1e4 else (1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(index: int | None) -> str:
    return NEUTRAL if index is None else PALETTE[index % len(PALETTE)]


def heatmaps(name: str, title: str, caption: str, panels: Sequence[tuple[str, Sequence[Sequence[float | None]]]]) -> Figure:
    """R2 heatmaps `[source layer][target layer]`, one panel each, one colour scale from 0 to 1."""

    def paint(figure: MatplotlibFigure) -> None:
        from matplotlib.ticker import MaxNLocator

        image = None
        grids = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (label, matrix) in zip(grids, panels, strict=True):
            cells = [[math.nan if v is None else v for v in row] for row in matrix]
            image = axes.imshow(cells, vmin=0, vmax=1, cmap="cividis", origin="lower", aspect="auto", interpolation="nearest")
            axes.set_title(label, fontsize=10)
            axes.set_xlabel("target layer")
            axes.set_ylabel("source layer")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
        if image is not None:
            figure.colorbar(image, ax=list(grids), label="held-out R\u00b2", shrink=0.9)

    rows = [
        {"panel": label, "source_layer": s, "target_layer": t, "r2": value}
        for label, matrix in panels
        for s, row in enumerate(matrix)
        for t, value in enumerate(row)
    ]
    return draw(name, title, caption, pd.DataFrame(rows), 3.1, paint)


def scatter(name: str, title: str, caption: str, points: Sequence[tuple[str, float, float, int | None]], *, x_label: str, y_label: str) -> Figure:
    """Named points."""

    def paint(figure: MatplotlibFigure) -> None:
        axes = figure.add_subplot()
        for index, (label, x, y, colour) in enumerate(points):
            axes.plot([x], [y], MARKERS[index % len(MARKERS)], color=_colour(colour), markersize=8)
            axes.annotate(label, (x, y), xytext=(7, 5), textcoords="offset points")
        axes.set_xscale("log")
        _plain(axes.xaxis)
        axes.margins(x=0.18, y=0.18)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(True)
        axes.set_axisbelow(True)

    return draw(name, title, caption, pd.DataFrame([point[:3] for point in points], columns=["arm", "x", "y"]), 3.2, paint)
