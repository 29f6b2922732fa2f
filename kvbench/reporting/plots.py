"""The figures of a report: SVG, PNG and the data behind them. Colour-blind safe, labelled where the eye is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

INK, LINE = "#1f2328", "#d0d7de"
"""Text and rules; in the page they follow the theme."""
PALETTE = ("#0072b2", "#c44f00", "#00805d", "#a64d8a", "#8f6400", "#2f7fa8", "#6a5acd", "#7a5c2e")
"""Okabe-Ito hues, darkened until their names can be read on white; the page has a lighter set on near-black."""
NEUTRAL = "#6e7781"
AVERAGE = "average"
"""Row of a forest plot that is set apart."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
WIDTH_INCHES = 5.4
_RC = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: of its files.
        title: heading.
        caption: how to read it.
        svg: as stored: dark ink on nothing.
        png: on white.
        data: what is plotted.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes
    data: pd.DataFrame

    @property
    def inline(self) -> str:
        """The SVG for the page: ink and rules follow the theme, ids are its own."""
        body = self.svg[self.svg.index("<svg") :]
        body = body.replace(INK, "currentColor").replace(LINE, "var(--line)").replace(NEUTRAL, "var(--cn)")
        for number, colour in enumerate(PALETTE):
            body = body.replace(colour, f"var(--c{number})")
        body = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', body)
        body = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", body)
        body = re.sub(r'href="#([^"]+)"', rf'href="#{self.name}-\1"', body)
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        label = self.title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        return re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', body, count=1)


def draw(
    name: str,
    title: str,
    caption: str,
    data: pd.DataFrame,
    height_inches: float,
    paint: Callable[[MatplotlibFigure], None],
    *,
    width_inches: float = WIDTH_INCHES,
    footnote: str = "",
) -> Figure:
    """Paint a figure once and store it as SVG and PNG; the same input gives the same bytes. A footnote stays with the picture, unlike its caption."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context({**_RC, "svg.hashsalt": name}):
        figure = Canvas(figsize=(width_inches, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure)
        if footnote:
            figure.supxlabel(footnote, fontsize=8.5, color=INK, alpha=0.75, x=0.99, ha="right")
        vector, raster = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None, "Creator": "kvbench"})
        figure.savefig(raster, format="png", dpi=160, metadata={"Software": "kvbench"})
    return Figure(name, title, caption, vector.getvalue(), raster.getvalue(), data)


@dataclass(frozen=True)
class Bar:
    """One interval of a forest plot.

    Attributes:
        group: row label (task).
        series: arm.
        value: centre.
        lower: bound, None without an interval.
        upper: bound.
        margin: where the loss becomes material, in the same unit; None for none.
        mark: a second, hollow mark in the same row (the source alone); None for none.
    """

    group: str
    series: str
    value: float
    lower: float | None
    upper: float | None
    margin: float | None = None
    mark: float | None = None


def forest(name: str, title: str, caption: str, bars: Sequence[Bar], *, null: float, unit: str, mark_label: str = "", scale: float = 100.0) -> Figure:
    """Forest plot: a row per task and arm, the interval, the null line, the margin of each row."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    series = list(dict.fromkeys(bar.series for bar in bars))
    rows: list[tuple[float, Bar]] = []
    ticks: list[float] = []
    y = 0.0
    for group in groups:
        members = [bar for bar in bars if bar.group == group]
        ticks.append(y + 0.42 * (len(members) - 1) / 2)
        for bar in members:
            rows.append((y, bar))
            y += 0.42
        y += 0.45

    def paint(figure: MatplotlibFigure) -> None:
        axes = figure.add_subplot()
        axes.axvline(null * scale, color=INK, linewidth=1)
        for position, bar in rows:
            index = series.index(bar.series)
            colour = PALETTE[index % len(PALETTE)]
            if bar.lower is not None and bar.upper is not None:
                axes.plot([bar.lower * scale, bar.upper * scale], [position, position], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot([bar.value * scale], [position], MARKERS[index % len(MARKERS)], color=colour, markersize=6)
            if bar.margin is not None:
                axes.plot([bar.margin * scale] * 2, [position - 0.21, position + 0.21], color=INK, linewidth=1.2, linestyle=(0, (2, 1.5)))
            if bar.mark is not None:
                axes.plot([bar.mark * scale], [position], "|", color=NEUTRAL, markersize=10, markeredgewidth=2)
        axes.set_yticks(ticks, groups)
        if groups[-1] == AVERAGE and len(groups) > 1:
            axes.axhline(min(p for p, bar in rows if bar.group == AVERAGE) - 0.43, color=LINE, linewidth=1)
            axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.set_ylim(y - 0.3, -0.45)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.xaxis.grid(True)
        axes.set_axisbelow(True)
        axes.set_xlabel(unit)
        entries = [(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], arm) for i, arm in enumerate(series)]
        if mark_label:
            entries.append((NEUTRAL, "|", mark_label))
        if any(bar.margin is not None for bar in bars):
            entries.append((INK, "margin", "margin"))
        _key(axes, entries)

    data = pd.DataFrame([bar.__dict__ for bar in bars])
    return draw(name, title, caption, data, 0.95 + 0.42 * y / 0.62 * 0.42, paint)


def _key(axes: Axes, entries: Iterable[tuple[str, str, str]]) -> None:
    """A legend above the plot, in one line where it fits."""
    from matplotlib.lines import Line2D

    handles = []
    for colour, marker, label in entries:
        if marker == "margin":
            handles.append(Line2D([], [], color=colour, linestyle=(0, (2, 1.5)), linewidth=1.2, label=label))
        else:
            width = 2.0 if marker == "|" else 1.0
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=7, markeredgewidth=width, label=label))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, handletextpad=0.3, columnspacing=1.4, borderaxespad=0.2)


@dataclass(frozen=True)
class Flips:
    """Won and lost items of one arm on one task.

    Attributes:
        task: row.
        arm: under test.
        won: right in the arm only.
        lost: right in the reference only.
    """

    task: str
    arm: str
    won: int
    lost: int


def flips(flipped: Sequence[Flips], reference: str) -> Figure:
    """Diverging bars: lost to the left, won to the right, a row per task and arm."""
    rows = list(flipped)
    several = len({row.arm for row in rows}) > 1
    labels = [f"{row.task}  {row.arm}" if several else row.task for row in rows]

    def paint(figure: MatplotlibFigure) -> None:
        axes = figure.add_subplot()
        positions = list(range(len(rows)))
        axes.barh(positions, [-row.lost for row in rows], color=PALETTE[1], height=0.6)
        axes.barh(positions, [row.won for row in rows], color=PALETTE[0], height=0.6)
        widest = max([1, *(max(row.won, row.lost) for row in rows)])
        for position, row in enumerate(rows):
            axes.text(-row.lost - 0.02 * widest, position, str(row.lost), ha="right", va="center")
            axes.text(row.won + 0.02 * widest, position, str(row.won), ha="left", va="center")
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(positions, labels)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(-1.16 * widest, 1.16 * widest)
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.text(-0.02 * widest, -0.75, "items lost", ha="right", va="bottom", color=PALETTE[1], fontweight="bold")
        axes.text(0.02 * widest, -0.75, "items won", ha="left", va="bottom", color=PALETTE[0], fontweight="bold")

    caption = f"Items that only one side got right, against {reference}. Equal totals can hide opposite flips."
    data = pd.DataFrame([row.__dict__ for row in rows])
    return draw("flips", f"Won and lost against {reference}", caption, data, 0.6 + 0.27 * len(rows), paint)
