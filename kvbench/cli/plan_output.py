"""What `kvbench plan` prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbench.timing.plan import PairPlan, PlanSettings, Rates

RULE = (
    "Times are estimates: the larger of operations over the matrix rate and bytes over the bandwidth, as if both were reached all the time "
    "(float64 rate for fit). Real runs reach a part of it: halve the speed in a first guess."
)


def as_json(source: str, target: str, settings: PlanSettings, found: PairPlan, rates: Rates | None, notes: Sequence[str]) -> str:
    """Everything as JSON; bytes and seconds, unrounded."""
    value = {
        "source": source,
        "target": target,
        "settings": asdict(settings),
        **{key: v for key, v in found._asdict().items() if key != "stages"},
        "stages": [{**stage._asdict(), "peak_bytes": stage.peak_bytes} for stage in found.stages],
        "time_rule": None if rates is None else f"{RULE} {rates.rule}",
        "notes": list(notes),
    }
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False)


def print_plan(source: str, target: str, settings: PlanSettings, found: PairPlan, rates: Rates | None, notes: Sequence[str]) -> None:
    """Tables on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 180)
    sizes = Table(title=f"{source} -> {target}: {settings.recipe}, k = {settings.k}, {settings.dtype}")
    for column in ("what", "size"):
        sizes.add_column(column, justify="left" if column == "what" else "right")
    rows = [("source parameters", _billions(found.source_parameters)), ("target parameters", _billions(found.target_parameters))]
    rows += [("mapper parameters", _billions(found.mapper_parameters))]
    rows += [(f"artifact, {name}", _gigabytes(size)) for name, size in found.artifact_bytes.items()]
    rows += [("one layer of the mapper", _gigabytes(found.layer_bytes)), ("moments on disk", _gigabytes(found.moments_bytes))]
    rows += [
        ("source cache per token", f"{found.source_cache_bytes_per_token:,} bytes"),
        ("target cache per token", f"{found.target_cache_bytes_per_token:,} bytes"),
    ]
    for row in rows:
        sizes.add_row(*row)
    console.print(sizes)
    stages = Table(title="Stages")
    for column in ("stage", "tokens", "peak GB", "made of, GB", "operations", "time, estimate"):
        stages.add_column(column, justify="left" if column in ("stage", "made of, GB") else "right")
    for stage in found.stages:
        stages.add_row(
            stage.name,
            "" if stage.tokens is None else f"{stage.tokens:,}",
            f"{stage.peak_bytes / 1e9:,.2f}{' !' if stage.peak_bytes > found.available_bytes else ''}",
            ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in stage.parts.items()),
            "" if stage.operations is None else f"{stage.operations / 1e12:,.4g} T",
            "" if stage.seconds is None else duration(stage.seconds),
        )
    console.print(stages)
    console.print(f"! beyond the {found.available_bytes / 1e9:.1f} GB available on this machine. GB are 10^9 bytes.", highlight=False)
    if rates is not None:
        console.print(f"{RULE} Rates {rates.rule}.", highlight=False)
    for note in notes:
        console.print(f"Note: {note}.", highlight=False, markup=False)


def duration(seconds: float) -> str:
    """Two significant figures in a unit that suits."""
    for limit, factor, unit in ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _billions(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count / 1e6:,.3f} M"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB" if size >= 1e7 else f"{size / 1e6:,.3f} MB"
