"""The work of a screen's stages. Each finds what an earlier call has finished and does the rest."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.calibration.corpus import TokenBlocks, load_texts, pack
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import load_tokens
from kvbench.diagnostics.diagnose import DiagnoseSettings, diagnose
from kvbench.diagnostics.text import heldout_text, record
from kvbench.errors import BadInputError
from kvbench.mappers.artifact import save_mapper
from kvbench.mappers.recipes import load_recipe
from kvbench.pairs.models import LoadedModel
from kvbench.runs import RunStore
from kvbench.runs.files import read_stored, write_stored
from kvbench.runs.measured import Diagnostics, Latency
from kvbench.scoring.arms import Arm, equal_shapes, mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.journal import Journal
from kvbench.scoring.offline import manager_over
from kvbench.scoring.run import JOURNAL, arm_spec, execute, leaf_tasks, run_spec
from kvbench.scoring.scorer import Bar, SharedScorer
from kvbench.scoring.sweep import AgreementJudge
from kvbench.screening.budget import Budget, candidate_recipes
from kvbench.timing.latency import LatencySettings, measure

Step = Callable[[int, int], None]
Pair = tuple[LoadedModel, LoadedModel]
SUFFIX_SHARE = 2
"""Prefix and suffix of the diagnostics are each one half of a calibration sequence."""


def calibration_texts(data: str) -> tuple[list[str], str]:
    """Documents of a file, a hub data set, or all files in a folder's `calibration`, and the name to record.

    Raises:
        BadInputError: no text.
    """
    folder = Path(data)
    if not folder.is_dir():
        return list(load_texts(data)), data
    inner = folder / "calibration" if (folder / "calibration").is_dir() else folder
    files = sorted(p for p in inner.iterdir() if p.suffix in {".jsonl", ".txt", ".parquet"})
    if not files:
        raise BadInputError(f"'{inner}' holds no calibration text (.jsonl, .txt or .parquet); name a file with --data")
    texts = [text for file in files for text in load_texts(str(file))]
    return texts, "+".join(f"{inner.name}/{file.name}" for file in files)


def blocks_of(data: str, tokenizer: Any, budget: Budget, seq_len: int, seed: int) -> tuple[TokenBlocks, str]:
    """Calibration tokens of a budget.

    Raises:
        BadInputError: too little text.
    """
    texts, name = calibration_texts(data)
    return pack(texts, tokenizer, sequences=budget.sequences, heldout=budget.heldout, seq_len=seq_len, seed=seed), name


def calibrate(models: Pair, blocks: TokenBlocks, name: str, budget: Budget, seed: int, out: Path, progress: Step) -> Calibration:
    """Moments of the budget's text."""
    if not out.exists():
        settings = HarvestSettings(stride=budget.stride, batch_size=8)
        harvest = Harvest(*models, blocks, {"name": name, "seed": seed}, settings, out)
        harvest.memory_plan().refuse_if_too_large()
        harvest.run(progress)
    found = Calibration(out)
    if found.manifest["data"]["fingerprint"] != blocks.fingerprint():
        raise BadInputError(f"'{out}' holds another calibration; choose another --out")
    return found


@dataclass(frozen=True)
class Candidate:
    """A fitted recipe.

    Attributes:
        name: its directory.
        path: the artifact.
        kl_nats: KL of the target's answers on the choosing half of the held-out text.
        agreement: share of equal top tokens there.
    """

    name: str
    path: Path
    kl_nats: float
    agreement: float


