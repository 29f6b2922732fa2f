"""`kvbench sweep`: many settings of one recipe from stored moments, one of them chosen out of sample."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.sweep import Data, Fold, Judge, Trial
    from kvbench.pairs.models import LoadedModel

CRITERIA = ("heldout_r2", "agreement", "attention_cosine", "tasks")


def sweep(
    moments: Annotated[
        list[Path], typer.Argument(help="Directories that `kvbench calibrate` wrote; all are judged on the held-out part of the first.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for table, csv, figure and the chosen recipe.")],
    recipe: Annotated[str, typer.Option(help="Recipe name, module:Class, or a recipe YAML file.")] = "ridge",
    grid: Annotated[
        list[str] | None, typer.Option(help="A setting and its values, e.g. --grid k=1,2,4,all; repeat for more. '|' separates values with commas.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting that is the same everywhere.")] = None,
    sequences: Annotated[str | None, typer.Option(help="Nested calibration sizes, e.g. 50,200,500: the smaller is part of the larger.")] = None,
    criterion: Annotated[str, typer.Option(help="What decides: heldout_r2, agreement, attention_cosine, or tasks.")] = "heldout_r2",
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks that decide, for --criterion tasks.")] = None,
    hold_out_tasks: Annotated[str | None, typer.Option(help="Tasks kept out of the choice; only what was chosen is scored on them.")] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="More folders with lm-eval tasks.")] = None,
    limit: Annotated[int | None, typer.Option(help="First items of each task.")] = None,
    heldout_sequences: Annotated[int, typer.Option(help="Held-out sequences that agreement and attention_cosine read.")] = 16,
    prefix_tokens: Annotated[int | None, typer.Option(help="Mapped tokens of each of them; default half.")] = None,
    x: Annotated[
        str | None, typer.Option(help="Axis of the figure; default the numeric one with the most values. 'parameters' is the mapper's size.")
    ] = None,
    device: opt.Device = "cpu",
    trust_remote_code: opt.Trust = False,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Fit and score every combination of settings, without a forward pass wherever the change allows, and name the best.

    Forward passes are needed by --sequences, by recipes that train, and by every criterion but heldout_r2. What was chosen on held-out
    data is flattered by that data: report the chosen recipe on tasks or text that took no part.
    """
    opt.quiet_libraries()
    from kvbench.calibration.moments import Calibration
    from kvbench.cli.fit import models_of, recorded
    from kvbench.cli.sweep_output import SIZE, named, print_sweep, write_sweep
    from kvbench.errors import BadInputError
    from kvbench.mappers.recipes import load_recipe
    from kvbench.mappers.sweep import ROWS, Data, leave_one_out, number, parse_grid, varied
    from kvbench.mappers.sweep import sweep as run_sweep
    from kvbench.scoring.sweep import TaskJudge
    from kvbench.storage import dump_json

    if criterion not in CRITERIA:
        raise BadInputError(f"--criterion '{criterion}'; it is one of {', '.join(CRITERIA)}")
    if (criterion == "tasks") != (tasks is not None) or (hold_out_tasks and criterion != "tasks"):
        raise BadInputError("--criterion tasks, --tasks and --hold-out-tasks belong together: name deciding tasks with --tasks, or drop them")
    if (out / "sweep.json").exists() and not overwrite:
        raise BadInputError(f"'{out}' holds a sweep already; choose another --out or pass --overwrite")
    axes = parse_grid(grid or [])
    base = load_recipe(recipe, settings or [])
    calibrations = [Calibration(path) for path in moments]
    if sequences and len(calibrations) > 1:
        raise BadInputError("--sequences takes its sizes from one calibration, but several MOMENTS were given; sweep them apart")
    if len(calibrations) == 1 and not axes and not sequences:
        raise BadInputError("nothing to sweep; give --grid name=value,value, several MOMENTS, or --sequences")
    numeric = [name for name, values in axes.items() if all(number(name, value, 1) is not None for value in values)]
    allowed = [*numeric, *([ROWS] if sequences or len(calibrations) > 1 else []), SIZE]
    if x is not None and x not in allowed:
        raise BadInputError(f"--x {x}; it is one of {', '.join(allowed)}")
    models = None
    if sequences or criterion != "heldout_r2" or base.needs_models:
        models = models_of(calibrations[0], device=device, trust_remote_code=trust_remote_code)
    if sequences and models:
        from kvbench.scoring.sweep import nested

        calibrations = nested(calibrations[0], _sizes(sequences), out / "moments", models)
    data = [Data(label, calibration) for label, calibration in zip(_labels(calibrations), calibrations, strict=True)]
    include = include_path or []
    judge: Judge | None = None
    if models and criterion == "tasks":
        judge = TaskJudge(*models, _split(tasks or ""), limit=limit, include=include)
    elif models and criterion != "heldout_r2":
        judge = _heldout_judge(criterion, calibrations[0], models, heldout_sequences, prefix_tokens)
    with opt.progress_bar() as bar, warnings.catch_warnings():
        # p/n stands in the table.
        warnings.filterwarnings("ignore", message=".*features per target coordinate but only")
        if isinstance(judge, TaskJudge):
            judge.bar = opt.scoring_bar(bar, "")
        shown = bar.add_task("sweeping", total=len(data) * math.prod(map(len, axes.values())), unit="settings", speed="")
        trials = run_sweep(base, axes, data, judge=judge, models=models, progress=lambda _what, done, _total: bar.update(shown, completed=done))
    for trial in trials:
        if trial.failure:
            opt.say(f"{named(trial.settings)}: {trial.failure}")
    chosen = next(t for t in trials if t.chosen)
    folds: list[Fold] = []
    kept_out: dict[str, float] = {}
    if isinstance(judge, TaskJudge):
        folds = leave_one_out(trials, judge.tasks) if len(judge.tasks) > 1 else []
        if models and hold_out_tasks:
            last = TaskJudge(*models, _split(hold_out_tasks), limit=limit, include=include)
            calibration = next(d.calibration for d in data if d.label == chosen.calibration)
            scores = last([varied(base, _own(chosen, axes)).fit(calibration, models=models)])[0]
            kept_out = {task: scores[task] for task in last.tasks}
    best = {**recorded(varied(base, _own(chosen, axes)))}
    write_sweep(out, trials, axes=list(axes), x=x, best=best, folds=folds, kept_out=kept_out)
    if json:
        record = {"settings": [asdict(t) for t in trials], "chosen": best, "leave_one_out": [asdict(f) for f in folds], "held_out_tasks": kept_out}
        print(dump_json(record), end="")
    else:
        print_sweep(trials, folds, kept_out)
        print(out)
    opt.say(f"fit the chosen recipe with: kvbench fit {_path_of(chosen, data)} --recipe {out / 'recipe.yaml'} --out DIR")


