"""`kvbench report`: from runs to the report that people decide from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvbench.reporting.view import Policy

_DEFAULT_OUT = Path("kvbench-report")


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of 'kvbench evaluate', or --output_path folders of 'lm_eval --log_samples'.", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")] = _DEFAULT_OUT,
    policy: Annotated[
        str | None, typer.Option(help="Screening policy to judge by: a file, or 'default' for the shipped one. In place of the margins below.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="Largest loss of a score that is not material, absolute; default 0.02, 2 percentage points.")
    ] = None,
    nll_margin: Annotated[
        float | None, typer.Option(help="Largest rise of negative log-likelihood that is not material, nats per token; default 0.02.")
    ] = None,
    level: Annotated[float | None, typer.Option(help="Coverage of the intervals; default 0.95.")] = None,
    min_n: Annotated[int | None, typer.Option(help="Fewest items that a disposition other than inconclusive needs; default 30.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    resamples: Annotated[int, typer.Option(help="Resamples of the bootstrap.")] = 10_000,
    reference: Annotated[str | None, typer.Option(help="Arm that all are held against; default: the target, or the first run's arm.")] = None,
    source_arm: Annotated[str | None, typer.Option(help="Arm that stands for keeping the small model; default: the source.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Compare only these tasks, separated by commas.")] = None,
    arms: Annotated[str | None, typer.Option(help="Compare only these arms, separated by commas.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the report.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing directory.")] = False,
    prompts: Annotated[bool, typer.Option("--prompts/--no-prompts", help="Show the items' texts; off for data that must not be passed on.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print comparison.json.")] = False,
) -> None:
    """Compare the arms of runs on identical items and write report.html, report.md, comparison.json, arms.json, tables and figures.

    Exit status 2: runs that cannot be compared, with the reason.
    """
    from dataclasses import replace

    from kvbench.errors import BadInputError
    from kvbench.reporting.comparison import compare
    from kvbench.reporting.report import write_report
    from kvbench.reporting.rows import headline
    from kvbench.runs.provenance import collect, command_line
    from kvbench.runs.sources import load_runs
    from kvbench.storage import dump_json, utc_now

    started = utc_now()
    if out.exists() and not overwrite:
        raise BadInputError(f"'{out}' exists already; choose another --out or pass --overwrite")
    given = {name: value for name, value in (("margin", margin), ("nll_margin", nll_margin), ("level", level), ("min_n", min_n)) if value is not None}
    judged_by = _policy(policy, {**given, "seed": seed, "resamples": resamples}, named=list(given))
    loaded = [run for path in runs for run in load_runs(path)]
    compared = compare(
        loaded,
        judged_by,
        reference=reference,
        source_arm=source_arm,
        tasks=_names(tasks),
        arms=_names(arms),
        title=title,
    )
    command = command_line()
    comparison = compared.comparison.model_copy(update={"command": command, "provenance": collect(started_utc=started, command=command)})
    page = write_report(replace(compared, comparison=comparison), out, overwrite=overwrite, prompts=prompts)
    if json:
        typer.echo(dump_json(comparison.model_dump(mode="json")), nl=False)
    else:
        typer.echo(headline(comparison))
        for verdict in comparison.verdicts:
            typer.echo(f"{verdict.arm}: {verdict.reading}. {verdict.sentence}")
    typer.echo(f"report: {page}", err=True)


def _policy(file: str | None, values: dict[str, float], *, named: list[str]) -> Policy:
    """The policy of a file, or of the options.

    Raises:
        BadInputError: both, or a value out of range.
    """
    from pydantic import ValidationError

    from kvbench.errors import BadInputError
    from kvbench.reporting.view import Policy

    if file is not None:
        from kvbench.screening.policy import load_policy

        if named:
            raise BadInputError(f"--{named[0].replace('_', '-')} is given beside --policy, which fixes it; leave one of them out")
        return load_policy(file).comparison().model_copy(update={name: values[name] for name in ("seed", "resamples")})
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInputError(f"--{str(first['loc'][0]).replace('_', '-')} is {first['input']}: {first['msg']}") from error


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
