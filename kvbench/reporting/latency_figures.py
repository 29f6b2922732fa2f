"""What latency.json shows: time to the first token, speed-up, where the time goes, quality against cost. Every caption says the conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.reporting.curves import Curve, _plain, curves
from kvbench.reporting.plots import INK, MARKERS, NEUTRAL, PALETTE, Figure, draw
from kvbench.runs.latency import RE_PREFILL, Latency, LatencyPoint, QualityPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

Colour = Callable[[str], int | None]
PARTS = ("source prefill", "strip", "map", "rotate", "inject", "first token")


def in_order(found: Latency) -> Colour:
    """Colours by order of the mappers, where no comparison has given them any."""
    arms = found.arms()
    return lambda arm: arms.index(arm) if arm in arms else None


def first_token_figure(found: Latency, colour: Colour) -> Figure:
    """Time to the first token over the context length, one row."""
    lines: list[Curve] = []
    batch = found.batches()[0]
    for arm, cold in dict.fromkeys((point.arm, point.cold) for point in found.points):
        points = _line(found, arm, cold, batch)
        if points:
            values = [1000 * p.p50_seconds for p in points]
            upper = [None if p.p95_seconds is None else 1000 * p.p95_seconds for p in points]
            lines.append(
                Curve(f"{arm}, cold" if cold else arm, [float(p.tokens) for p in points], values, values, upper, colour=colour(arm), dashed=cold)
            )
    caption = (
        f"Median time to the first token{f', {batch} rows' if batch > 1 else ''}; the band reaches up to the 95th percentile. "
        f"Cold counts the source's own prefill too. {found.conditions}."
    )
    return curves(
        "latency", "Time to the first token", caption, lines, x_label="context tokens", y_label="milliseconds", log_x=True, log_y=True,
        footnote=found.conditions,
    )  # fmt: skip


def speedup_figure(found: Latency, colour: Colour) -> Figure | None:
    """Re-prefill over transfer, warm and cold, with intervals."""
    lines: list[Curve] = []
    batch = found.batches()[0]
    for arm in found.arms():
        for cold in (False, True):
            gains = [(n, gain) for n in found.lengths(batch) if (gain := found.speedup(arm, n, cold=cold, batch=batch)) is not None]
            if gains:
                lines.append(
                    Curve(
                        f"{arm}, cold" if cold else arm, [float(n) for n, _ in gains], [g.value for _, g in gains],
                        [g.lower for _, g in gains], [g.upper for _, g in gains], colour=colour(arm), dashed=cold,
                    )
                )  # fmt: skip
    if not lines:
        return None
    caption = (
        f"The target's own prefill over the transfer, medians, with 95 % intervals over the repeats. Below the line at 1, transferring is slower. "
        f"{found.conditions}."
    )
    return curves(
        "speedup",
        "Speed-up to the first token",
        caption,
        lines,
        x_label="context tokens",
        y_label="times faster",
        log_x=True,
        log_y=True,
        rule=1.0,
        footnote=found.conditions,
    )


def parts_figure(found: Latency) -> Figure | None:
    """Where the time goes: shares of the unfused phases at every length, one panel per mapper."""
    batch = found.batches()[0]
    rows = []
    for arm in found.arms():
        for tokens in found.lengths(batch):
            prefill = found.phase("source prefill", tokens, batch=batch)
            parts = [("source prefill", prefill)] + [(name, found.phase(name, tokens, arm=arm, batch=batch)) for name in PARTS[1:]]
            rows += [{"arm": arm, "tokens": tokens, "phase": name, "milliseconds": 1000 * p.p50_seconds} for name, p in parts if p is not None]
    if not any(row["phase"] == "map" for row in rows):
        return None
    frame = pd.DataFrame(rows)
    arms = list(dict.fromkeys(frame["arm"]))

    def paint(figure: MatplotlibFigure) -> None:
        panels = figure.subplots(len(arms), 1, squeeze=False, sharex=True)[:, 0]
        for axes, arm in zip(panels, arms, strict=True):
            table = frame[frame["arm"] == arm].pivot_table(index="tokens", columns="phase", values="milliseconds")
            shares = 100 * table.div(table.sum(axis=1), axis=0)
            left = [0.0] * len(shares)
            for number, name in enumerate(part for part in PARTS if part in shares):
                width = [float(v) for v in shares[name].fillna(0)]
                shade = NEUTRAL if name == "source prefill" else PALETTE[(number - 1) % len(PALETTE)]
                axes.barh([f"{n:,}" for n in shares.index], width, left=left, color=shade, label=name, height=0.72)
                left = [a + b for a, b in zip(left, width, strict=True)]
            for place, total in enumerate(table.sum(axis=1)):
                axes.annotate(
                    f"{total:,.0f} ms" if total >= 100 else f"{total:.3g} ms",
                    (100, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.invert_yaxis()
            axes.set_xlim(0, 100)
            axes.set_ylabel("context tokens")
            axes.set_title(arm, fontsize=10, loc="left")
        panels[-1].set_xlabel("% of the cold time, phases one after the other")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, handlelength=1, columnspacing=1.2)

    caption = (
        "Medians of the phases (their sum at the right) run one after the other, nothing fused; the transfer itself fuses them and is faster. "
        f"Warm is all but the grey part. {found.conditions}."
    )
    height = 0.9 + len(arms) * (0.55 + 0.24 * len(found.lengths(batch)))
    return draw("latency_parts", "Where the time goes", caption, frame, height, paint, footnote=found.conditions)


def quality_figure(found: Latency, colour: Colour) -> Figure | None:
    """Agreement (or accuracy) against warm latency, the Pareto front drawn."""
    points = [p for p in found.quality if _nearness(p) is not None]
    if len(points) < 2:
        return None
    by_kl = all(p.kl_nats is not None for p in points)
    arms = list(dict.fromkeys(p.arm for p in points))

    def height(p: QualityPoint) -> float:
        return max(p.kl_nats, 1e-7) if p.kl_nats is not None else 100 * (p.accuracy or 0.0)

    def paint(figure: MatplotlibFigure) -> None:
        axes = figure.add_subplot()
        placed = [p for p in points if not (by_kl and p.arm == RE_PREFILL)]
        front = sorted((p for p in placed if p.pareto), key=lambda p: p.warm_seconds)
        axes.plot([1000 * p.warm_seconds for p in front], [height(p) for p in front], "-", color=INK, linewidth=1, alpha=0.6, zorder=1)
        for number, arm in enumerate(arms):
            index = colour(arm)
            shade = NEUTRAL if index is None else PALETTE[index % len(PALETTE)]
            mine = sorted((p for p in points if p.arm == arm), key=lambda p: p.hold_back or 0)
            if by_kl and arm == RE_PREFILL:
                # Its KL is 0, which a logarithmic axis does not have.
                axes.axvline(1000 * mine[0].warm_seconds, color=shade, linestyle="--", linewidth=1.5, label=f"{RE_PREFILL} (KL 0)")
                continue
            for p in mine:
                axes.plot(
                    [1000 * p.warm_seconds], [height(p)], MARKERS[number % len(MARKERS)], color=shade, markersize=7,
                    markerfacecolor=shade if p.pareto else "white", zorder=3,
                )  # fmt: skip
            axes.plot([1000 * p.warm_seconds for p in mine], [height(p) for p in mine], ":", color=shade, linewidth=1, zorder=2)
            below = number % 2 == 1
            for p in mine if len(mine) > 1 else []:
                axes.annotate(
                    str(p.hold_back), (1000 * p.warm_seconds, height(p)), xytext=(0, -7 if below else 7), textcoords="offset points", ha="center",
                    va="top" if below else "bottom", fontsize=7.5, color=shade,
                )  # fmt: skip
            axes.plot([], [], MARKERS[number % len(MARKERS)], color=shade, label=mine[0].label if len(mine) == 1 else arm)
        axes.set_xscale("log")
        _plain(axes.xaxis)
        if by_kl:
            axes.set_yscale("log")
        axes.margins(x=0.08, y=0.14)
        if by_kl:
            _plain(axes.yaxis)
            axes.invert_yaxis()
        axes.set_xlabel(f"milliseconds to the first token at {points[0].tokens:,} tokens, warm")
        axes.set_ylabel("KL from the target, nats (up is better)" if by_kl else "mean accuracy, %")
        axes.grid(True)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=min(4, len(arms)), fontsize=8)

    caption = (
        f"Numbers are hold_back, the last tokens that the target runs itself. Filled marks lie on the Pareto front of {'KL' if by_kl else 'accuracy'} and "
        f"latency (line): nothing else is both faster and better. {found.conditions}."
    )
    frame = pd.DataFrame([p.model_dump(mode="json", exclude={"settings"}) for p in points])
    return draw("quality_latency", "Quality against cost", caption, frame, 3.6, paint, footnote=found.conditions)


def latency_only_figures(found: Latency, colour: Colour | None = None) -> list[Figure]:
    """All figures of one measurement; none where every length ran out of memory."""
    if not found.points:
        return []
    shade = colour or in_order(found)
    made: Sequence[Figure | None] = (
        first_token_figure(found, shade),
        speedup_figure(found, shade),
        parts_figure(found),
        quality_figure(found, shade),
    )
    return [figure for figure in made if figure is not None]


def _line(found: Latency, arm: str, cold: bool, batch: int) -> list[LatencyPoint]:
    return sorted((p for p in found.points if (p.arm, p.cold, p.batch) == (arm, cold, batch) and not p.error), key=lambda p: p.tokens)


def _nearness(p: QualityPoint) -> float | None:
    return p.top1_agreement if p.kl_nats is not None else p.accuracy
