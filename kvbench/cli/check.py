"""`kvbench check`: may a KV cache go from SOURCE to TARGET?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from kvbench.pairs.check import PairReport

_MODEL = "hub id, directory, .gguf file, or embedded:source|target|stranger"
_STYLES = {"ok": "green", "warn": "yellow", "refuse": "bold red"}
_PIPE_WIDTH = 160


def check(
    source: Annotated[str, typer.Argument(help=f"Model that prefills: {_MODEL}.")],
    target: Annotated[str, typer.Argument(help=f"Model that answers: {_MODEL}.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    source_revision: Annotated[str | None, typer.Option(help="Hub revision of the source.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Hub revision of the target.")] = None,
    allow_mismatched: Annotated[bool, typer.Option(help="Only warn of unequal KV heads or head dimension (experimental).")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that the model repositories carry.")] = False,
) -> None:
    """Check a pair without loading weights. Exit status 0: compatible; 4: not; 2: a model cannot be found or read."""
    from json import dumps

    from kvbench.pairs.check import check_pair

    report = check_pair(
        source,
        target,
        source_revision=source_revision,
        target_revision=target_revision,
        allow_mismatched=allow_mismatched,
        trust_remote_code=trust_remote_code,
    )
    if json:
        typer.echo(dumps(report.to_dict(), sort_keys=True, allow_nan=False, indent=2, ensure_ascii=False))
    else:
        _print_table(report)
    if not report.compatible:
        raise typer.Exit(4)


def _print_table(report: PairReport) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(_table(report))
    warned = sum(row.status == "warn" for row in report.rows)
    verdict = f"compatible, {warned} warnings" if report.compatible else f"not compatible: {', '.join(row.name for row in report.refused)}"
    console.print(f"{report.source} -> {report.target}: {verdict}", markup=False, highlight=False, soft_wrap=True)


def _table(report: PairReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("", "check", "source", "target", "detail and remedy"):
        table.add_column(column, overflow="fold")
    for row in report.rows:
        # Text, not markup: tokens and model names may hold brackets.
        cells = (row.name, row.source, row.target, " ".join(part for part in (row.detail, row.remedy) if part))
        table.add_row(Text(row.status, style=_STYLES[row.status]), *(Text(cell) for cell in cells))
    return table
