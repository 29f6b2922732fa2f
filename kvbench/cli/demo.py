"""`kvbench demo`: the whole way on the embedded family, a pair that should pass and a pair that should not."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from kvbench.pairs.models import LoadedModel
    from kvbench.scoring.summary import Cell

Section: TypeAlias = "tuple[str, list[Cell], str]"
"""Source, table, and the report's verdict in words."""
TASKS = ("tiny_choice", "tiny_fewshot", "tiny_sums", "tiny_prefix", "tiny_turns")
CONTROLS = ("zero", "raw")
SEQUENCES, HELDOUT, SEQ_LEN, STRIDE, K = 120, 24, 256, 1, 4


def demo(
    out: Annotated[Path, typer.Option(help="Directory for moments, mappers, runs and reports.")] = Path("kvbench-demo"),
    limit: Annotated[int | None, typer.Option(help="Items per task; default all.")] = None,
) -> None:
    """Run the main job on the embedded family: check, gates, calibrate, fit, evaluate, report. Under three minutes on two cores."""
    opt.quiet_libraries()
    from kvbench.errors import BadInputError
    from kvbench.storage import check_writable, write_atomic

    if out.exists() and not out.is_dir():
        raise BadInputError(f"'{out}' is a file; choose another --out")
    marker = out / ".kvbench-demo"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise BadInputError(f"'{out}' holds other files, and the demo replaces what is in its directory; choose another --out")
    if limit is not None and limit < 1:
        raise BadInputError(f"--limit {limit}; it is a number of items, at least 1")
    check_writable(out, overwrite=True)
    started = time.perf_counter()
    write_atomic(marker, "written by kvbench demo, which replaces it\n")
    with opt.progress_bar() as bar:
        sections = [_pair(name, out / name, limit, bar) for name in ("source", "stranger")]
    summary = out / "report.md"
    write_atomic(summary, markdown(sections, time.perf_counter() - started))
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 140)
    for source, cells, told in sections:
        console.print(_table(source, cells))
        console.print(_verdict(source, cells), highlight=False)
        console.print(f"report: {told}", highlight=False)
    opt.say(f"done in {time.perf_counter() - started:.0f} s; the table above as Markdown, then the full report of each pair:")
    for path in (summary, *(out / name / "report" / "report.html" for name in ("source", "stranger"))):
        print(path.resolve())


def _pair(name: str, out: Path, limit: int | None, bar: Any) -> Section:
    from kvbench.reporting import write_report
    from kvbench.reporting.comparison import compare
    from kvbench.runs import RunStore, load_runs
    from kvbench.scoring.arms import mapper_arm, own_prefill
    from kvbench.scoring.engine import TransferEngine
    from kvbench.scoring.evaluate import task_manager
    from kvbench.scoring.run import arm_spec, execute, leaf_tasks, run_spec
    from kvbench.scoring.scorer import SharedScorer
    from kvbench.scoring.summary import summarise
    from kvbench.screening.policy import load_policy

    source = f"embedded:{name}"
    models = opt.load_pair(
        source,
        "embedded:target",
        source_revision=None,
        target_revision=None,
        dtype="float32",
        device="cpu",
        device_map=None,
        attention="sdpa",
        trust_remote_code=False,
        gates=True,
    )
    # The demo always starts afresh; what an earlier one left behind goes first.
    for stale in ("moments", "moments.partial", "ridge", "run", "report"):
        shutil.rmtree(out / stale, ignore_errors=True)
    mapper = _fit(models, source, out, bar)
    arms = [own_prefill("target", models[1]), own_prefill("source", models[0]), mapper_arm(str(mapper), *models, name="ridge")]
    arms += [mapper_arm(control, *models) for control in CONTROLS]
    specs = [arm_spec(arm, str(mapper) if arm.name == "ridge" else arm.name) for arm in arms]
    reach = min(m.config.max_position_embeddings for m in models)
    scorer = SharedScorer(TransferEngine(*models, arms), batch_size=32, max_length=reach, bar=opt.scoring_bar(bar, f"{source}: "))
    manager = task_manager(TASKS)
    leaves = leaf_tasks(manager, TASKS)
    common: dict[str, Any] = {
        "limit": limit,
        "num_fewshot": None,
        "apply_chat_template": False,
        "fewshot_as_multiturn": False,
        "gen_kwargs": None,
        "seed": 1234,
    }
    spec = run_spec(source=models[0], target=models[1], arms=specs, tasks=leaves, scorer=scorer, batch_size=32, data={}, metadata={}, **common)
    results = execute(RunStore.create(out / "run", spec), scorer, TASKS, list(leaves), manager=manager, seconds={}, **common)
    compared = compare(load_runs(out / "run"), load_policy().comparison())
    write_report(compared, out / "report")
    told = "; ".join(f"{v.arm}: {v.reading}. {v.sentence}" for v in compared.comparison.verdicts)
    return source, summarise(results), told


