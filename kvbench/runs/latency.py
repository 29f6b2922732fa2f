"""The file latency.json: what a transfer costs, phase by phase, against the target's own prefill. Terms and formulas: docs/latency.md."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, JsonValue

from kvbench.runs.schema import SCHEMA_VERSION, Stored

RE_PREFILL = "re-prefill"
"""Arm of the target's own prefill."""
RESAMPLES = 2_000


class Speedup(NamedTuple):
    """Re-prefill over transfer, to the first token.

    Attributes:
        value: ratio of medians; above 1 the transfer is faster.
        lower: bound of the interval, repeats resampled; None with a single repeat.
        upper: the other bound.
        n: repeats of the transfer.
    """

    value: float
    lower: float | None
    upper: float | None
    n: int


class PhaseTime(Stored):
    """One phase at one length and batch size."""

    name: str
    """source prefill, target prefill, target prefill and LM head, strip, map, rotate, inject, transfer, first token, page artifact, ..."""
    arm: str | None = None
    """Mapper; None for phases that have none."""
    tokens: int
    """Context tokens; 0 for phases that do not depend on them."""
    batch: int = 1
    """Rows."""
    seconds: tuple[float, ...]
    """Every repeat."""
    p50_seconds: float
    """Median."""
    p95_seconds: float
    """95th percentile."""
    p99_seconds: float
    """99th percentile."""
    operations: int | None = None
    """Floating-point operations of the matrix products, counted."""
    bytes_moved: int | None = None
    """Bytes that must be read or written at least once, counted."""
    floor_seconds: float | None = None
    """The larger of operations / peak rate and bytes / bandwidth, both measured on this machine."""
    achieved: float | None = None
    """floor / median: 1 is all the hardware gives."""


class LatencyPoint(Stored):
    """Time to the first token of one arm at one context length."""

    arm: str
    """Mapper; 're-prefill' for the target's own prefill; 're-prefill, NAME' for another baseline."""
    tokens: int
    """Context tokens."""
    p50_seconds: float
    """Median."""
    p95_seconds: float | None = None
    """95th percentile."""
    cold: bool = False
    """Whether the source's prefill is counted too."""
    batch: int = 1
    """Rows."""
    p99_seconds: float | None = None
    """99th percentile."""
    seconds: tuple[float, ...] = ()
    """Every repeat."""
    operations: int | None = None
    """As in `PhaseTime`."""
    floor_seconds: float | None = None
    """As in `PhaseTime`."""
    achieved: float | None = None
    """floor / median."""
    error: str | None = None
    """Why this is no result: faster than the measured peak matrix rate allows."""


class EndedLength(Stored):
    """A length that could not be measured to its end."""

    tokens: int
    """Context tokens."""
    batch: int
    """Rows."""
    phase: str
    """Where it ended."""
    reason: str
    """Out of memory, and how much there was."""


class MatrixRate(Stored):
    """One matrix product that was timed for the peak rate."""

    shape: tuple[int, int, int]
    """Rows, inner, columns."""
    what: str
    """Which product of the pair has this shape."""
    operations_per_second: float
    """The fastest of some repeats."""


class CopyRate(Stored):
    """One copy that was timed for the bandwidth."""

    buffer_bytes: int
    """Size of what was copied; bytes moved are twice that."""
    bytes_per_second: float
    """Read and written bytes per second, the fastest of some repeats."""


class QualityPoint(Stored):
    """One setting of a mapper: what it costs and what it gives."""

    label: str
    """In the figure."""
    arm: str
    """Mapper, 'source' or 're-prefill'."""
    hold_back: int | None = None
    """Last context tokens that the target runs itself."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Recipe of the mapper (k, rank, lambda, ...)."""
    tokens: int
    """Context tokens."""
    warm_seconds: float
    """Median time to the first token, the source cache being there."""
    cold_seconds: float | None = None
    """The same with the source's prefill."""
    kl_nats: float | None = None
    """Mean KL of the target's next-token distribution from that on the mapped prefix, nats."""
    top1_agreement: float | None = None
    """Share of positions with the target's own top token."""
    accuracy: float | None = None
    """Mean score in a run, where one was given."""
    n: int = 0
    """Sequences."""
    pareto: bool = False
    """Whether no other setting is both faster and better."""


class StagePeak(Stored):
    """Peak memory of one stage of the way."""

    stage: str
    """calibrate, fit, apply or evaluate."""
    peak_bytes: int
    """Most in use at once, beyond what was in use when the stage began (both models loaded)."""
    planned_bytes: int | None = None
    """What the plan said."""
    method: str
    """How it was counted."""
    what: str = ""
    """What was run."""


