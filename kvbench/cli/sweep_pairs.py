"""`kvbench sweep-pairs`: check, calibrate, fit and evaluate every ordered pair of some models, in parallel."""

from __future__ import annotations

import contextlib
import io
import json as json_module
import os
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt
from kvbench.scale.work import Done

if TYPE_CHECKING:
    from kvbench.scale.pairs_file import Known
    from kvbench.scale.work import PairRecord

UNFINISHED = 3
"""Exit status where a pair has failed."""


def sweep_pairs(
    file: Annotated[Path, typer.Argument(help="YAML: models (and pairs), data, recipes, tasks; see docs/scale.md.")],
    out: Annotated[Path, typer.Option(help="Directory: one folder per pair; the same command goes on where it was stopped.")],
    engine: Annotated[str, typer.Option(help="local: processes of this machine; ray: Ray workers.")] = "local",
    workers: Annotated[int, typer.Option(help="Pairs at the same time.")] = 2,
    threads: Annotated[int | None, typer.Option(help="Threads per worker; default: this machine's processors shared out.")] = None,
    retries: Annotated[int, typer.Option(help="How often a pair whose worker died or crashed is begun again.")] = 1,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster, e.g. auto; default: a local Ray of --workers.")] = None,
    gpus: Annotated[float, typer.Option(help="GPUs per pair, for Ray.")] = 0.0,
    plan: Annotated[bool, typer.Option("--plan", help="Print the commands and stop.")] = False,
    json: opt.Json = False,
) -> None:
    """Answer P(P-1) pairs with the commands a user would type, each pair in a worker of its own, resumable.

    Exit status 0: every pair is finished, or refused by its check; 3: some failed; 2: bad input.
    """
    from kvbench.errors import BadInputError
    from kvbench.scale.driver import open_pairs
    from kvbench.scale.driver import sweep_pairs as drive
    from kvbench.scale.engines import make_engine
    from kvbench.scale.pairs_file import pair_tasks, read_pairs_file
    from kvbench.scale.work import Commands
    from kvbench.storage import check_writable

    if retries < 0:
        raise BadInputError(f"--retries {retries}; it is 0 or more")
    given = read_pairs_file(file)
    tasks = pair_tasks(given, known_options())
    if given.tasks:
        # A misspelt task should not cost the calibration of every pair.
        from kvbench.scoring.taskfiles import find_definitions

        include = given.evaluate.get("include_path") or []
        find_definitions(list(given.tasks), [Path(str(folder)) for folder in (include if isinstance(include, list) else [include])])
    if plan:
        for task in tasks:
            for stage in task.stages:
                print(shlex.join(["kvbench", *stage.arguments]).replace("{pair}", str(out / task.label)))
        return
    chosen = make_engine(engine, workers, address=ray_address, gpus=gpus)
    check_writable(out, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    left = open_pairs(out, tasks)
    opt.say(f"{len(tasks)} pairs, {len(tasks) - len(left)} of them answered already; {min(workers, max(1, len(left)))} at a time ({engine})")
    records = drive(
        tasks,
        out,
        chosen,
        Commands(perform, refusal_reasons, summarise),
        workers=workers,
        retries=retries,
        threads=threads or max(1, (os.cpu_count() or 1) // workers),
        told=lambda record: opt.say(_line(record, out)),
    )
    write_tables(records, out)
    if json:
        print(json_module.dumps([_row(record, out) for record in records], indent=2, sort_keys=True, allow_nan=False))
    else:
        _print(records, out)
    if any(record.state not in ("finished", "refused") for record in records):
        opt.say("some pairs failed; their log.txt says why, and the same command tries them again")
        raise typer.Exit(UNFINISHED)


def known_options() -> Known:
    """Options of the commands that a pair's stages call, by name."""
    from typer.main import get_command

    from kvbench.cli import _app
    from kvbench.scale.pairs_file import SET_HERE

    group = get_command(_app())
    found: Known = {}
    for command in SET_HERE:
        parameters = group.commands[command].params  # type: ignore[attr-defined]  # an app with commands is a group
        found[command] = {
            p.name: (max(p.opts, key=len), p.secondary_opts[0] if p.secondary_opts else None, bool(p.is_flag))
            for p in parameters
            if p.param_type_name == "option" and p.name not in SET_HERE[command]
        }
    return found


def perform(arguments: Sequence[str], log: Path) -> Done:
    """Run one kvbench command in this process; what it says goes to a log, what it prints comes back."""
    from typer.main import get_command

    from kvbench.cli import _app
    from kvbench.errors import KVBenchError

    output = io.StringIO()
    with log.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(output):
        file.write(f"$ {shlex.join(['kvbench', *arguments])}\n")
        try:
            status = get_command(_app()).main(args=list(arguments), prog_name="kvbench", standalone_mode=False)
            done = Done(status if isinstance(status, int) else 0, output.getvalue())
            if done.status:
                done = Done(done.status, done.output, f"'kvbench {arguments[0]}' ended with status {done.status}")
        except KVBenchError as error:
            done = Done(error.exit_code, output.getvalue(), str(error))
        except SystemExit as error:
            done = Done(
                error.code if isinstance(error.code, int) else 1, output.getvalue(), f"'kvbench {arguments[0]}' ended with status {error.code}"
            )
        except Exception as error:  # a bug in one pair must not end the others; its traceback is in the log
            traceback.print_exc(file=file)
            usage = hasattr(error, "exit_code")
            text = str(error.format_message()) if hasattr(error, "format_message") else str(error)
            done = Done(2 if usage else 1, output.getvalue(), f"{type(error).__name__}: {text}".splitlines()[0])
        file.write(output.getvalue())
        if done.message:
            file.write(f"kvbench: {done.message}\n")
    return done


def refusal_reasons(printed: str) -> str:
    """Why `check --json` refuses, in one line."""
    rows = [row for row in json_module.loads(printed)["rows"] if row["status"] == "refuse"]
    return "; ".join(f"{row['name']} {row['source']} and {row['target']}" + (f" ({row['detail']})" if row.get("detail") else "") for row in rows)


def summarise(pair: Path) -> tuple[str | None, str | None]:
    """Verdict and headline of a finished pair: the screen's, else those of the mapper that keeps most."""
    from kvbench.reporting.comparison import compare
    from kvbench.runs.sources import load_runs

    verdict_file = pair / "screen" / "verdict.json"
    verdict = None
    if verdict_file.is_file():
        verdict = str(json_module.loads(verdict_file.read_text(encoding="utf-8"))["verdict"])
    if not (pair / "run" / "provenance.json").is_file():
        return verdict, None
    comparison = compare(load_runs(pair / "run")).comparison
    best = None
    for arm in comparison.mappers:
        average = comparison.average(arm, comparison.reference_arm)
        if average is not None and average.retention.value is not None and (best is None or average.retention.value > best[1]):
            best = (arm, average.retention.value, average.retention)
    readings = {v.arm: v.reading for v in comparison.verdicts}
    if best is None:
        first = comparison.mappers[0] if comparison.mappers else None
        return verdict or (readings.get(first) if first else None), None
    bounds = f" [{100 * best[2].lower:.1f}, {100 * best[2].upper:.1f}]" if best[2].lower is not None and best[2].upper is not None else ""
    return verdict or readings.get(best[0]), f"{best[0]} keeps {100 * best[1]:.1f} %{bounds}"


def _row(record: PairRecord, out: Path) -> dict[str, object]:
    where = out / record.task.label
    return {
        "pair": f"{record.task.source} -> {record.task.target}",
        "state": record.state,
        "verdict": record.verdict,
        "headline": record.headline,
        "reason": record.reason,
        "attempts": record.attempts,
        "seconds": record.seconds,
        "stage_seconds": record.stage_seconds,
        "path": str(where),
        "run": str(where / "run") if (where / "run").is_dir() else None,
    }


def _line(record: PairRecord, out: Path) -> str:
    row = _row(record, out)
    told = record.headline if record.state == "finished" else record.reason
    state = "begun again" if record.state == "waiting" else record.state
    return f"{row['pair']}: {state} after {record.seconds:.1f} s{f' ({told})' if told else ''}"


def write_tables(records: Sequence[PairRecord], out: Path) -> None:
    """pairs.json and pairs.csv of a sweep."""
    import pandas as pd

    from kvbench.storage import dump_json, write_atomic

    rows = [_row(record, out) for record in records]
    write_atomic(out / "pairs.json", dump_json(rows))
    write_atomic(out / "pairs.csv", pd.DataFrame([{k: v for k, v in row.items() if k != "stage_seconds"} for row in rows]).to_csv(index=False))


def _print(records: Sequence[PairRecord], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("pair", "state", "verdict", "headline or reason", "seconds", "path"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    colours = {"finished": "green", "refused": "yellow", "failed": "red"}
    for record in records:
        row = _row(record, out)
        told = record.headline if record.state == "finished" else f"{record.stage}: {record.reason}" if record.stage else record.reason
        cells = (str(row["pair"]), record.state, record.verdict or "-", told or "-", f"{record.seconds:.1f}", str(row["path"]))
        table.add_row(*(Text(cell, style=colours.get(record.state, "") if i == 1 else "") for i, cell in enumerate(cells)))
    Console(width=None if Console().is_terminal else 200).print(table)
