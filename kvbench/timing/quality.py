"""Quality against cost: how near to its own prefix the target is on a mapped one, against what the mapped one takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.diagnostics.agreement import compare_predictions, run_behind
from kvbench.errors import BadInputError
from kvbench.kv.inject import PrefixCache
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel, write_prefix
from kvbench.runs.latency import RE_PREFILL, Latency, PhaseTime, QualityPoint
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine
from kvbench.timing import phases
from kvbench.timing.clock import percentiles, release, repeat
from kvbench.timing.latency import LatencySettings, Progress, measure

SUFFIX = 64
"""Scored tokens behind the context."""


@dataclass(frozen=True)
class QualitySettings:
    """What is compared.

    Attributes:
        tokens: context tokens.
        hold_backs: last context tokens that the target runs itself, increasing.
        batch: sequences at once.
    """

    tokens: int
    hold_backs: tuple[int, ...] = (1, 16, 64, 256)
    batch: int = 4

    def check(self, reach: int) -> None:
        """Refuse before anything is run.

        Raises:
            BadInputError: a hold_back that leaves nothing to transfer, or a context beyond the positions.
        """
        if not self.hold_backs or self.hold_backs[0] < 1 or list(self.hold_backs) != sorted(set(self.hold_backs)):
            raise BadInputError(
                f"hold_back values {','.join(map(str, self.hold_backs)) or '(none)'}: they must be positive and increasing, e.g. 1,16,64,256"
            )
        if self.hold_backs[-1] >= self.tokens:
            raise BadInputError(
                f"hold_back {self.hold_backs[-1]} leaves nothing to transfer of {self.tokens} tokens; use smaller ones or a longer context"
            )
        if self.tokens + SUFFIX > reach:
            raise BadInputError(f"{self.tokens} context tokens and {SUFFIX} scored ones do not fit {reach} positions; use a shorter context")


@torch.no_grad()
def agreement(
    source: LoadedModel, target: LoadedModel, mappers: Mapping[str, Mapper], ids: NDArray[np.int32], settings: QualitySettings
) -> dict[tuple[str, int | None], dict[str, float]]:
    """KL and top-1 agreement of the target on each mapped prefix with itself on its own.

    The context is the first `tokens` of each sequence. Of a transfer, all but the last `hold_back` are mapped, the target runs the rest; it then
    runs the scored suffix. All arms are scored at the same positions: from the last context token on.

    Args:
        source: the model that prefills.
        target: the model that answers.
        mappers: by name.
        ids: `[sequences, tokens + SUFFIX]` held-out text.
        settings: see `QualitySettings`.

    Returns:
        By (arm, hold_back): kl_nats and top1_agreement, mean over sequences; the source alone has hold_back None.
    """
    arms = {name: Arm(name, "target", mapper) for name, mapper in mappers.items()}
    engine = TransferEngine(source, target, list(arms.values()))
    sums: dict[tuple[str, int | None], dict[str, list[float]]] = {}
    n, total = settings.tokens, settings.tokens + SUFFIX
    for first in range(0, len(ids), settings.batch):
        rows = torch.from_numpy(ids[first : first + settings.batch].astype(np.int64))
        wanted = rows[:, n:total]
        own = _own(target, rows, n)
        found: dict[tuple[str, int | None], tuple[LoadedModel, Tensor]] = {("source", None): (source, _own(source, rows, n))}
        kv = source.prefill(rows[:, : n - 1].tolist())
        for name, arm in arms.items():
            for hold_back in settings.hold_backs:
                prefix = n - hold_back
                cut = type(kv)([k[:, :, :prefix] for k in kv.keys], [v[:, :, :prefix] for v in kv.values], kv.lengths.clamp(max=prefix))
                cache = target.cache_for(len(rows), total, prefix)
                engine.map_into(cache, slice(0, len(rows)), 0, arm, target, cut, source)
                found[name, hold_back] = (target, _behind(target, cache, rows, prefix, n))
        for key, (model, hidden) in found.items():
            figures = compare_predictions(target, own, model, hidden, wanted)
            kept = sums.setdefault(key, {"kl_nats": [], "top1_agreement": []})
            for figure, values in kept.items():
                values += figures[figure].tolist()
        release(target.device)
    return {key: {figure: float(np.mean(values)) for figure, values in kept.items()} for key, kept in sums.items()}


def _own(model: LoadedModel, rows: Tensor, n: int) -> Tensor:
    """Hidden states from the last context token on, behind the model's own prefix, through the same path as all arms."""
    kv = model.prefill(rows[:, : n - 1].tolist())
    cache = model.cache_for(len(rows), rows.shape[1], n - 1)
    write_prefix(cache, kv, slice(None), 0)
    return _behind(model, cache, rows, n - 1, n)


def _behind(model: LoadedModel, cache: PrefixCache, rows: Tensor, prefix: int, n: int) -> Tensor:
    """Run everything behind the prefix but the last token; keep the scored positions."""
    return run_behind(model, cache, rows[:, prefix:-1].to(model.device), prefix)[:, n - 1 - prefix :]


