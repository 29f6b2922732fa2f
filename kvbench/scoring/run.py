"""An evaluation as a run on disk: spec first, answers as they come, lm-eval's files and paired samples at the end."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.errors import BadInputError, KVBenchError
from kvbench.mappers.artifact import caveats
from kvbench.pairs.models import LoadedModel
from kvbench.pairs.pins import pin
from kvbench.runs import ArmSpec, ModelSpec, RunSpec, RunStore, TaskResult, TaskSpec, rows_from_lm_eval
from kvbench.runs.provenance import collect
from kvbench.scoring.arms import Arm
from kvbench.scoring.evaluate import Results, evaluate_arms
from kvbench.scoring.scorer import SharedScorer
from kvbench.storage import dump_json, utc_now

JOURNAL = "answers.sqlite"


def arm_spec(arm: Arm, mapper: str | None) -> ArmSpec:
    """How an arm is recorded: a stored mapper by its recipe, data and weights."""
    if not arm.transfers:
        return ArmSpec(name=arm.name, role=arm.answering)
    if arm.manifest is None:
        return ArmSpec(name=arm.name, role="control", mapper=mapper)
    digest = hashlib.sha256(dump_json(arm.manifest).encode()).hexdigest()
    data = arm.manifest["calibration"]["fingerprint"] or "unknown"
    pinned = {"recipe": arm.manifest["recipe"], "calibration": data, "manifest": digest, **caveats(arm.manifest)}
    return ArmSpec(name=arm.name, role="mapper", mapper=mapper, pin=pinned)


def leaf_tasks(manager: Any, tasks: Sequence[str]) -> dict[str, Any]:
    """Task name -> lm-eval task, groups resolved.

    Raises:
        BadInputError: a task whose definition or data cannot be loaded.
    """
    try:
        loaded: dict[str, Any] = manager.load(list(tasks))["tasks"]
    except KVBenchError:
        raise
    except Exception as error:  # lm-eval and datasets raise many unrelated types; to the user all mean that the task's data is not there
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"cannot load {', '.join(tasks)}: {type(error).__name__}: {reason}; without a network give local rows with --data-dir, or name other tasks"
        ) from error
    rolling = [name for name, task in loaded.items() if task.OUTPUT_TYPE == "loglikelihood_rolling"]
    if rolling:
        raise BadInputError(
            f"task {', '.join(rolling)} asks for rolling perplexity, which has no prefix to transfer; use 'wikitext2_prefix' (or 'tiny_prefix' for the embedded family)"
        )
    return loaded


def run_spec(
    *,
    source: LoadedModel,
    target: LoadedModel,
    arms: Sequence[ArmSpec],
    tasks: Mapping[str, Any],
    scorer: SharedScorer,
    batch_size: int | str,
    limit: float | None,
    num_fewshot: int | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    gen_kwargs: str | None,
    seed: int,
    data: Mapping[str, str],
    metadata: Mapping[str, Any],
) -> RunSpec:
    """Everything that decides a score, from the loaded objects."""
    template = target.tokenizer.chat_template if apply_chat_template else None
    return RunSpec(
        source=ModelSpec(name=source.name, revision=source.ref.revision, pin=pin(source)),
        target=ModelSpec(name=target.name, revision=target.ref.revision, pin=pin(target)),
        arms=tuple(arms),
        tasks=tuple(
            TaskSpec(
                name=name,
                num_fewshot=num_fewshot if num_fewshot is not None and task.config.num_fewshot != 0 else task.config.num_fewshot or 0,
                limit=limit,
                version=str(task.VERSION),
                data_fingerprint=data.get(name),
                output_type=str(task.OUTPUT_TYPE),
            )
            for name, task in tasks.items()
        ),
        hold_back=scorer.engine.hold_back,
        batch_size=batch_size,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        attention=target.attention_backend,
        limit=limit,
        seeds={"fewshot": seed},
        data=dict(data),
        chat_template=hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        fewshot_as_multiturn=fewshot_as_multiturn,
        generation={"gen_kwargs": gen_kwargs} if gen_kwargs else {},
        settings={"max_length": scorer.max_length, "share_headers": scorer.engine.share_headers, "metadata": dict(metadata)},
    )


def execute(
    store: RunStore | None,
    scorer: SharedScorer,
    tasks: Sequence[str],
    leaves: Sequence[str],
    *,
    manager: Any,
    limit: float | None,
    num_fewshot: int | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    gen_kwargs: str | None,
    seed: int,
    seconds: Mapping[str, float],
) -> dict[str, Results]:
    """Evaluate all arms and store everything.

    Args:
        store: a new or an unfinished run; None for processes that share the work and do not write.
        scorer: its journal lies in the run's directory.
        tasks: task and group names for lm-eval.
        leaves: the tasks they resolve to.
        manager: lm-eval task manager.
        limit: as lm-eval's.
        num_fewshot: as lm-eval's.
        apply_chat_template: as lm-eval's.
        fewshot_as_multiturn: as lm-eval's.
        gen_kwargs: as lm-eval's.
        seed: few-shot sampling seed.
        seconds: time spent before, by stage, for the provenance.

    Returns:
        Arm name -> lm-eval's results.
    """
    import time

    from lm_eval.loggers import EvaluationTracker

    started, clock = utc_now(), time.perf_counter()
    trackers = (
        {arm.name: EvaluationTracker(output_path=str(store.lm_eval_directory(arm.name))) for arm in scorer.engine.arms} if store is not None else None
    )
    results = evaluate_arms(
        scorer,
        tasks,
        manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=fewshot_as_multiturn,
        gen_kwargs=gen_kwargs,
        seed=seed,
        trackers=trackers,
    )
    if store is None or trackers is None:
        return results
    figures = []
    for arm, result in results.items():
        for task in leaves:
            directions = result.get("higher_is_better", {}).get(task, {})
            samples = result["samples"][task]
            lengths = context_tokens(scorer, samples)
            store.write_samples(task, arm, rows_from_lm_eval(samples, task, arm, higher_is_better=directions, n_context_tokens=lengths))
            metrics: dict[str, float | None] = {
                k: float(v) for k, v in result["results"][task].items() if "," in k and "stderr" not in k and isinstance(v, int | float)
            }
            figures.append(TaskResult(task=task, arm=arm, n=len({s["doc_id"] for s in samples}), metrics=metrics, higher_is_better=directions))
        _native_files(trackers[arm], result, store.lm_eval_directory(arm))
    store.write_results(figures)
    costs = asdict(scorer.engine.costs)
    notes = []
    if costs["too_short"]:
        notes.append(
            f"{costs['too_short']} of {costs['contexts']} contexts have at most hold_back={scorer.engine.hold_back} tokens: nothing was transferred for them"
        )
    if costs["truncated"]:
        notes.append(f"{costs['truncated']} contexts were cut on the left to fit {scorer.max_length} positions")
    store.finish(collect(started_utc=started, cost={**costs, "seconds": {**seconds, "evaluate": time.perf_counter() - clock}}, notes=notes))
    if scorer.journal is not None:
        scorer.journal.remove()
    return results


def context_tokens(scorer: SharedScorer, samples: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Tokens of each item's first context, by doc_id, as they were counted when it was tokenised."""
    found = {}
    for sample in samples:
        if isinstance(sample["doc"], Mapping) and "context_ids" in sample["doc"]:
            found[int(sample["doc_id"])] = len(sample["doc"]["context_ids"])
            continue
        context = str(sample["arguments"][0][0])
        # lm-eval moves trailing spaces of a context into the continuation before it encodes.
        ids = scorer.encoded.get((context.rstrip(), None, None)) or scorer.encoded.get((context, None, None))
        if ids is not None:
            found[int(sample["doc_id"])] = len(ids)
    return found


def _native_files(tracker: Any, result: dict[str, Any], directory: Path) -> None:
    """lm-eval's own result and sample files; a repeated command replaces those of a killed one.

    Raises:
        KVBenchError: lm-eval swallowed an error while writing.
    """
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    # lm-eval's writer rewrites what it is given, and the caller still reads it.
    result = copy.deepcopy(result)
    samples = result.pop("samples")
    logging.getLogger("lm_eval.loggers.evaluation_tracker").setLevel(logging.ERROR)
    tracker.save_results_aggregated(results=result, samples=samples)
    for task in result["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    written = len(list(directory.rglob("samples_*.jsonl"))) == len(result["configs"]) and any(directory.rglob("results_*.json"))
    if not written:
        raise KVBenchError(
            f"lm-eval could not write its result files to '{directory}'; is the disk full? Everything scored so far is kept: make room and repeat the same command"
        )