class Latency(Stored):
    """The file latency.json, written by `kvbench latency`."""

    format: Literal["kvbench-latency"] = "kvbench-latency"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    device: str
    """Where it was measured."""
    points: tuple[LatencyPoint, ...]
    """Time to the first token: re-prefill, every mapper warm and cold, further baselines."""
    source: str | None = None
    """Source model."""
    target: str | None = None
    """Target model."""
    dtype: str | None = None
    """Of weights and cache."""
    threads: int | None = None
    """torch threads (CPU work)."""
    attention: str | None = None
    """Attention backend."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Warm-ups, repeats, hold_back, seed, order of the lengths."""
    phases: tuple[PhaseTime, ...] = ()
    """All phases."""
    matrix_rates: tuple[MatrixRate, ...] = ()
    """Products timed for the peak."""
    copy_rates: tuple[CopyRate, ...] = ()
    """Copies timed for the bandwidth."""
    ended: tuple[EndedLength, ...] = ()
    """Lengths that ran out of memory."""
    notes: tuple[str, ...] = ()
    """What a reader must know."""
    quality: tuple[QualityPoint, ...] = ()
    """Quality against cost, where it was measured."""
    memory: tuple[StagePeak, ...] = ()
    """Peak memory by stage, where it was measured."""

    @property
    def conditions(self) -> str:
        """Device, dtype, threads, attention backend, in one phrase that belongs to every figure."""
        parts = [
            self.device,
            self.dtype,
            f"{self.threads} threads" if self.threads and self.threads > 1 else f"{self.threads} thread" if self.threads else None,
        ]
        return ", ".join(p for p in (*parts, f"attention {self.attention}" if self.attention else None) if p)

    @property
    def peak_operations_per_second(self) -> float | None:
        """The fastest matrix product that was timed."""
        return max((r.operations_per_second for r in self.matrix_rates), default=None)

    def arms(self) -> tuple[str, ...]:
        """Mappers, in order."""
        return tuple(dict.fromkeys(p.arm for p in self.points if not p.arm.startswith(RE_PREFILL)))

    def lengths(self, batch: int = 1) -> tuple[int, ...]:
        """Measured lengths, ascending."""
        return tuple(sorted({p.tokens for p in self.points if p.batch == batch}))

    def batches(self) -> tuple[int, ...]:
        """Measured batch sizes, ascending."""
        return tuple(sorted({p.batch for p in self.points}))

    def point(self, arm: str, tokens: int, *, cold: bool = False, batch: int = 1) -> LatencyPoint | None:
        """One measurement, if it was made."""
        return next((p for p in self.points if (p.arm, p.tokens, p.cold, p.batch) == (arm, tokens, cold, batch)), None)

    def phase(self, name: str, tokens: int, *, arm: str | None = None, batch: int = 1) -> PhaseTime | None:
        """One phase, if it was measured."""
        return next((p for p in self.phases if (p.name, p.tokens, p.arm, p.batch) == (name, tokens, arm, batch)), None)

    def speedup(self, arm: str, tokens: int, *, cold: bool, batch: int = 1, baseline: str = RE_PREFILL, level: float = 0.95) -> Speedup | None:
        """Re-prefill over transfer to the first token, ratio of medians.

        Args:
            arm: mapper.
            tokens: context tokens.
            cold: count the source's prefill too.
            batch: rows.
            baseline: what is divided by the transfer.
            level: coverage of the interval (percentile bootstrap over the repeats of both sides, seed 0).

        Returns:
            None where either side was not measured, or is an error.
        """
        ours, other = self.point(arm, tokens, cold=cold, batch=batch), self.point(baseline, tokens, batch=batch)
        if ours is None or other is None or ours.error or other.error or not ours.p50_seconds:
            return None
        value, n = other.p50_seconds / ours.p50_seconds, len(ours.seconds)
        if len(ours.seconds) < 2 or len(other.seconds) < 2:
            return Speedup(value, None, None, n)
        rng = np.random.default_rng(0)
        medians = [np.median(rng.choice(np.asarray(p.seconds), size=(RESAMPLES, len(p.seconds))), axis=1) for p in (other, ours)]
        lower, upper = np.quantile(medians[0] / medians[1], [(1 - level) / 2, (1 + level) / 2])
        return Speedup(value, float(lower), float(upper), n)

    def break_even(self, arm: str, *, cold: bool, batch: int = 1) -> int | None:
        """The shortest measured length from which on the transfer is faster at every measured length; None if there is none."""
        found = None
        for tokens in sorted(self.lengths(batch), reverse=True):
            gain = self.speedup(arm, tokens, cold=cold, batch=batch)
            if gain is None:
                continue
            if gain.value <= 1:
                break
            found = tokens
        return found
