"""The policy of a screen: thresholds that are fixed before anything is measured."""

from __future__ import annotations

import difflib
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvbench.errors import BadInputError
from kvbench.reporting.view import Policy

DEFAULT = "default"
Share = Annotated[float, Field(gt=0, le=1)]
Length = Annotated[int, Field(ge=2)]


class _Closed(BaseModel):
    """Unknown keys, NaN and infinity are refused: a misspelt threshold would otherwise be one that is not there."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RetentionFloors(_Closed):
    """Share of the target's score that must be kept."""

    task: Share
    """Of each task."""
    average: Share
    """Mean over the tasks, each weighing alike."""


class TextMargin(_Closed):
    """For tasks that score text instead of answers."""

    rise_nats: Annotated[float, Field(ge=0)]
    """Largest rise of the negative log-likelihood, nats per token."""


class BetterThanSource(_Closed):
    """Whether the transfer has to beat the source model on identical items."""

    average: bool
    """On the average score."""
    text: bool
    """On the negative log-likelihood of text."""


class Canary(_Closed):
    """The generation task that breaks first."""

    tasks: tuple[str, ...]
    """The first that is evaluated is the canary; empty for none."""
    retention: Share
    """Its floor."""
    min_items: Annotated[int, Field(ge=1)]
    """Fewest items."""


class Speed(_Closed):
    """Speed-up to the first token."""

    lengths: Annotated[tuple[Length, ...], Field(min_length=1)]
    """Context tokens."""
    warm: Annotated[float, Field(gt=0)] | None
    """Least speed-up with the source's cache at hand; None: reported only."""
    cold: Annotated[float, Field(gt=0)] | None
    """Least speed-up with the source's prefill counted; None: reported only."""


class Floor(_Closed):
    """A threshold on a diagnostic figure; exactly one side."""

    at_least: float | None = None
    """Lower bound must reach it."""
    at_most: float | None = None
    """Upper bound must not exceed it."""

    @model_validator(mode="after")
    def _one_side(self) -> Floor:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")
        return self


class ScreenPolicy(_Closed):
    """Everything a screen decides by; see `default_policy.yaml` for the reasons."""

    name: Annotated[str, Field(min_length=1)]
    """In reports."""
    version: Annotated[int, Field(ge=1, le=1)]
    """Of the format."""
    level: Annotated[float, Field(gt=0.5, lt=1)]
    """Coverage of all intervals."""
    min_items: Annotated[int, Field(ge=1)]
    """Fewest items of a task."""
    retention: RetentionFloors
    """Floors."""
    text: TextMargin
    """Margin for text."""
    better_than_source: BetterThanSource
    """The alternative."""
    canary: Canary
    """What runs first."""
    speed: Speed
    """What there is to gain."""
    warnings: dict[str, Floor]
    """Diagnostic figures that warn."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the bootstrap."""
    resamples: Annotated[int, Field(ge=1_000)] = 10_000
    """Of the bootstrap."""

    @model_validator(mode="after")
    def _known_figures(self) -> ScreenPolicy:
        known = diagnostic_names()
        for name in self.warnings:
            if name not in known:
                raise ValueError(f"warnings has '{name}', which is no figure of `kvbench diagnose`{_hint(name, known)}; there are {', '.join(known)}")
        return self

    def fingerprint(self) -> str:
        """SHA-256 of the policy as canonical JSON; comments and the order of keys do not count."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False).encode()).hexdigest()

    def comparison(self) -> Policy:
        """The part that `kvbench report` judges by."""
        return Policy(
            retention=self.retention.task,
            floors=dict.fromkeys(self.canary.tasks, self.canary.retention),
            average_retention=self.retention.average,
            nll_margin=self.text.rise_nats,
            level=self.level,
            min_n=self.min_items,
            seed=self.seed,
            resamples=self.resamples,
            name=self.name,
            fingerprint=self.fingerprint(),
        )


def diagnostic_names() -> tuple[str, ...]:
    """Scalar figures of `kvbench diagnose`."""
    from kvbench.runs.measured import FIGURE_NAMES

    return tuple(FIGURE_NAMES)


def default_text() -> str:
    """The shipped policy file."""
    return resources.files("kvbench.screening").joinpath("default_policy.yaml").read_text(encoding="utf-8")


def load_policy(path: Path | str | None = None) -> ScreenPolicy:
    """Read a policy file.

    Args:
        path: YAML file; None or 'default' takes the shipped one.

    Raises:
        BadInputError: missing, not YAML, a key that does not exist or is missing, or a value out of range.
    """
    if path is None or str(path) == DEFAULT:
        return _parse(default_text(), "the shipped policy")
    file = Path(path)
    if not file.is_file():
        raise BadInputError(f"policy file '{file}' {'is no file' if file.exists() else 'does not exist'}; start from `kvbench screen --print-policy`")
    try:
        return _parse(file.read_text(encoding="utf-8"), f"policy file '{file}'")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"policy file '{file}' cannot be read: {error}") from error


def _parse(text: str, where: str) -> ScreenPolicy:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInputError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{where} holds {type(found).__name__ if found is not None else 'nothing'} instead of keys and values")
    try:
        return ScreenPolicy.model_validate(found)
    except ValidationError as error:
        raise BadInputError(f"{where}: {_first(error.errors()[0], found)}") from error


def _first(error: Any, found: dict[str, Any]) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        return f"unknown key '{name}'{_hint(path[-1], known)}; there are {', '.join(known)}"
    if error["type"] == "missing":
        return f"key '{name}' is missing; `kvbench screen --print-policy` shows a complete file"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name} is {error['input']!r}: {message}" if name and not isinstance(error["input"], dict) else message


def _keys(path: list[str]) -> tuple[str, ...]:
    """Keys that exist at a place of the file."""
    parts: dict[str, type[BaseModel]] = {
        "retention": RetentionFloors,
        "text": TextMargin,
        "better_than_source": BetterThanSource,
        "canary": Canary,
        "speed": Speed,
        "warnings": Floor,
    }
    return tuple((parts[path[0]] if path and path[0] in parts else ScreenPolicy).model_fields)


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean '{near[0]}'?" if near else ""
