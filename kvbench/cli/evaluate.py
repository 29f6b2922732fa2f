"""`kvbench evaluate`: all arms on the same items in one pass."""

from __future__ import annotations

import json as json_module
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.runs import RunStore
    from kvbench.runs.store import SAMPLES
    from kvbench.scoring.engine import Costs


def evaluate(
    source: opt.Source,
    target: opt.Target,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks or groups, separated by commas.")],
    out: Annotated[Path, typer.Option(help="Run directory; the same command resumes it.")],
    mapper: Annotated[
        list[str] | None, typer.Option(help="Artifact directory, NAME=DIRECTORY, embedded:ridge, or a control; repeat for more.")
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Control arms; default zero and raw (random where KV shapes differ). Give 'none' for none.")
    ] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="More folders with lm-eval tasks.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Local rows for stock tasks; no network is used.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="Task metadata, e.g. prefix_tokens=512.")] = None,
    limit: Annotated[float | None, typer.Option(help="First items of each task; below 1 a share.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt, in place of the task's own.")] = None,
    batch_size: Annotated[str, typer.Option(help="Contexts per batch, or auto.")] = "auto",
    hold_back: Annotated[int, typer.Option(help="Last context tokens that the answering model runs itself.")] = 1,
    max_length: Annotated[int | None, typer.Option(help="Position limit; default the smaller of both models'.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="As lm-eval's.")] = False,
    fewshot_as_multiturn: Annotated[bool, typer.Option("--fewshot-as-multiturn", help="As lm-eval's.")] = False,
    gen_kwargs: Annotated[str | None, typer.Option(help="Generation arguments, as lm-eval's.")] = None,
    seed: Annotated[int, typer.Option(help="Few-shot sampling.")] = 1234,
    share_headers: Annotated[bool, typer.Option("--share-headers/--no-share-headers", help="Prefill what prompts share once.")] = True,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    device_map: opt.DeviceMap = None,
    attention: opt.Attention = "sdpa",
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    gates: opt.Gates = True,
    allow_mismatched: opt.Mismatched = False,
    json: opt.Json = False,
) -> None:
    """Evaluate target, source, mappers and controls on identical items in one pass, into a run that `kvbench report` compares."""
    opt.quiet_libraries()
    from kvbench.errors import BadInputError
    from kvbench.mappers.artifact import caveats
    from kvbench.mappers.controls import CONTROLS
    from kvbench.ranks import join
    from kvbench.runs import RunStore
    from kvbench.scoring.arms import equal_shapes, mapper_arm, own_prefill
    from kvbench.scoring.engine import TransferEngine
    from kvbench.scoring.journal import Journal
    from kvbench.scoring.offline import manager_over
    from kvbench.scoring.run import JOURNAL, arm_spec, execute, leaf_tasks, run_spec
    from kvbench.scoring.scorer import SharedScorer
    from kvbench.storage import check_writable
    from kvbench.timing.stage_lines import evaluation_line

    ranks = join(device, device_map)
    device = ranks.device(device)
    ranks.on_main(lambda: check_writable(out, overwrite=True))
    fitted = {label: spec for label, spec in map(_named, dict.fromkeys(mapper or [])) if spec not in CONTROLS}
    ranks.on_main(lambda: RunStore.refuse_other(out, source=source, target=target, mappers=list(fitted)))
    check_early(mapper, control, source, target, gen_kwargs, limit)
    if num_fewshot is not None and num_fewshot < 0:
        raise BadInputError(f"--num-fewshot {num_fewshot}; it is a number of examples, 0 or more")
    if hold_back < 1:
        raise BadInputError(f"--hold-back {hold_back}; the answering model runs at least the last token itself")
    if not batch_size.startswith("auto") and not (batch_size.isdigit() and int(batch_size) > 0):
        raise BadInputError(f"--batch-size {batch_size}; it is a positive number or auto")
    labels = ["target", "source", *(_named(item)[0] for item in dict.fromkeys([*(mapper or []), *(c for c in control or [] if c != "none")]))]
    if doubled := [name for name in labels if labels.count(name) > 1]:
        raise BadInputError(f"two arms would be called '{doubled[0]}'; name them with --mapper NAME=DIRECTORY")
    opt.refuse_beyond_positions("--max-length", max_length, (source, source_revision), (target, target_revision), trust_remote_code=trust_remote_code)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    task_metadata = _metadata(metadata, source, target)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvbench-tasks-") as folder:
        manager, fingerprints, lines = manager_over(
            names, data_dir, Path(folder), include_path or [], num_fewshot=num_fewshot, metadata=task_metadata
        )
        for line in lines:
            opt.say(line)
        leaves = leaf_tasks(manager, names)
        models = opt.load_pair(
            source,
            target,
            source_revision=source_revision,
            target_revision=target_revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attention=attention,
            trust_remote_code=trust_remote_code,
            gates=gates,
            allow_mismatched=allow_mismatched,
        )
        arms = [own_prefill("target", models[1]), own_prefill("source", models[0])]
        specs = [arm_spec(arm, None) for arm in arms]
        standard = ["zero", "raw"] if equal_shapes(*models) else ["zero", "random"]
        controls = [c for c in (control or standard) if c != "none"]
        for item in dict.fromkeys([*(mapper or []), *controls]):
            label, location = _named(item)
            arm = mapper_arm(location, *models, name=label)
            for name, told in caveats(arm.manifest or {}).items():
                opt.say(f"mapper '{arm.name}': {name}: {told}")
            arms.append(arm)
            specs.append(arm_spec(arm, location))
        reach = max_length or min(int(m.config.max_position_embeddings) for m in models)
        engine = TransferEngine(*models, arms, hold_back=hold_back, share_headers=share_headers)
        opt.say(evaluation_line(models, [engine.models[arm.answering] for arm in arms]))
        seconds = {"load": time.perf_counter() - started}
        with opt.progress_bar() as bar:
            scorer = SharedScorer(engine, batch_size=batch_size, max_length=reach, bar=opt.scoring_bar(bar, ""), ranks=ranks)
            common: dict[str, Any] = {
                "limit": int(limit) if limit is not None and limit >= 1 else limit,
                "num_fewshot": num_fewshot,
                "apply_chat_template": apply_chat_template,
                "fewshot_as_multiturn": fewshot_as_multiturn,
                "gen_kwargs": gen_kwargs,
                "seed": seed,
            }
            spec = run_spec(
                source=models[0],
                target=models[1],
                arms=specs,
                tasks=leaves,
                scorer=scorer,
                batch_size=batch_size,
                data=fingerprints,
                metadata=task_metadata,
                **common,
            )
            ranks.agree("run (models, data or settings)", spec.model_copy(update={"device": None}).model_dump_json())
            # Process 0 alone touches the run; all hear whether there is anything to do.
            new = not out.exists() or not any(out.iterdir())
            if ranks.on_main(lambda: RunStore.create(out, spec).provenance() is not None):
                opt.say(f"'{out}' is finished already; nothing to do")
            else:
                if ranks.main and (out / JOURNAL).exists():
                    opt.say(f"going on with the unfinished run in '{out}'")
                scorer.journal = ranks.together(lambda: Journal(out / JOURNAL) if ranks.main else None)
                store = RunStore.open(out) if ranks.main else None
                try:
                    execute(store, scorer, names, list(leaves), manager=manager, seconds=seconds, **common)
                except BadInputError:
                    # A mistake that only lm-eval notices must not leave a run behind that refuses the corrected command.
                    if ranks.main and store is not None and new and not any((out / SAMPLES).iterdir()):
                        shutil.rmtree(out)
                    raise
    if ranks.main:
        _print(RunStore.open(out), engine.costs, json)


def _named(item: str) -> tuple[str, str]:
    """Name of the arm, and the control, artifact or `embedded:` name it stands for; `NAME=WHERE` gives it a name."""
    from kvbench.mappers.controls import CONTROLS
    from kvbench.scoring.arms import artifact_path

    label, separator, location = item.partition("=")
    if separator:
        return label, location
    return (item, item) if item in CONTROLS else (artifact_path(item).name, item)


def check_early(mapper: list[str] | None, control: list[str] | None, source: str, target: str, gen_kwargs: str | None, limit: float | None) -> None:
    """Mistakes that can be found before two models are loaded."""
    from lm_eval.utils import simple_parse_args_string

    from kvbench.errors import BadInputError
    from kvbench.mappers.controls import CONTROLS
    from kvbench.pairs.locate import load_config, resolve
    from kvbench.pairs.pins import check_pin
    from kvbench.pairs.tokenizers import config_fingerprint
    from kvbench.scoring.arms import artifact_path
    from kvbench.storage import read_manifest

    if limit is not None and not 0 < limit < math.inf:
        raise BadInputError(f"--limit {limit}; it is a number of items, or a share between 0 and 1")
    if gen_kwargs:
        try:
            simple_parse_args_string(gen_kwargs)
        except (ValueError, IndexError) as error:
            raise BadInputError(f"--gen-kwargs '{gen_kwargs}' is not of the form key=value,key=value") from error
        if not all("=" in part for part in gen_kwargs.split(",")):
            raise BadInputError(f"--gen-kwargs '{gen_kwargs}' is not of the form key=value,key=value")
    for item in [*(mapper or []), *(c for c in control or [] if c != "none")]:
        spec = item.partition("=")[2] or item
        if spec in CONTROLS:
            continue
        manifest = read_manifest(artifact_path(spec), "mapper")
        for role, name in (("source", source), ("target", target)):
            found = {"name": name, "config_fingerprint": config_fingerprint(load_config(resolve(name)))}
            check_pin(manifest[role], found, role, f"mapper '{spec}'")


def _metadata(settings: list[str] | None, source: str, target: str) -> dict[str, Any]:
    """What tasks that depend on the tokenizer are built from; lm-eval's own command passes its model arguments likewise."""
    from kvbench.errors import BadInputError

    values: dict[str, Any] = {"pretrained": target, "source": source}
    for setting in settings or []:
        key, separator, value = setting.partition("=")
        if not separator:
            raise BadInputError(f"--metadata {setting} is not of the form key=value")
        values[key] = int(value) if value.lstrip("-").isdigit() else value
    return values


def _print(store: RunStore, costs: Costs, as_json: bool) -> None:
    results = store.results().results
    if as_json:
        print(json_module.dumps([r.model_dump() for r in results], indent=2, sort_keys=True))
        return
    from rich.console import Console
    from rich.table import Table

    arms = [arm.name for arm in store.spec.arms]
    table = Table(title=f"{store.spec.source.name if store.spec.source else ''} -> {store.spec.target.name if store.spec.target else ''}")
    for column in ("task", "metric", "items", *arms):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task in store.spec.tasks:
        rows = {r.arm: r for r in results if r.task == task.name}
        for metric in next(iter(rows.values())).metrics:
            cells = [rows[arm].metrics.get(metric) for arm in arms]
            table.add_row(task.name, metric, str(rows[arms[0]].n), *("-" if c is None else f"{c:.4f}" for c in cells))
    Console(width=None if Console().is_terminal else 160).print(table)
    opt.say(
        f"prefilled {costs.prefilled['source']:,} source and {costs.prefilled['target']:,} target tokens (shared headers saved {costs.saved['source']:,} and "
        f"{costs.saved['target']:,}), mapped {costs.mapped:,}, answered {costs.answered:,}, generated {costs.generated:,}"
    )
    opt.say(f"compare with: kvbench report {store.path}")
    print(store.path)