def _fit(models: tuple[LoadedModel, LoadedModel], source: str, out: Path, bar: Any) -> Path:
    """Calibrate on the embedded world and fit the paper's ridge."""
    from kvbench.calibration.corpus import load_texts, pack
    from kvbench.calibration.harvest import Harvest, HarvestSettings
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.artifact import save_mapper
    from kvbench.mappers.ridge import Ridge

    blocks = pack(load_texts("embedded:world"), models[1].tokenizer, sequences=SEQUENCES, heldout=HELDOUT, seq_len=SEQ_LEN, seed=0)
    harvest = Harvest(*models, blocks, {"name": "embedded:world", "seed": 0}, HarvestSettings(stride=STRIDE, batch_size=16), out / "moments")
    step = bar.add_task(f"{source}: calibrating", total=0, unit="tokens", speed="")
    harvest.run(lambda done, total: bar.update(step, completed=done, total=total))
    calibration, recipe = Calibration(out / "moments"), Ridge(k=min(K, models[0].layers))
    save_mapper(recipe.fit(calibration), out / "ridge", recipe=recipe.configuration(), calibration=calibration.manifest)
    return out / "ridge"


def _format(cell: Cell) -> tuple[str, str, str]:
    """Figure, retention with interval, floor-normalised retention."""
    from kvbench.stats import Undefined

    figure = f"{cell.value:.3f}" if cell.chance is not None else f"ppl {cell.value:.2f}"
    if cell.arm == "target":
        return figure, "reference" if cell.chance is not None else "-", ""
    if isinstance(cell.retention, Undefined):
        return figure, "-", "-"
    interval = cell.retention_interval
    bounds = "" if isinstance(interval, Undefined) else f" [{interval.lower:.0%}, {interval.upper:.0%}]"
    floor = "-" if isinstance(cell.floor_normalised, Undefined) else f"{cell.floor_normalised:.0%}"
    return figure, f"{cell.retention:.0%}{bounds}", floor


def _table(source: str, cells: list[Cell]) -> Table:
    from rich.table import Table

    table = Table(title=f"{source} -> embedded:target")
    for column in ("task", "arm", "items", "chance", "score", "retention [95 %]", "floor-normalised"):
        table.add_column(column, justify="left" if column in ("task", "arm") else "right")
    last = None
    for cell in cells:
        if last not in (None, cell.task):
            table.add_section()
        figure, retention, floor = _format(cell)
        chance = "" if cell.chance is None else f"{cell.chance:.2f}"
        table.add_row(cell.task if cell.task != last else "", cell.arm, str(cell.items), chance, figure, retention, floor)
        last = cell.task
    return table


def _verdict(source: str, cells: list[Cell]) -> str:
    """What the table says, from its own figures."""
    by = {(c.task, c.arm): c.value for c in cells if c.chance is not None}
    tasks = list(dict.fromkeys(task for task, _ in by))
    mean = {arm: sum(by[task, arm] for task in tasks) / len(tasks) for arm in ("target", "source", "ridge", "zero")}
    compared = "better" if mean["ridge"] > mean["source"] else "no better"
    return (
        f"{source}: over {len(tasks)} accuracy tasks ridge scores {mean['ridge']:.3f} where the target scores {mean['target']:.3f}, the source model alone "
        f"{mean['source']:.3f} and a zeroed cache {mean['zero']:.3f}: the mapped cache is {compared} than keeping the source model."
    )


def markdown(sections: list[Section], seconds: float) -> str:
    """The demo's result as Markdown."""
    from kvbench._version import __version__

    lines = ["# kvbench demo", "", f"kvbench {__version__}, embedded family, float32, {seconds:.0f} s. Regenerate with `kvbench demo`.", ""]
    lines += [
        "Retention is relative to the target's own prefill; intervals are paired over identical items, 95 %. `zero` and `raw` are controls.",
        "",
    ]
    for source, cells, told in sections:
        lines += [f"## {source} -> embedded:target", "", _verdict(source, cells), "", f"Report: {told}", ""]
        lines += ["| task | arm | items | chance | score | retention [95 %] | floor-normalised |", "|---|---|---:|---:|---:|---:|---:|"]
        for cell in cells:
            figure, retention, floor = _format(cell)
            chance = "" if cell.chance is None else f"{cell.chance:.2f}"
            lines.append(f"| {cell.task} | {cell.arm} | {cell.items} | {chance} | {figure} | {retention} | {floor} |")
        lines.append("")
    return "\n".join(lines)
