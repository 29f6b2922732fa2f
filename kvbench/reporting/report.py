"""Write a whole report: page, Markdown, comparison.json, arms.json, tables, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kvbench.reporting.comparison import Compared
from kvbench.reporting.export import arms_json
from kvbench.reporting.figures import all_figures
from kvbench.reporting.html import html
from kvbench.reporting.markdown import markdown
from kvbench.reporting.plots import Figure
from kvbench.reporting.tables import all_tables
from kvbench.runs.files import disk_errors
from kvbench.storage import atomic_directory, dump_json

PAGE, MARKDOWN, COMPARISON, ARMS = "report.html", "report.md", "comparison.json", "arms.json"


def write_report(compared: Compared, out: Path, *, overwrite: bool = False, prompts: bool = True) -> Path:
    """Write the report directory, whole or not at all.

    Args:
        compared: from `compare`; give its comparison `command` and `provenance` before.
        out: directory to write.
        overwrite: replace an existing one.
        prompts: include the items' texts in the page.

    Returns:
        The page.

    Raises:
        BadInputError: `out` exists and `overwrite` is off, or cannot be written.
        KVBenchError: the disk is full.
    """
    figures = all_figures(compared.comparison)
    texts = {
        PAGE: html(compared, figures, prompts=prompts),
        MARKDOWN: markdown(compared.comparison),
        COMPARISON: dump_json(compared.comparison.model_dump(mode="json")),
        ARMS: dump_json(arms_json(compared)),
    }
    with disk_errors(out), atomic_directory(out, overwrite=overwrite) as directory:
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        _write_tables(directory / "tables", all_tables(compared.comparison))
        _write_figures(directory / "figures", figures)
    return out / PAGE


def _write_tables(directory: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    directory.mkdir()
    for name, table in tables.items():
        table.to_csv(directory / f"{name}.csv", index=False)


def _write_figures(directory: Path, figures: Mapping[str, Sequence[Figure]]) -> None:
    directory.mkdir()
    for figure in (figure for section in figures.values() for figure in section):
        (directory / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
        (directory / f"{figure.name}.png").write_bytes(figure.png)
        figure.data.to_csv(directory / f"{figure.name}.csv", index=False)
