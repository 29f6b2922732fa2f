"""What `kvbench latency` prints and writes: tables, csv, figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.runs.latency import Latency


def write_latency(directory: Path, found: Latency) -> None:
    """Tables as csv, figures as SVG, PNG and CSV, each file whole.

    Raises:
        KVBenchError: the disk is full or cannot be written.
    """
    from kvbench.reporting.latency_figures import latency_only_figures
    from kvbench.reporting.latency_rows import frames
    from kvbench.runs.files import write_whole

    for name, frame in frames(found).items():
        write_whole(directory / f"{name}.csv", partial(frame.to_csv, index=False))
    for figure in latency_only_figures(found):
        write_whole(directory / f"{figure.name}.svg", partial(Path.write_text, data=figure.svg, encoding="utf-8"))
        write_whole(directory / f"{figure.name}.png", partial(Path.write_bytes, data=figure.png))


def print_latency(found: Latency, *, as_json: bool) -> None:
    """Tables, or the whole record as JSON, on stdout."""
    if as_json:
        import json

        print(json.dumps(found.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    from kvbench.reporting.latency_rows import tables

    console = Console(width=None if Console().is_terminal else 200)
    for plain in tables(found):
        table = Table(title=f"{found.source} -> {found.target}: {plain.title.lower()}")
        for column in plain.header:
            table.add_column(column, justify="left" if column in ("phase", "mapper", "setting", "what", "stage") else "right")
        for row in plain.rows:
            table.add_row(*row)
        console.print(table)
        for note in plain.notes:
            console.print(note, highlight=False, markup=False)