def quality_points(
    source: LoadedModel,
    target: LoadedModel,
    mappers: Mapping[str, Mapper],
    recipes: Mapping[str, Mapping[str, object]],
    ids: NDArray[np.int32],
    settings: QualitySettings,
    timing: LatencySettings,
    *,
    accuracies: Mapping[tuple[str, int | None], float] | None = None,
    progress: Progress | None = None,
) -> tuple[QualityPoint, ...]:
    """Every mapper at every hold_back: agreement and warm latency at one context length, Pareto front marked.

    Args:
        source: the model that prefills.
        target: the model that answers.
        mappers: by name.
        recipes: their settings, for the record.
        ids: held-out text, `[sequences, tokens + SUFFIX]`.
        settings: see `QualitySettings`.
        timing: warm-ups, repeats and seed; its lengths and hold_back are replaced.
        accuracies: mean score of a run by (arm, hold_back), where there is one.
        progress: told how far it is.
    """
    settings.check(min(int(m.config.max_position_embeddings) for m in (source, target)))
    scored = agreement(source, target, mappers, ids, settings)
    points: list[QualityPoint] = []
    latency: Latency | None = None
    prefill: PhaseTime | None = None
    for hold_back in settings.hold_backs:
        once = dataclasses.replace(timing, lengths=(settings.tokens,), batch_sizes=(1,), hold_back=hold_back, with_head=False, breakdown=False)
        latency = measure(source, target, mappers, once, progress=progress)
        prefill = prefill or latency.phase("source prefill", settings.tokens)
        for name in mappers:
            warm, cold = (latency.point(name, settings.tokens, cold=c) for c in (False, True))
            if warm is None:
                continue
            points.append(
                QualityPoint(
                    label=name if hold_back == 1 else f"{name}, {hold_back} held back",
                    arm=name,
                    hold_back=hold_back,
                    settings={key: value for key, value in recipes.get(name, {}).items() if isinstance(value, str | int | float | bool | None)},
                    tokens=settings.tokens,
                    warm_seconds=warm.p50_seconds,
                    cold_seconds=cold.p50_seconds if cold else None,
                    accuracy=(accuracies or {}).get((name, hold_back)),
                    n=len(ids),
                    kl_nats=scored[name, hold_back]["kl_nats"],
                    top1_agreement=scored[name, hold_back]["top1_agreement"],
                )
            )
    own = latency.point(RE_PREFILL, settings.tokens) if latency else None
    alone = _source_alone(source, settings.tokens, timing)
    points.append(
        QualityPoint(
            label="source alone", arm="source", tokens=settings.tokens, warm_seconds=alone, cold_seconds=alone + prefill.p50_seconds if prefill else None,
            accuracy=(accuracies or {}).get(("source", None)), n=len(ids),
            kl_nats=scored["source", None]["kl_nats"], top1_agreement=scored["source", None]["top1_agreement"],
        )
    )  # fmt: skip
    if own is not None:
        accuracy = (accuracies or {}).get(("target", None))
        points.append(
            QualityPoint(
                label=RE_PREFILL, arm=RE_PREFILL, tokens=settings.tokens, warm_seconds=own.p50_seconds, cold_seconds=own.p50_seconds,
                kl_nats=0.0, top1_agreement=1.0, accuracy=accuracy, n=len(ids),
            )
        )  # fmt: skip
    return pareto(points)


def _source_alone(source: LoadedModel, tokens: int, timing: LatencySettings) -> float:
    """Median seconds of the source's own next token behind its own cache: what doing without the target costs."""
    ids = torch.randint(0, int(source.config.vocab_size), (1, tokens), generator=torch.Generator().manual_seed(timing.seed))
    context = phases.Context(source, source, ids, 1)
    cache = source.cache_for(1, tokens, tokens - 1)
    write_prefix(cache, source.prefill(context.rows()), slice(None), 0)

    def once() -> list[float]:
        watch = context.watch()
        phases.answer(context, cache)
        watch.split()
        cache.rewind(tokens - 1)
        return watch.splits

    (seconds,) = repeat(once, warmups=timing.warmups, repeats=timing.repeats, device=source.device)
    return percentiles(seconds).p50


def pareto(points: Sequence[QualityPoint]) -> tuple[QualityPoint, ...]:
    """Mark the points that no other beats: none is at least as fast and at least as near to the target, and better in one of both.

    Nearness is the KL; where a point has none, its accuracy.
    """

    def cost(p: QualityPoint) -> tuple[float, float]:
        badness = p.kl_nats if p.kl_nats is not None else -(p.accuracy or 0.0)
        return p.warm_seconds, badness

    def beaten(p: QualityPoint) -> bool:
        mine = cost(p)
        return any(all(a <= b for a, b in zip(cost(q), mine, strict=True)) and cost(q) != mine for q in points)

    return tuple(p.model_copy(update={"pareto": not beaten(p)}) for p in points)
