"""From seconds to stored points: percentiles, floors, and the check that no time is below what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.runs.latency import LatencyPoint, PhaseTime
from kvbench.timing.clock import percentiles
from kvbench.timing.counted import Work
from kvbench.timing.peak import Machine

UNSTEADY = 2.0
"""Slowest over fastest repeat from which on a note warns."""


def judged_point(arm: str, tokens: int, batch: int, seconds: Sequence[float], work: Work, machine: Machine) -> LatencyPoint:
    """A warm point with its floor; a time below what the peak matrix rate allows is an error, not a result."""
    p = percentiles(seconds)
    floor, least = machine.floor(work), machine.compute_floor(work)
    error = None
    if p.p50 < least:
        peak = machine.operations_per_second or 0.0
        error = (
            f"{1000 * p.p50:.3g} ms is below the floor of {1000 * least:.3g} ms that the measured peak of {peak / 1e9:,.0f} Gop/s allows for "
            f"{work.operations / 1e9:,.3g} Gop: a cache hit or another mistake was timed, not a prefill"
        )
    return LatencyPoint(
        arm=arm, tokens=tokens, batch=batch, seconds=tuple(seconds), p50_seconds=p.p50, p95_seconds=p.p95, p99_seconds=p.p99,
        operations=work.operations, floor_seconds=floor, achieved=floor / p.p50 if p.p50 else None, error=error,
    )  # fmt: skip


def phase_time(
    name: str, arm: str | None, tokens: int, batch: int, seconds: Sequence[float], operations: int | None, moved: int | None, floor: float | None
) -> PhaseTime:
    """One phase with its percentiles and the fraction of its floor that it reaches."""
    p = percentiles(seconds)
    return PhaseTime(
        name=name, arm=arm, tokens=tokens, batch=batch, seconds=tuple(seconds), p50_seconds=p.p50, p95_seconds=p.p95, p99_seconds=p.p99,
        operations=operations, bytes_moved=moved, floor_seconds=floor, achieved=floor / p.p50 if floor is not None and p.p50 else None,
    )  # fmt: skip


def unsteady(points: Sequence[LatencyPoint]) -> list[str]:
    """A note where repeats of one thing differ too much for its median to be trusted: the slowest took twice the fastest or more."""
    lengths = sorted({p.tokens for p in points if len(p.seconds) > 1 and max(p.seconds) >= UNSTEADY * min(p.seconds)})
    if not lengths:
        return []
    return [
        f"repeats differ by {UNSTEADY:g} times or more at {', '.join(f'{n:,}' for n in lengths)} tokens: do not trust these rows, measure them again"
    ]


def added(left: Sequence[float], right: Sequence[float]) -> tuple[float, ...]:
    """Two parts of each repeat together."""
    return tuple(a + b for a, b in zip(left, right, strict=True))


def device_name(device: torch.device) -> str:
    """The device in words: the card, or the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        from kvbench.runs.provenance import processor

        return f"CPU {processor()}"
    return device.type
