"""Optional files of a run directory that further commands write and the report shows: diagnostics, sweep, latency, handoff."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from kvbench.runs.files import read_stored
from kvbench.runs.latency import Latency as Latency
from kvbench.runs.latency import LatencyPoint as LatencyPoint
from kvbench.runs.schema import SCHEMA_VERSION, Role, Stored

FIGURE_NAMES = (
    "r2_keys",
    "r2_keys_rotated",
    "r2_values",
    "relative_error_keys",
    "relative_error_keys_rotated",
    "relative_error_values",
    "cosine_keys",
    "cosine_keys_rotated",
    "cosine_values",
    "attention_cosine_native",
    "attention_cosine_native_worst_layer",
    "attention_cosine_propagated",
    "attention_cosine_propagated_worst_layer",
    "k_concentration",
    "v_concentration",
    "kl_nats",
    "top1_agreement",
    "top5_overlap",
    "nll_difference",
    "greedy_agreement",
    "greedy_identical_tokens",
)
"""Scalar figures of `kvbench diagnose`, as policies and correlations name them; defined in docs/diagnostics.md."""


class DiagnosticFigure(Stored):
    """One scalar figure of one arm at one prefix length."""

    name: str
    """One of `FIGURE_NAMES`."""
    value: float | None = None
    """None with a reason."""
    lower: float | None = None
    """Lower bound, sequences resampled."""
    upper: float | None = None
    """Upper bound."""
    n: int
    """Sequences."""
    unit: str = ""
    """Empty for pure numbers."""
    reason: str | None = None
    """Why there is no value, or no interval."""


class Profile(Stored):
    """A figure along something: layers, positions, classes of tokens."""

    name: str
    """What is measured."""
    at: tuple[str, ...]
    """Labels, in order."""
    values: tuple[float | None, ...]
    """One per label; None where it is undefined."""
    n: tuple[int, ...] = ()
    """Tokens behind each value, where that differs."""
    heads: tuple[tuple[float | None, ...], ...] = ()
    """`[label][head]`, where it is known by head (KV heads, or query heads for attention outputs)."""


class LayerDiagnostics(Stored):
    """What one arm does at one prefix length."""

    arm: str
    """Mapper, as in the run's arms."""
    role: Role = "mapper"
    """mapper, control, or source for the small model's own answers."""
    mapper: str | None = None
    """Artifact or control."""
    prefix: int | None = None
    """Context tokens; all but the last are mapped."""
    sequences: int | None = None
    """Held-out sequences."""
    positions: int | None = None
    """Scored positions per sequence."""
    figures: tuple[DiagnosticFigure, ...] = ()
    """All scalar figures that apply to the arm."""
    layers: tuple[Profile, ...] = ()
    """Figures by target layer."""
    by_position: tuple[Profile, ...] = ()
    """Relative error by position in the prefix."""
    by_class: tuple[Profile, ...] = ()
    """Relative error by class of token."""
    r2_keys: tuple[tuple[float | None, ...], ...] | None = None
    """Held-out R2 `[source layer][target layer]` of keys, single-source."""
    r2_values: tuple[tuple[float | None, ...], ...] | None = None
    """The same for values."""
    cosine_native: tuple[float | None, ...] | None = None
    """Attention-output cosine `native` by target layer (docs/diagnostics.md)."""
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
    source: str | None = None
    """Source model."""
    target: str | None = None
    """Target model."""
    data: dict[str, JsonValue] = Field(default_factory=dict)
    """Held-out text: name, fingerprint of the tokens, how it was kept apart from the calibration."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Prefixes, suffix, sequences, dtype, seed."""
    mappers: tuple[LayerDiagnostics, ...]
    """One per arm and prefix length."""

    def arms(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(dict.fromkeys(entry.arm for entry in self.mappers))

    def prefixes(self) -> tuple[int, ...]:
        """Prefix lengths, ascending."""
        return tuple(sorted({entry.prefix for entry in self.mappers if entry.prefix is not None}))

    def entry(self, arm: str, prefix: int | None = None) -> LayerDiagnostics | None:
        """One arm at one prefix length; None takes the shortest."""
        found = sorted((e for e in self.mappers if e.arm == arm and prefix in (None, e.prefix)), key=lambda e: e.prefix or 0)
        return found[0] if found else None

    def figure(self, arm: str, name: str, prefix: int | None = None) -> DiagnosticFigure | None:
        """One scalar figure, or None where it was not measured."""
        entry = self.entry(arm, prefix)
        return next((figure for figure in entry.figures if figure.name == name), None) if entry is not None else None


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
