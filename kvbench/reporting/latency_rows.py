"""Tables of latency.json, as text: for the page, the Markdown report and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from kvbench.runs.latency import RE_PREFILL, Latency, LatencyPoint, PhaseTime, Speedup


class PlainTable(NamedTuple):
    """A table of text.

    Attributes:
        title: above it.
        header: column names; the first is a row label.
        rows: cells.
        notes: below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def milliseconds(seconds: float | None) -> str:
    """Three significant digits, no exponent."""
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(point: LatencyPoint | PhaseTime | None) -> str:
    """Median, and behind it the 95th percentile."""
    if point is None:
        return "-"
    if isinstance(point, LatencyPoint) and point.error:
        return f"ERROR {milliseconds(point.p50_seconds)}"
    return milliseconds(point.p50_seconds) + (f" ({milliseconds(point.p95_seconds)})" if point.p95_seconds is not None else "")


def gain(found: Speedup | None) -> str:
    """A speed-up with its interval."""
    if found is None:
        return "-"
    return f"{found.value:.2f}x" + (f" [{found.lower:.2f}, {found.upper:.2f}]" if found.lower is not None and found.upper is not None else "")


def first_token_table(found: Latency) -> PlainTable:
    """Time to the first token of every arm, warm and cold, and the speed-up."""
    baselines = [arm for arm in dict.fromkeys(p.arm for p in found.points) if arm.startswith(RE_PREFILL)]
    several = len(found.batches()) > 1
    header = ["tokens", *(["rows"] if several else []), *(f"{arm} ms" for arm in baselines)]
    header += ["mapper", "warm ms", "cold ms", "speed-up warm", "speed-up cold", "of floor: re-prefill / warm"]
    rows = []
    for batch in found.batches():
        for tokens in found.lengths(batch):
            own = [found.point(arm, tokens, batch=batch) for arm in baselines]
            for arm in found.arms():
                warm, cold = (found.point(arm, tokens, cold=c, batch=batch) for c in (False, True))
                if warm is None:
                    continue
                reached = [f"{100 * p.achieved:.0f} %" if p is not None and p.achieved is not None else "-" for p in (own[0] if own else None, warm)]
                rows.append(
                    [
                        f"{tokens:,}", *([str(batch)] if several else []), *(_spread(p) for p in own), arm, _spread(warm), _spread(cold),
                        *(gain(found.speedup(arm, tokens, cold=c, batch=batch)) for c in (False, True)), " / ".join(reached),
                    ]
                )  # fmt: skip
    notes = [
        f"{found.conditions}. Median (95th percentile) of {found.settings.get('repeats', '?')} repeats after {found.settings.get('warmups', '?')} warm-ups."
    ]
    notes += [_break_even(found, arm) for arm in found.arms() if any(p.seconds for p in found.points)]
    notes += [f"{e.tokens:,} tokens x {e.batch} ended at '{e.phase}': {e.reason}" for e in found.ended]
    return PlainTable("Time to the first token", header, rows, [*notes, *found.notes])


def _break_even(found: Latency, arm: str) -> str:
    texts = []
    for cold in (False, True):
        tokens = found.break_even(arm, cold=cold)
        texts.append(f"{'cold' if cold else 'warm'} {'at no measured length' if tokens is None else f'from {tokens:,} tokens'}")
    return f"{arm} is faster than re-prefill: {', '.join(texts)}."


def phase_table(found: Latency, batch: int | None = None) -> PlainTable:
    """Median and 95th percentile of every phase at every length, with the fraction of the floor that is reached."""
    chosen = next(iter(found.batches()), 1) if batch is None else batch
    lengths = found.lengths(chosen)
    names = list(
        dict.fromkeys((p.name, p.arm) for p in sorted(found.phases, key=lambda p: (p.arm or "", ORDER.index(p.name) if p.name in ORDER else 99)))
    )
    rows = []
    for name, arm in names:
        cells = []
        for tokens in lengths:
            phase = found.phase(name, tokens, arm=arm, batch=chosen) or (found.phase(name, 0, arm=arm) if tokens == lengths[0] else None)
            share = f" {100 * phase.achieved:.0f} %" if phase is not None and phase.achieved is not None else ""
            cells.append("" if phase is None else f"{milliseconds(phase.p50_seconds)}{share}")
        rows.append([name, arm or "", *cells])
    note = (
        "Median milliseconds and, where operations or bytes are counted, the share of the floor that is reached (docs/latency.md). "
        + found.conditions
        + "."
    )
    return PlainTable("Phases", ["phase", "mapper", *(f"{n:,}" for n in lengths)], rows, [note])


ORDER = (
    "target prefill",
    "target first logits",
    "target prefill and LM head",
    "source prefill",
    "transfer",
    "first token",
    "strip",
    "map",
    "rotate",
    "inject",
    "page artifact",
)


def quality_table(found: Latency) -> PlainTable:
    """Quality against cost, fastest first."""
    rows = []
    for p in sorted(found.quality, key=lambda p: p.warm_seconds):
        rows.append(
            [
                p.label, "*" if p.pareto else "", milliseconds(p.warm_seconds), milliseconds(p.cold_seconds),
                "-" if p.kl_nats is None else f"{p.kl_nats:.4f}", "-" if p.top1_agreement is None else f"{100 * p.top1_agreement:.1f} %",
                "-" if p.accuracy is None else f"{100 * p.accuracy:.1f} %",
            ]
        )  # fmt: skip
    tokens = f" at {found.quality[0].tokens:,} tokens" if found.quality else ""
    header = ["setting", "front", f"warm ms{tokens}", "cold ms", "KL, nats", "top-1 agreement", "accuracy"]
    return PlainTable(
        "Quality against cost",
        header,
        rows,
        ["* on the Pareto front: nothing else is both faster and nearer to the target. " + found.conditions + "."],
    )


def memory_table(found: Latency) -> PlainTable:
    """Peak memory by stage."""
    rows = [
        [p.stage, f"{p.peak_bytes / 1e6:,.1f}", "-" if p.planned_bytes is None else f"{p.planned_bytes / 1e6:,.1f}", p.what] for p in found.memory
    ]
    method = found.memory[0].method if found.memory else ""
    return PlainTable(
        "Peak memory", ["stage", "peak MB", "planned MB", "what"], rows, [f"Beyond what was in use when the stage began; counted by: {method}."]
    )


def tables(found: Latency) -> list[PlainTable]:
    """All tables that have rows."""
    made = [first_token_table(found), phase_table(found), quality_table(found), memory_table(found)]
    return [table for table in made if table.rows]


def frames(found: Latency) -> dict[str, pd.DataFrame]:
    """The same as data, unrounded: points, phases, speedups, quality, memory."""
    gains = [
        {"arm": arm, "tokens": tokens, "batch": batch, "cold": cold, **s._asdict()}
        for batch in found.batches()
        for arm in found.arms()
        for tokens in found.lengths(batch)
        for cold in (False, True)
        if (s := found.speedup(arm, tokens, cold=cold, batch=batch)) is not None
    ]
    conditions = {"device": found.device, "dtype": found.dtype, "threads": found.threads, "attention": found.attention}
    raw = {
        "first_token": [p.model_dump(exclude={"seconds"}) for p in found.points],
        "phases": [p.model_dump(exclude={"seconds"}) for p in found.phases],
        "speedups": gains,
        "quality": [p.model_dump(exclude={"settings"}) | {"settings": str(p.settings)} for p in found.quality],
        "memory": [p.model_dump() for p in found.memory],
    }
    return {name: pd.DataFrame([row | conditions for row in rows]) for name, rows in raw.items() if rows}
