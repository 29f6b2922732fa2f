"""`kvbench demo`: the whole way on the embedded family, a pair that should pass and a pair that should not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from kvbench.scoring.summary import Cell

TASKS = ("tiny_choice", "tiny_fewshot", "tiny_sums", "tiny_prefix", "tiny_turns")
CONTROLS = ("zero", "raw")
SEQUENCES, HELDOUT, SEQ_LEN, STRIDE, K = 120, 24, 256, 1, 4


def demo(
    out: Annotated[Path, typer.Option(help="Directory for moments, mappers and the report.")] = Path("kvbench-demo"),
    limit: Annotated[int | None, typer.Option(help="Items per task; default all.")] = None,
) -> None:
    """Run the main job on the embedded family: check, gates, calibrate, fit, evaluate, report. Under three minutes on two cores."""
    from kvbench.errors import BadInputError
    from kvbench.storage import write_atomic

    opt.quiet_libraries()
    if out.exists() and not out.is_dir():
        raise BadInputError(f"'{out}' is a file; choose another --out")
    started = time.perf_counter()
    with opt.progress_bar() as bar:
        sections = [_pair(f"embedded:{name}", "embedded:target", out / name, limit, bar) for name in ("source", "stranger")]
    report = out / "report.md"
    write_atomic(report, markdown(sections, time.perf_counter() - started))
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 140)
    for source, cells in sections:
        console.print(_table(source, cells))
        console.print(_verdict(source, cells), highlight=False)
    opt.say(f"done in {time.perf_counter() - started:.0f} s")
    print(report.resolve())


def _pair(source: str, target: str, out: Path, limit: int | None, bar: Any) -> tuple[str, list[Cell]]:
    import shutil

    from kvbench.calibration.corpus import load_texts, pack
    from kvbench.calibration.harvest import Harvest, HarvestSettings
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.artifact import save_mapper
    from kvbench.mappers.ridge import Ridge
    from kvbench.scoring.arms import mapper_arm, own_prefill
    from kvbench.scoring.engine import TransferEngine
    from kvbench.scoring.evaluate import evaluate_arms
    from kvbench.scoring.scorer import SharedScorer
    from kvbench.scoring.summary import summarise

    models = opt.load_pair(
        source,
        target,
        source_revision=None,
        target_revision=None,
        dtype="float32",
        device="cpu",
        device_map=None,
        attention="sdpa",
        trust_remote_code=False,
        gates=True,
    )
    moments, mapper = out / "moments", out / "ridge"
    shutil.rmtree(moments.with_name("moments.partial"), ignore_errors=True)
    blocks = pack(load_texts("embedded:world"), models[1].tokenizer, sequences=SEQUENCES, heldout=HELDOUT, seq_len=SEQ_LEN, seed=0)
    harvest = Harvest(*models, blocks, {"name": "embedded:world", "seed": 0}, HarvestSettings(stride=STRIDE, batch_size=16), moments)
    step = bar.add_task(f"{source}: calibrating", total=0, unit="tokens", speed="")
    harvest.run(lambda done, total: bar.update(step, completed=done, total=total), overwrite=True)
    calibration, recipe = Calibration(moments), Ridge(k=min(K, models[0].layers))
    save_mapper(recipe.fit(calibration), mapper, recipe=recipe.configuration(), calibration=calibration.manifest, overwrite=True)
    arms = [own_prefill("target", models[1]), own_prefill("source", models[0]), mapper_arm(str(mapper), *models, name="ridge")]
    arms += [mapper_arm(name, *models) for name in CONTROLS]
    limit_length = min(m.config.max_position_embeddings for m in models)
    scorer = SharedScorer(TransferEngine(*models, arms), batch_size=32, max_length=limit_length, bar=opt.scoring_bar(bar, f"{source}: "))
    results = evaluate_arms(scorer, TASKS, limit=limit)
    return source, summarise(results)


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


def markdown(sections: list[tuple[str, list[Cell]]], seconds: float) -> str:
    """The demo's result as Markdown."""
    from kvbench._version import __version__

    lines = ["# kvbench demo", "", f"kvbench {__version__}, embedded family, float32, {seconds:.0f} s. Regenerate with `kvbench demo`.", ""]
    lines += [
        "Retention is relative to the target's own prefill; intervals are paired over identical items, 95 %. `zero` and `raw` are controls.",
        "",
    ]
    for source, cells in sections:
        lines += [f"## {source} -> embedded:target", "", _verdict(source, cells), ""]
        lines += ["| task | arm | items | chance | score | retention [95 %] | floor-normalised |", "|---|---|---:|---:|---:|---:|---:|"]
        for cell in cells:
            figure, retention, floor = _format(cell)
            chance = "" if cell.chance is None else f"{cell.chance:.2f}"
            lines.append(f"| {cell.task} | {cell.arm} | {cell.items} | {chance} | {figure} | {retention} | {floor} |")
        lines.append("")
    return "\n".join(lines)
