"""`kvbench correlate`: does any diagnostic predict what is kept?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.reporting.correlate import Correlations

NAMES: dict[str, Literal["retention", "difference", "nll"]] = {
    "retention": "retention",
    "accuracy difference": "difference",
    "accuracy-difference": "difference",
    "difference": "difference",
    "nll": "nll",
}


def correlate(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of 'kvbench evaluate' with diagnostics, and directories of 'kvbench diagnose'.", metavar="RUN...")
    ],
    out: Annotated[Path | None, typer.Option(help="Directory for correlation.json, tables as csv and scatter figures.")] = None,
    against: Annotated[str, typer.Option(help="What is to be predicted: retention, difference (accuracy difference), or nll.")] = "retention",
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, separated by commas.")] = None,
    figures: Annotated[str | None, typer.Option(help="Only these diagnostic figures, separated by commas.")] = None,
    prefix: Annotated[int | None, typer.Option(help="Context tokens of the diagnostics; default: the shortest of each.")] = None,
    leave_out: Annotated[str | None, typer.Option(help="Arms that are not counted, separated by commas, e.g. plainly broken ones.")] = None,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Correlate the diagnostic figures of many arms and pairs with what they keep: coefficients, intervals, scatter, and what it all rests on."""
    from kvbench.errors import BadInputError
    from kvbench.reporting.correlate import correlate as compute
    from kvbench.reporting.correlate import correlations_frame, points_frame
    from kvbench.reporting.correlate_figures import correlation_figures
    from kvbench.runs.provenance import collect, command_line
    from kvbench.storage import atomic_directory, check_writable, dump_json, utc_now

    started = utc_now()
    if against not in NAMES:
        raise BadInputError(f"--against '{against}' is unknown; it is one of retention, difference, nll")
    if out is not None:
        check_writable(out, overwrite=overwrite)
    found = compute(runs, NAMES[against], prefix=prefix, tasks=_split(tasks), figures=_split(figures), leave_out=_split(leave_out) or (), level=level)
    found = found.model_copy(update={"command": command_line(), "provenance": collect(started_utc=started)})
    if out is not None:
        with atomic_directory(out, overwrite=overwrite) as directory:
            (directory / "correlation.json").write_text(dump_json(found.model_dump(mode="json")), encoding="utf-8")
            correlations_frame(found).to_csv(directory / "correlations.csv", index=False)
            points_frame(found).to_csv(directory / "points.csv", index=False)
            for figure in correlation_figures(found):
                (directory / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
                (directory / f"{figure.name}.png").write_bytes(figure.png)
    if json:
        typer.echo(dump_json(found.model_dump(mode="json")), nl=False)
        return
    _print(found)
    if out is not None:
        typer.echo(str(out))


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _print(found: Correlations) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvbench.reporting.correlate import AVERAGE, MEASURES

    table = Table(title=f"correlation with {found.against} ({MEASURES[found.against]}), average over tasks")
    for column in ("figure", "mappers: Pearson", "Spearman", "within pairs: Pearson", "Spearman", "with controls: Pearson", "n"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    kinds = ("pearson", "spearman")
    for name in dict.fromkeys(row.figure for row in found.rows):
        across = [found.row(name, kind=k) for k in kinds]
        within = [found.row(name, scope="within pairs", kind=k) for k in kinds]
        everything = found.row(name, points="mappers and controls")
        n = next((r.n for r in (*across, everything) if r is not None), 0)
        low = any(r.lower_is_better for r in (*across, everything) if r is not None)
        cells = [_cell(r) for r in (*across, *within, everything)]
        table.add_row(
            name + (" (lower is better)" if low else ""), *cells, f"{n}{f' + {everything.n - n}' if everything and everything.n > n else ''}"
        )
    Console(width=None if Console().is_terminal else 200).print(table)
    outcomes = [o for o in dict.fromkeys(row.outcome for row in found.rows) if o != AVERAGE]
    opt.say(f"outcomes: {', '.join(outcomes)}; by task and by pair: correlations.csv (--out) or --json")
    for warning in found.warnings:
        opt.say(f"- {warning}")


def _cell(row: object) -> str:
    from kvbench.reporting.correlate import CorrelationRow

    if not isinstance(row, CorrelationRow) or row.r.value is None:
        return "-"
    bounds = f" [{row.r.lower:+.2f}, {row.r.upper:+.2f}]" if row.r.lower is not None and row.r.upper is not None else ""
    return f"{row.r.value:+.2f}{bounds}"
