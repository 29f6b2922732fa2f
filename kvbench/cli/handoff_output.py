"""What `kvbench handoff` shows: tables, figures, and the data behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from kvbench.reporting.plots import Figure
    from kvbench.runs.measured import Handoff
    from kvbench.scoring.drift import ArmFigure, HandoffFigures, TurnFigure
    from kvbench.stats import MaybeInterval


def series(protocol: str, arm: str) -> str:
    """An arm's name in tables and figures."""
    return arm if protocol == arm else f"{arm}, {protocol}"


def turns_frame(figures: HandoffFigures) -> pd.DataFrame:
    """All turns of all arms, with the reason where there is no interval."""
    import pandas as pd

    from kvbench.stats import Undefined

    rows = []
    for t in figures.turns:
        row = t._asdict()
        interval = row.pop("interval")
        bounds = (None, None) if interval is None or isinstance(interval, Undefined) else (interval.lower, interval.upper)
        row |= {"lower": bounds[0], "upper": bounds[1], "no_interval": interval.reason if isinstance(interval, Undefined) else None}
        rows.append(row)
    return pd.DataFrame(rows)


def write_figures(directory: Path, figures: HandoffFigures, stored: Handoff) -> None:
    """Figures as SVG, PNG and CSV; all figures of all turns as turns.csv; everything, reasons included, as summary.json.

    Raises:
        KVBenchError: the disk is full.
    """
    from kvbench.reporting.handoff_panels import handoff_figures
    from kvbench.runs.files import write_whole
    from kvbench.stats import as_json
    from kvbench.storage import dump_json

    summary, frame = dump_json(as_json(figures)), turns_frame(figures)
    write_whole(directory / "summary.json", lambda path: path.write_text(summary, encoding="utf-8"))
    write_whole(directory / "turns.csv", lambda path: frame.to_csv(path, index=False))
    for figure in handoff_figures(stored):
        _write_figure(directory, figure)


def _write_figure(directory: Path, figure: Figure) -> None:
    from kvbench.runs.files import write_whole

    write_whole(directory / f"{figure.name}.svg", lambda path: path.write_text(figure.svg, encoding="utf-8"))
    write_whole(directory / f"{figure.name}.png", lambda path: path.write_bytes(figure.png))
    write_whole(directory / f"{figure.name}.csv", lambda path: figure.data.to_csv(path, index=False))


def print_figures(title: str, figures: HandoffFigures, *, as_json: bool) -> None:
    """Tables, or everything as JSON, on stdout."""
    if as_json:
        from kvbench.stats import as_json as plain

        print(json.dumps(plain(figures), indent=2, sort_keys=True, allow_nan=False))
        return
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    console.print(_arms_table(title, figures.arms))
    for reason in dict.fromkeys(_reasons(figures.arms)):
        console.print(reason, highlight=False)
    console.print(_turns_table(figures.turns))
    console.print("* too few conversations for an interval", highlight=False)


def _arms_table(title: str, arms: list[ArmFigure]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in ("arm", "conversations", "answers", "F1 %", "exact %", "drift, points [95 %]", "slope, points per turn [95 %]"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for a in arms:
        slope = None if a.slope is None or not isinstance(a.slope, float) else a.slope
        table.add_row(
            series(a.protocol, a.arm),
            str(a.conversations),
            str(a.answers),
            f"{100 * a.f1:.1f}",
            f"{100 * a.exact_match:.1f}",
            _with_interval(a.drift, a.drift_interval, 1),
            _with_interval(slope, a.slope_interval, 2),
        )
    return table


def _with_interval(value: float | None, interval: MaybeInterval | None, digits: int) -> str:
    from kvbench.stats import Undefined

    if value is None:
        return "-"
    text = f"{100 * value:+.{digits}f}"
    if interval is None or isinstance(interval, Undefined):
        return text
    return f"{text} [{100 * interval.lower:+.{digits}f}, {100 * interval.upper:+.{digits}f}]"


def _reasons(arms: list[ArmFigure]) -> list[str]:
    from kvbench.stats import Undefined

    parts = ((a, what, found) for a in arms for what, found in (("drift", a.drift_interval), ("slope", a.slope_interval)))
    return [f"no interval of the {what} of {series(a.protocol, a.arm)}: {found.reason}" for a, what, found in parts if isinstance(found, Undefined)]


def _turns_table(turns: list[TurnFigure]) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys((t.protocol, t.arm) for t in turns))
    by = {(t.protocol, t.arm, t.turn): t for t in turns}
    table = Table(title="F1 % by turn")
    table.add_column("turn", justify="right")
    table.add_column("conversations", justify="right")
    for name in names:
        table.add_column(series(*name), justify="right")
    for number in sorted({t.turn for t in turns}):
        here = [by.get((*name, number)) for name in names]
        first = next(t for t in here if t is not None)
        table.add_row(str(number), f"{first.n}{'*' if first.few else ''}", *("" if t is None else f"{100 * t.f1:.1f}" for t in here))
    return table
