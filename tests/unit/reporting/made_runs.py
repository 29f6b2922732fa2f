"""A whole made-up run: six arms, six tasks, and the optional measurements beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_samples import choice_samples, f1_samples, prefix_samples, sum_samples

from kvbench.runs import ArmSpec, ModelSpec, Provenance, RunSpec, RunStore, TaskResult, TaskSpec, rows_from_lm_eval
from kvbench.runs.files import write_stored
from kvbench.runs.measured import (
    Diagnostics,
    DriftSlope,
    Handoff,
    HandoffTurn,
    Latency,
    LatencyPoint,
    LayerDiagnostics,
    Sweep,
    SweepPoint,
)

ARMS = (
    ArmSpec(name="target", role="target"),
    ArmSpec(name="source", role="source"),
    ArmSpec(name="ridge", role="mapper", mapper="out/ridge", pin={"recipe": "Ridge(k=8)"}),
    ArmSpec(name="head_local", role="mapper", mapper="out/head_local", pin={"recipe": "HeadLocal(k=4)"}),
    ArmSpec(name="zero", role="control", mapper="zero"),
    ArmSpec(name="raw", role="control", mapper="raw"),
)
# Accuracy by arm: ridge keeps about all, head_local is below the source.
LEVEL = {"target": 0.72, "source": 0.55, "ridge": 0.715, "head_local": 0.50, "zero": 0.26, "raw": 0.24}
NATS = {"target": 2.60, "source": 2.80, "ridge": 2.605, "head_local": 2.72, "zero": 3.10, "raw": 3.60}


def task_samples(arm: str, *, scale: float = 1.0) -> dict[str, list[dict[str, Any]]]:
    """Samples of one arm by task."""
    level = LEVEL[arm]
    n = int(300 * scale)
    found = {
        "arc_made": choice_samples("arc_made", n, level, arm),
        "wino_made": choice_samples("wino_made", int(200 * scale), 0.5 + level / 3, arm, choices=2),
        "sums_made": sum_samples("sums_made", int(150 * scale), level - 0.1, arm),
        "wiki_made": prefix_samples("wiki_made", 60, NATS[arm], arm),
        "turns_made": f1_samples("turns_made", 20, 4, level, arm),
    }
    found |= {f"mmlu_{i}": choice_samples(f"mmlu_{i}", max(int(30 * scale), 4), 0.8 * level, arm, shots=5) for i in range(12)}
    return found


def make_run(
    path: Path,
    *,
    arms: Sequence[str] | None = None,
    samples: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] | None = None,
    extras: bool = True,
    finished: bool = True,
    scale: float = 1.0,
) -> RunStore:
    """Write a run as `kvbench evaluate` does.

    Args:
        path: where.
        arms: only these.
        samples: by arm and task, instead of the made-up ones.
        extras: also diagnostics, sweep, latency, handoff.
        finished: also provenance.
        scale: of the number of items.
    """
    chosen = tuple(arm for arm in ARMS if arms is None or arm.name in arms)
    answers = samples or {arm.name: task_samples(arm.name, scale=scale) for arm in chosen}
    tasks = list(next(iter(answers.values())))
    subjects = tuple(task for task in tasks if task.startswith("mmlu_"))
    spec = RunSpec(
        source=ModelSpec(name="made/small", revision="main", pin={"config_fingerprint": "abc"}),
        target=ModelSpec(name="made/large", revision="main"),
        arms=chosen,
        tasks=tuple(TaskSpec(name=task, num_fewshot=5 if task in subjects else 0) for task in tasks),
        pooled={"mmlu_made": subjects} if subjects else {},
        hold_back=1,
        dtype="float32",
        batch_size=16,
        seeds={"fewshot": 1234},
    )
    store = RunStore.create(path, spec)
    results = []
    for arm in chosen:
        for task, rows in answers[arm.name].items():
            converted = rows_from_lm_eval(rows, task, arm.name)
            store.write_samples(task, arm.name, converted)
            results.append(TaskResult(task=task, arm=arm.name, n=len(converted), metrics={"acc,none": 0.5}))
    store.write_results(results)
    if extras:
        write_extras(path)
    if finished:
        store.finish(Provenance(command="kvbench evaluate made/small made/large --mapper out/ridge", finished_utc="2026-01-02T03:04:05+00:00"))
    return store


def write_extras(path: Path) -> None:
    """Diagnostics, sweep, latency and handoff with plausible shapes."""
    source_layers, target_layers = 8, 10
    r2 = tuple(tuple(round(max(0.05, 0.9 - 0.09 * abs(s - 0.8 * t)), 3) for t in range(target_layers)) for s in range(source_layers))
    weaker = tuple(tuple(round(0.8 * v, 3) for v in row) for row in r2)
    cosine = tuple(round(0.99 - 0.008 * t, 4) for t in range(target_layers))
    write_stored(
        path / "diagnostics.json",
        Diagnostics(
            mappers=(
                LayerDiagnostics(arm="ridge", r2_keys=r2, r2_values=weaker, cosine_native=cosine),
                LayerDiagnostics(arm="head_local", cosine_native=tuple(round(c - 0.06, 4) for c in cosine)),
            )
        ),
    )
    points = tuple(
        SweepPoint(recipe=recipe, value=k, score=top - 0.02 * abs(k - 8) / 4, lower=top - 0.03 - 0.02 * abs(k - 8) / 4, upper=top + 0.03 - 0.02 * abs(k - 8) / 4, chosen=k == 8)
        for recipe, top in (("ridge", 0.71), ("head_local", 0.66))
        for k in (1, 2, 4, 8, 12)
    )  # fmt: skip
    write_stored(path / "sweep.json", Sweep(parameter="k", figure="mean accuracy", points=points))
    latency = tuple(
        LatencyPoint(arm=arm, tokens=tokens, p50_seconds=base + slope * tokens, cold=cold)
        for arm, base, slope, cold in (
            ("re-prefill", 0.01, 0.00014, False),
            ("ridge", 0.008, 0.000012, False),
            ("head_local", 0.007, 0.000004, False),
            ("ridge", 0.012, 0.00008, True),
        )
        for tokens in (64, 512, 4096, 32768)
    )
    write_stored(path / "latency.json", Latency(device="made-up device", points=latency))
    turns = tuple(
        HandoffTurn(protocol=protocol, arm="ridge", turn=t, n=20, f1=0.7 - slope * t, drift=slope * t, lower=slope * t - 0.02, upper=slope * t + 0.02)
        for protocol, slope in (("once", 0.004), ("per_turn", 0.010), ("alternate", 0.016))
        for t in range(1, 9)
    )
    write_stored(path / "handoff.json", Handoff(turns=turns, slopes=(DriftSlope(protocol="once", arm="ridge", per_turn=0.004),)))
