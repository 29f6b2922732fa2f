"""`kvbench screen`: should this pair go live?"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kvbench.runs.verdict import Verdict

_COLOUR = {"deploy": "green", "do-not-deploy": "red", "inconclusive": "yellow"}


def screen(
    source: Annotated[str | None, typer.Argument(help=f"Model that prefills: {opt.MODEL}.")] = None,
    target: Annotated[str | None, typer.Argument(help=f"Model that answers: {opt.MODEL}.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Calibration text as for `kvbench calibrate`, or a folder with 'calibration/' and rows of the tasks; embedded:world by default for embedded pairs."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory; the same command goes on from where it was stopped.")] = None,
    policy: Annotated[str, typer.Option(help="Policy file; 'default' is the shipped one.")] = "default",
    budget: Annotated[str, typer.Option(help="quick (minutes), standard, or full.")] = "quick",
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks; default kvxfer_screen, for embedded pairs the tiny tasks.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Local rows for stock tasks; default --data, if it is a folder.")] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="More folders with lm-eval tasks.")] = None,
    mapper: Annotated[str | None, typer.Option(help="Screen this artifact (or control) instead of fitting candidates.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Context lengths of the timing, instead of the policy's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items per task, canary included, instead of the budget's.")] = None,
    hold_back: Annotated[int, typer.Option(help="Last context tokens that the target runs itself.")] = 1,
    seed: Annotated[int, typer.Option(help="Order of the calibration documents, few-shot sampling.")] = 0,
    print_policy: Annotated[bool, typer.Option("--print-policy", help="Print the shipped policy and stop.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    device_map: opt.DeviceMap = None,
    attention: opt.Attention = "sdpa",
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    allow_mismatched: opt.Mismatched = False,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Check, gate, calibrate, fit, diagnose, evaluate and time a pair; stop at the first stage that settles it; write the report and verdict.json.

    Exit status 0: deploy; 3: inconclusive; 4: do not deploy; 2: bad input.
    """
    from kvbench.screening.policy import default_text, load_policy

    if print_policy:
        print(default_text(), end="")
        return
    opt.quiet_libraries()
    from dataclasses import replace

    from kvbench.cli.evaluate import check_early
    from kvbench.errors import BadInputError
    from kvbench.screening.budget import budget as budget_of
    from kvbench.screening.budget import default_tasks
    from kvbench.screening.estimate import estimate
    from kvbench.screening.request import Request, Talk, plan_lines
    from kvbench.screening.screen import Screen
    from kvbench.screening.verify import SPEC
    from kvbench.storage import check_writable, dump_json

    if source is None or target is None:
        raise BadInputError("name the source and the target: kvbench screen SOURCE TARGET --data D --out DIR")
    if out is None:
        raise BadInputError("name a directory with --out")
    chosen, sizes = load_policy(policy), budget_of(budget)
    if limit is not None:
        if limit < 1:
            raise BadInputError(f"--limit {limit}; it is a number of items, at least 1")
        sizes = replace(sizes, limit=limit, canary_limit=limit, text_limit=limit)
    elif all(name.startswith("embedded:") for name in (source, target)) and tasks is None:
        # Their items cost next to nothing.
        sizes = replace(sizes, limit=None, canary_limit=None, text_limit=None)
    if hold_back < 1:
        raise BadInputError(f"--hold-back {hold_back}; the target runs at least the last token itself")
    data = _data(data, source, target)
    rows = data_dir or (Path(data) if Path(data).is_dir() else None)
    named = [t.strip() for t in tasks.split(",") if t.strip()] if tasks is not None else default_tasks(source, target)
    if not named:
        raise BadInputError("--tasks names no task")
    own = all(name.startswith("embedded:") for name in (source, target)) and tasks is None
    request = Request(
        source=source,
        target=target,
        data=data,
        policy=chosen,
        budget=sizes,
        tasks=tuple(named),
        data_dir=None if own else rows,
        include=tuple(include_path or ()),
        mapper=mapper,
        lengths=_lengths(lengths),
        hold_back=hold_back,
        seed=seed,
        dtype=dtype,
        device=device,
        device_map=device_map,
        attention=attention,
        source_revision=source_revision,
        target_revision=target_revision,
        trust_remote_code=trust_remote_code,
        allow_mismatched=allow_mismatched,
    )
    if mapper is not None:
        check_early([mapper], None, source, target, None, None)
    if overwrite and (out / SPEC).is_file():
        shutil.rmtree(out)
    check_writable(out, overwrite=True)
    with opt.progress_bar() as bar:

        def step(description: str, unit: str) -> Callable[[int, int], None]:
            shown: list[TaskID] = []

            def advance(done: int, total: int) -> None:
                # A stage that an earlier call has finished has no bar.
                if not shown:
                    shown.append(bar.add_task(description, total=total, unit=unit, speed=""))
                bar.update(shown[0], completed=done, total=total)

            return advance

        screening = Screen(request, out, Talk(bar.console.print, step, opt.scoring_bar(bar, "")))
        seconds = estimate(request, screening.leaves, screening.canary)
        bar.console.print(f"plan, budget {sizes.name}, policy '{chosen.name}' {chosen.fingerprint()[:12]}; times are estimates:", highlight=False)
        for line in plan_lines(request, screening.leaves, screening.canary, seconds):
            bar.console.print(line, highlight=False)
        if plan_only:
            return
        verdict = screening.run()
    if json:
        print(dump_json(verdict.model_dump(mode="json")), end="")
    else:
        _print(verdict, out)
    raise typer.Exit(verdict.exit_code)


def _data(data: str | None, source: str, target: str) -> str:
    from kvbench.errors import BadInputError

    if data is not None:
        return data
    if source.startswith("embedded:") and target.startswith("embedded:"):
        return "embedded:world"
    raise BadInputError("name the calibration text with --data: a file, a hub data set, or a folder with 'calibration/' and task rows")


def _lengths(text: str | None) -> tuple[int, ...]:
    from kvbench.errors import BadInputError

    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInputError(f"--lengths '{text}' is not a comma-separated list of token counts") from error
    if found[0] < 2 or any(b <= a for a, b in itertools.pairwise(found)):
        raise BadInputError(f"--lengths {text}; give ascending lengths of at least 2 tokens")
    return found


def _print(verdict: Verdict, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvbench.reporting.screened import rows

    table = Table(title=f"{verdict.signature.source.name} -> {verdict.signature.target.name}, policy '{verdict.policy_name}'")
    for column in ("outcome", "criterion", "figure", "interval", "wanted", "n"):
        table.add_column(column, justify="left" if column in ("outcome", "criterion") else "right", overflow="fold")
    for row in rows(verdict):
        style = {"good": "green", "bad": "bold red", "open": "yellow"}.get(row.tone, "")
        what = f"{row.what}: {row.told or row.reason}" if row.told or not row.figure else row.what
        table.add_row(Text(row.outcome, style=style), Text(what), row.figure, row.interval, row.wanted, row.n)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    console.print(Text(f"{verdict.verdict}: {verdict.sentence}", style=f"bold {_COLOUR[verdict.verdict]}"))
    if verdict.settled_by != "timing":
        console.print(f"settled by the stage '{verdict.settled_by}'; later stages were not run", highlight=False)
    opt.say(f"report: {(out / 'report' / 'report.html').resolve()}")
    print(out / "verdict.json")