def _heldout_judge(criterion: str, calibration: Calibration, models: tuple[LoadedModel, LoadedModel], sequences: int, prefix: int | None) -> Judge:
    from kvbench.calibration.sequences import load_tokens
    from kvbench.diagnostics.attention import AttentionJudge
    from kvbench.errors import BadInputError
    from kvbench.scoring.sweep import AgreementJudge

    if sequences < 1:
        raise BadInputError(f"--heldout-sequences {sequences}; it must be at least 1")
    tokens = load_tokens(calibration).heldout[:sequences]
    kind = AgreementJudge if criterion == "agreement" else AttentionJudge
    return kind(*models, tokens, prefix if prefix is not None else tokens.shape[1] // 2)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    from kvbench.errors import BadInputError

    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadInputError(f"--sequences '{text}' is not a comma-separated list of sizes") from error
    if len(set(sizes)) != len(sizes):
        raise BadInputError(f"--sequences {text} names a size twice")
    return sizes


def _labels(calibrations: list[Calibration]) -> list[str]:
    """Data names, told apart by size and at last by directory."""
    data = [c.manifest["data"] for c in calibrations]
    names = [str(d["name"]) for d in data]
    if len(set(names)) < len(names):
        same = len(set(names)) == 1
        names = [f"{d['sequences']} sequences" if same else f"{d['name']} ({d['sequences']} sequences)" for d in data]
    if len(set(names)) < len(names):
        names = [str(c.path) for c in calibrations]
    return names


def _own(trial: Trial, axes: dict[str, list[str]]) -> dict[str, str]:
    """Its settings of the recipe, without the calibration."""
    return {name: value for name, value in trial.settings.items() if name in axes}


def _path_of(trial: Trial, data: list[Data]) -> Path:
    return next(d.calibration.path for d in data if d.label == trial.calibration)
