"""Optional files of a run directory that further commands write and the report shows: diagnostics, sweep, latency, handoff."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from kvbench.runs.files import read_stored
from kvbench.runs.schema import SCHEMA_VERSION, Stored


class LayerDiagnostics(Stored):
    """What one mapper does, layer by layer."""

    arm: str
    """Mapper, as in the run's arms."""
    r2_keys: tuple[tuple[float | None, ...], ...] | None = None
    """Held-out R2 `[source layer][target layer]` of keys, single-source."""
    r2_values: tuple[tuple[float | None, ...], ...] | None = None
    """The same for values."""
    cosine_native: tuple[float | None, ...] | None = None
    """Attention-output cosine `native` by target layer (DESIGN section 4)."""
    cosine_propagated: tuple[float | None, ...] | None = None
    """Attention-output cosine `propagated` by target layer."""
    next_token_agreement: float | None = None
    """Share of positions with the target's own top token."""


class Diagnostics(Stored):
    """The file diagnostics.json, written by `kvbench diagnose`."""

    format: Literal["kvbench-diagnostics"] = "kvbench-diagnostics"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    mappers: tuple[LayerDiagnostics, ...]
    """One per mapper."""


class SweepPoint(Stored):
    """One setting and what it gave."""

    recipe: str
    """Recipe or mapper family: one curve each."""
    value: float
    """Value of the swept parameter."""
    score: float
    """Figure of merit."""
    lower: float | None = None
    """Lower bound of its interval."""
    upper: float | None = None
    """Upper bound."""
    chosen: bool = False
    """Whether this setting was chosen."""


class Sweep(Stored):
    """The file sweep.json, written by `kvbench sweep`."""

    format: Literal["kvbench-sweep"] = "kvbench-sweep"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    parameter: str
    """What is swept, e.g. k, lambda, sequences."""
    log_scale: bool = False
    """Whether the parameter spans decades."""
    figure: str
    """Name of the figure of merit, e.g. 'held-out R2' or 'mean accuracy of the choosing tasks'."""
    points: tuple[SweepPoint, ...]
    """All settings."""


class LatencyPoint(Stored):
    """One way to reach the first token, at one context length."""

    arm: str
    """Arm, or 're-prefill' for the target's own prefill."""
    tokens: int
    """Context tokens."""
    p50_seconds: float
    """Median."""
    p95_seconds: float | None = None
    """95th percentile."""
    cold: bool = False
    """Whether the source's prefill is counted too."""


class Latency(Stored):
    """The file latency.json, written by `kvbench latency`."""

    format: Literal["kvbench-latency"] = "kvbench-latency"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    device: str
    """Where it was measured."""
    points: tuple[LatencyPoint, ...]
    """All measurements."""


class HandoffTurn(Stored):
    """One protocol at one turn."""

    protocol: str
    """per_turn, once, alternate, or the arm alone: target, source."""
    arm: str
    """Who answered: target, source or a mapper."""
    turn: int
    """1 is the first question."""
    n: int
    """Conversations that have this turn."""
    f1: float
    """Mean F1 against gold."""
    drift: float | None = None
    """F1 of target alone minus this, in F1."""
    lower: float | None = None
    """Lower bound of the drift, conversations resampled."""
    upper: float | None = None
    """Upper bound."""


class DriftSlope(Stored):
    """How fast an arm drifts."""

    protocol: str
    """As in `HandoffTurn`."""
    arm: str
    """As in `HandoffTurn`."""
    per_turn: float
    """Slope of drift over turns, F1 per turn."""
    lower: float | None = None
    """Lower bound, conversations resampled."""
    upper: float | None = None
    """Upper bound."""


class Handoff(Stored):
    """The file handoff.json, written by `kvbench handoff`."""

    format: Literal["kvbench-handoff"] = "kvbench-handoff"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    turns: tuple[HandoffTurn, ...]
    """All protocols, arms and turns."""
    slopes: tuple[DriftSlope, ...] = ()
    """One per protocol and arm."""


class Extras(Stored):
    """The optional files found beside a run."""

    diagnostics: Diagnostics | None = None
    """diagnostics.json."""
    sweep: Sweep | None = None
    """sweep.json."""
    latency: Latency | None = None
    """latency.json."""
    handoff: Handoff | None = None
    """handoff.json."""


Extra: TypeAlias = Diagnostics | Sweep | Latency | Handoff
_FILES: dict[str, type[Extra]] = {"diagnostics": Diagnostics, "sweep": Sweep, "latency": Latency, "handoff": Handoff}


def read_extras(directory: Path) -> Extras:
    """Read diagnostics.json, sweep.json, latency.json and handoff.json where they exist.

    Raises:
        ArtifactError: a file of another schema or of a newer version.
    """
    found: dict[str, Extra] = {}
    for name, model in _FILES.items():
        file = directory / f"{name}.json"
        if file.is_file():
            found[name] = read_stored(file, model)
    return Extras.model_validate({name: value.model_dump() for name, value in found.items()})
