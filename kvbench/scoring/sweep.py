"""Criteria of a sweep that run models: agreement with the target's own prefill on held-out sequences, and tasks.

Also nested calibration sizes, which need forward passes but no new text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import load_tokens
from kvbench.errors import BadInputError
from kvbench.mappers.base import Mapper
from kvbench.mappers.sweep import check_prefix
from kvbench.pairs.models import LoadedModel, Query
from kvbench.scoring.arms import Arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.evaluate import evaluate_arms, task_manager
from kvbench.scoring.scorer import Bar, SharedScorer, tqdm_bar
from kvbench.scoring.summary import PERPLEXITIES, main_metric


class AgreementJudge:
    """How often the target's most likely next token is the same on a mapped and on its own prefix.

    Args:
        source: the model that prefills.
        target: the model that answers.
        tokens: `[sequences, tokens]` held-out sequences.
        prefix: tokens whose cache is transferred; what follows is run by the target itself, the true text at each position.
        batch_size: sequences per batch.

    Raises:
        BadInputError: no token before or behind the prefix.
    """

    def __init__(self, source: LoadedModel, target: LoadedModel, tokens: NDArray[Any], prefix: int, *, batch_size: int = 4) -> None:
        check_prefix(prefix, tokens.shape[1])
        self.source, self.target, self.tokens, self.prefix, self.batch_size = source, target, tokens, prefix, batch_size

    def __call__(self, mappers: Sequence[Mapper]) -> list[dict[str, float]]:
        """Share of positions with the same top token, and KL(own || mapped) in nats per token."""
        arms = [own_prefill("target", self.target), *(Arm(f"candidate-{i}", "target", mapper) for i, mapper in enumerate(mappers))]
        engine = TransferEngine(self.source, self.target, arms)
        same, divergence, count = [0] * len(mappers), [0.0] * len(mappers), 0
        for first in range(0, len(self.tokens), self.batch_size):
            rows = self.tokens[first : first + self.batch_size]
            logits = self._log_probabilities(engine, rows)
            own = next(logits)
            for i, mapped in enumerate(logits):
                same[i] += int((own.argmax(-1) == mapped.argmax(-1)).sum())
                divergence[i] += float((own.exp() * (own - mapped)).sum(-1).double().sum())
            count += own.shape[0]
        return [{"held-out agreement": s / count, "held-out KL, nats per token": d / count} for s, d in zip(same, divergence, strict=True)]

    def _log_probabilities(self, engine: TransferEngine, rows: NDArray[Any]) -> Iterator[torch.Tensor]:
        """Per arm `[batch * suffix, vocabulary]` log-probabilities, one arm in memory at a time."""
        suffix = rows.shape[1] - self.prefix
        filled = engine.fill((), [tuple(row[: self.prefix].tolist()) for row in rows], [], room=suffix)[0]
        ids = torch.tensor(rows[:, self.prefix :].tolist(), device=self.target.device).repeat(len(engine.arms), 1)
        positions = (torch.arange(suffix, device=ids.device) + self.prefix).expand(len(ids), -1)
        query = Query(ids, positions, torch.zeros_like(ids))
        hidden = self.target.run(filled.cache, query, 0, filled.lengths, filled.padded)
        for part in hidden.chunk(len(engine.arms)):
            yield self.target.logits(part.flatten(0, 1)).log_softmax(-1)


class TaskJudge:
    """Mean accuracy of lm-eval tasks; every context is prefilled once for all mappers that are judged together.

    Args:
        source: the model that prefills.
        target: the model that answers.
        tasks: lm-eval tasks; groups are resolved.
        limit: first items of each task.
        batch_size: contexts per batch, or `auto`.
        include: more folders with tasks.
    """

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        tasks: Sequence[str],
        *,
        limit: int | None = None,
        batch_size: str = "auto",
        include: Sequence[Path] = (),
    ) -> None:
        self.source, self.target, self.limit, self.batch_size = source, target, limit, batch_size
        self.asked = list(dict.fromkeys(tasks))
        self.manager = task_manager(self.asked, include, metadata={"pretrained": target.name, "source": source.name})
        self.bar: Bar = tqdm_bar
        self.tasks: list[str] = []
        """Single tasks, known after the first judgement."""

    def __call__(self, mappers: Sequence[Mapper]) -> list[dict[str, float]]:
        """The mean over tasks first, then each task's accuracy.

        Raises:
            BadInputError: a task without an accuracy.
        """
        arms = [Arm(f"candidate-{i}", "target", mapper) for i, mapper in enumerate(mappers)]
        reach = min(int(m.config.max_position_embeddings) for m in (self.source, self.target))
        scorer = SharedScorer(TransferEngine(self.source, self.target, arms), batch_size=self.batch_size, max_length=reach, bar=self.bar)
        results = evaluate_arms(scorer, self.asked, manager=self.manager, limit=self.limit)
        out = []
        for arm in arms:
            found = results[arm.name]
            by_task = {task: self._accuracy(task, found) for task in sorted(found["samples"])}
            self.tasks = list(by_task)
            out.append({"mean accuracy of the choosing tasks": sum(by_task.values()) / len(by_task), **by_task})
        return out

    @staticmethod
    def _accuracy(task: str, found: dict[str, Any]) -> float:
        sample = found["samples"][task][0]
        metric = main_metric(sample)
        if metric in PERPLEXITIES:
            raise BadInputError(f"task '{task}' measures {metric}, which has no place in a mean of accuracies; leave it out of --tasks")
        return float(found["results"][task][f"{metric},{sample['filter']}"])


def nested(
    calibration: Calibration, sizes: Sequence[int], folder: Path, models: tuple[LoadedModel, LoadedModel], *, batch_size: int = 8
) -> list[Calibration]:
    """Calibrations on the first sequences of one: each smaller one is part of each larger one, the held-out part is the same.

    Args:
        calibration: the whole one, with its tokens.
        sizes: fit sequences of each.
        folder: gets one directory per size, `sequences-N`; one that is there already is used again.
        models: source and target.
        batch_size: sequences per forward pass.

    Raises:
        BadInputError: a size below 1 or above what is stored.
    """
    blocks = load_tokens(calibration)
    stored, manifest = len(blocks.fit), calibration.manifest
    out = []
    for size in sizes:
        if not 1 <= size <= stored:
            raise BadInputError(f"--sequences {size}, but '{calibration.path}' holds {stored} fit sequences; use 1 to {stored}, or calibrate on more")
        if size == stored:
            out.append(calibration)
            continue
        part = TokenBlocks(blocks.fit[:size], blocks.heldout, blocks.fit_documents, blocks.heldout_documents)
        path = folder / f"sequences-{size}"
        if path.exists():
            known = Calibration(path)
            if known.manifest["data"]["fingerprint"] != part.fingerprint():
                raise BadInputError(f"'{path}' holds another calibration; choose another --out")
            out.append(known)
            continue
        settings = HarvestSettings(
            stride=int(manifest["data"]["stride"]),
            batch_size=batch_size,
            source_layers=calibration.source_layers,
            rotated="k_rotated" in calibration.kinds(),
        )
        record = {name: manifest["data"][name] for name in ("name", "seed") if name in manifest["data"]}
        Harvest(*models, part, record, settings, path).run()
        out.append(Calibration(path))
    return out
