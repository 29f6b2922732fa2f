"""Scatters of diagnostic figures against what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.reporting.correlate import AVERAGE, Correlations, Point
from kvbench.reporting.plots import INK, MARKERS, NEUTRAL, PALETTE, Figure, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

SHOWN = (
    "attention_cosine_native",
    "attention_cosine_propagated",
    "calibration_r2",
    "r2_keys",
    "r2_values",
    "kl_nats",
    "top1_agreement",
    "nll_difference",
    "greedy_agreement",
)
"""Figures that get a scatter of their own."""
_OFFSETS = ((6, 3), (6, -9), (-6, 3), (-6, -9), (6, 10), (6, -16), (-6, 10), (-6, -16), (0, 15), (0, -21))


def correlation_figures(found: Correlations) -> list[Figure]:
    """One scatter per shown figure that the points have."""
    return [scatter_figure(found, name) for name in SHOWN if any(name in p.figures for p in found.points)]


def scatter_figure(found: Correlations, figure: str, outcome: str = AVERAGE) -> Figure:
    """Named points: mappers filled, controls hollow, one colour and marker per pair."""
    points = [p for p in found.points if figure in p.figures and outcome in p.outcomes]
    pairs = list(dict.fromkeys(p.pair for p in points))
    row, within = found.row(figure, outcome), found.row(figure, outcome, scope="within pairs")
    told = []
    for name, r in (("mappers, all pairs", row), ("mappers, within pairs", within)):
        if r is not None and r.r.value is not None:
            bounds = f" [{r.r.lower:+.2f}, {r.r.upper:+.2f}]" if r.r.lower is not None and r.r.upper is not None else ""
            told.append(f"{name}: r = {r.r.value:+.2f}{bounds}, n = {r.n}")
    scale = 100 if found.against != "nll" else 1
    unit = {"retention": "retention, % of the target's score", "difference": "score minus target, points", "nll": "nats per token above the target"}

    def paint(canvas: MatplotlibFigure) -> None:
        axes = canvas.add_subplot()
        for number, pair in enumerate(pairs):
            colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
            for role, fill in (("mapper", colour), ("control", "none")):
                here = [p for p in points if p.pair == pair and p.role == role]
                axes.plot(
                    [p.figures[figure] for p in here],
                    [scale * p.outcomes[outcome] for p in here],
                    marker,
                    markersize=6,
                    markerfacecolor=fill,
                    markeredgecolor=colour,
                    linestyle="none",
                    label=pair if role == "mapper" else None,
                )
        axes.margins(x=0.16, y=0.12)
        if figure == "kl_nats" and min(p.figures[figure] for p in points) > 0:
            from matplotlib.ticker import FuncFormatter, NullFormatter

            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(_label(figure, points))
        axes.set_ylabel(unit[found.against])
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.set_title("; ".join(told), fontsize=8.5, loc="left", color=INK)
        if found.against != "difference":
            axes.axhline(scale if found.against == "retention" else 0, color=NEUTRAL, linewidth=1)
        if any(p.role == "control" for p in points):
            axes.plot([], [], "o", markersize=6, markerfacecolor="none", markeredgecolor=INK, label="hollow: controls")
        canvas.legend(loc="outside lower left", ncols=2, fontsize=7.5)
        _names(axes, points, figure, outcome, scale)

    what = "average over tasks" if outcome == AVERAGE else outcome
    caption = f"Every point is one arm of one pair; {what}. Filled: fitted mappers; hollow: controls. " + " ".join(
        w + "." for w in found.warnings[:1]
    )
    data = pd.DataFrame([{"pair": p.pair, "arm": p.arm, "role": p.role, "x": p.figures[figure], "y": scale * p.outcomes[outcome]} for p in points])
    return draw(f"scatter_{figure}", f"{_words(figure)} against {found.against}", caption, data, 4.6, paint, width_inches=7.2)


def _words(figure: str) -> str:
    return figure.replace("_", " ").replace("r2", "R\u00b2")


def _label(figure: str, points: Sequence[Point]) -> str:
    unit = {"kl_nats": ", nats per token (log scale, lower is better)", "nll_difference": ", nats per token (lower is better)"}.get(figure, "")
    return _words(figure).replace(" nats", "").replace("kl", "KL") + unit


def _names(axes: Axes, points: Sequence[Point], figure: str, outcome: str, scale: float) -> None:
    """Names beside the points, where they cover neither a point nor each other; a name without room is left out (the table has it)."""
    canvas = axes.figure
    canvas.canvas.draw()
    spots = [axes.transData.transform((p.figures[figure], scale * p.outcomes[outcome])) for p in points]
    pixels = canvas.dpi / 72
    taken = [(x - 4 * pixels, y - 4 * pixels, x + 4 * pixels, y + 4 * pixels) for x, y in spots]
    frame = axes.get_window_extent()
    for point, (x, y) in sorted(zip(points, spots, strict=True), key=lambda item: -item[1][1]):
        width, height = 4.1 * len(point.arm) * pixels, 8 * pixels
        for dx, dy in _OFFSETS:
            left = x + dx * pixels - (width if dx < 0 else width / 2 if dx == 0 else 0)
            box = (left, y + dy * pixels - 1, left + width, y + dy * pixels + height)
            inside = box[0] > frame.x0 and box[2] < frame.x1 and box[1] > frame.y0 and box[3] < frame.y1
            if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                taken.append(box)
                where = "right" if dx < 0 else "center" if dx == 0 else "left"
                at = (point.figures[figure], scale * point.outcomes[outcome])
                axes.annotate(point.arm, at, xytext=(dx, dy), textcoords="offset points", fontsize=7, ha=where, color=INK)
                break