def fit(models: Pair, calibration: Calibration, budget: Budget, folder: Path, progress: Step) -> list[Candidate]:
    """Fit all candidates and judge them on the choosing half of the held-out sequences, best first."""
    recipes = candidate_recipes(budget, models[0].layers, equal_heads=models[0].kv_heads == models[1].kv_heads)
    arms: list[Arm] = []
    for number, (name, method, settings) in enumerate(recipes):
        path = folder / name
        if not path.exists():
            recipe = load_recipe(method, [f"{key}={value}" for key, value in settings.items()])
            with warnings.catch_warnings():
                # p/n stands in the artifact and in its report.
                warnings.filterwarnings("ignore", message=".*features per target coordinate but only")
                fitted = recipe.fit(calibration, models=models if recipe.needs_models else None)
            save_mapper(fitted, path, recipe=recipe.configuration(), calibration=calibration.manifest)
        arms.append(mapper_arm(str(path), *models, name=name))
        progress(number + 1, len(recipes))
    chosen, _ = halves(calibration)
    judged = AgreementJudge(*models, chosen, chosen.shape[1] // SUFFIX_SHARE)([arm.mapper for arm in arms])
    found = [
        Candidate(name, folder / name, scores["held-out KL, nats per token"], scores["held-out agreement"])
        for (name, _, _), scores in zip(recipes, judged, strict=True)
    ]
    return sorted(found, key=lambda c: c.kl_nats)


def halves(calibration: Calibration) -> tuple[Any, Any]:
    """The held-out sequences: what chooses the recipe, and what is reported."""
    heldout = load_tokens(calibration).heldout
    middle = len(heldout) // 2
    return heldout[:middle], heldout[middle:]


def arms_of(models: Pair, mapper: Path | str, name: str) -> list[Arm]:
    """Target, source, the mapper under test, and two controls."""
    controls = ("zero", "raw") if equal_shapes(*models) else ("zero", "random")
    arms = [own_prefill("target", models[1]), own_prefill("source", models[0]), mapper_arm(str(mapper), *models, name=name)]
    return arms + [mapper_arm(c, *models, name=f"{c} control" if c == name else c) for c in controls]


def diagnosed(
    models: Pair, arms: Sequence[Arm], name: str, calibration: Calibration | None, data: str, seq_len: int, budget: Budget, out: Path, progress: Step
) -> Diagnostics:
    """Diagnostics of the mapper and the controls on the half of the held-out text that chose nothing."""
    file = out / "diagnostics.json"
    if file.is_file():
        return read_stored(file, Diagnostics)
    under_test = [arm for arm in arms if arm.transfers]
    if calibration is not None:
        tokens = halves(calibration)[1]
        told = record(str(calibration.manifest["data"]["name"]), tokens, "the half of the held-out part that did not choose the recipe")
    else:
        manifests = [arm.manifest for arm in under_test if arm.manifest is not None]
        texts, label = calibration_texts(data)
        if Path(data).is_dir():
            tokens = pack(texts, models[1].tokenizer, sequences=budget.heldout, heldout=1, seq_len=seq_len, seed=0).fit
            told = record(label, tokens, "as far as the names of the calibrations tell")
        else:
            tokens, told = heldout_text(data, models[1].tokenizer, sequences=budget.heldout // 2, length=seq_len, manifests=manifests)
    prefix = tokens.shape[1] // SUFFIX_SHARE
    settings = DiagnoseSettings((prefix,), tokens.shape[1] - prefix, greedy_sequences=budget.greedy_sequences, greedy_tokens=min(64, prefix))
    found = diagnose(
        *models,
        {arm.name: arm.mapper for arm in under_test},
        tokens,
        settings,
        fitted=[arm.name for arm in under_test if arm.manifest is not None or arm.name == name],
        data=told,
        progress=progress,
    )
    write_stored(file, found)
    return found


def evaluated(
    models: Pair,
    arms: Sequence[Arm],
    name: str,
    mapper: str,
    tasks: Sequence[str],
    out: Path,
    *,
    limit: int | None,
    data_dir: Path | None,
    include: Sequence[Path],
    metadata: Mapping[str, Any],
    seed: int,
    hold_back: int,
    bar: Bar,
    say: Callable[[str], None],
) -> RunStore:
    """Score the arms on some tasks into a run; an unfinished one goes on."""
    with tempfile.TemporaryDirectory(prefix="kvbench-tasks-") as folder:
        manager, fingerprints, told = manager_over(tasks, data_dir, Path(folder), include, metadata=metadata)
        for line in told:
            say(line)
        leaves = leaf_tasks(manager, tasks)
        reach = min(int(m.config.max_position_embeddings) for m in models)
        scorer = SharedScorer(TransferEngine(*models, arms, hold_back=hold_back), batch_size="auto", max_length=reach, bar=bar)
        specs = []
        for arm in arms:
            spec = arm_spec(arm, mapper if arm.name == name else arm.name if arm.transfers else None)
            # A control that is put on trial is judged like any mapper.
            specs.append(spec.model_copy(update={"role": "mapper"}) if arm.name == name else spec)
        common: dict[str, Any] = {
            "limit": limit,
            "num_fewshot": None,
            "apply_chat_template": False,
            "fewshot_as_multiturn": False,
            "gen_kwargs": None,
            "seed": seed,
        }
        asked = run_spec(
            source=models[0],
            target=models[1],
            arms=specs,
            tasks=leaves,
            scorer=scorer,
            batch_size="auto",
            data=fingerprints,
            metadata=metadata,
            **common,
        )
        store = RunStore.create(out, asked)
        if store.provenance() is None:
            scorer.journal = Journal(out / JOURNAL)
            execute(store, scorer, list(tasks), list(leaves), manager=manager, seconds={}, **common)
    return store


def timed(
    models: Pair, arm: Arm, lengths: Sequence[int], budget: Budget, out: Path, hold_back: int, progress: Callable[[int, int, str], None]
) -> Latency:
    """Time to the first token, warm and cold."""
    file = out / "latency.json"
    if file.is_file():
        return read_stored(file, Latency)
    settings = replace(LatencySettings(), lengths=tuple(lengths), warmups=budget.warmups, repeats=budget.repeats, hold_back=hold_back)
    found = measure(*models, {arm.name: arm.mapper}, settings, progress=progress)
    write_stored(file, found)
    return found
