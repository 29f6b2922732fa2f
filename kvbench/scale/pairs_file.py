"""The file of `kvbench sweep-pairs`: models, data, recipes and tasks, and the pairs that follow from them."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kvbench.errors import BadInputError
from kvbench.runs.schema import Stored

Options = dict[str, JsonValue]


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelEntry(_Given):
    """One model."""

    model: str
    """Hub id, directory, .gguf file, or embedded:NAME."""
    name: str | None = None
    """In tables and directories; default: from the model."""
    revision: str | None = None
    """Hub revision."""

    @property
    def label(self) -> str:
        """Short and fit for a directory."""
        return re.sub(r"[^\w.-]+", "-", self.name or self.model.rstrip("/")).strip("-")


class RecipeEntry(_Given):
    """One mapper to fit."""

    recipe: str
    """Recipe name, module:Class, or YAML file."""
    name: str | None = None
    """Of the arm; default: the recipe's."""
    set: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings, as `kvbench fit --set`."""


class PairsFile(_Given):
    """Everything that a sweep over pairs is made of."""

    models: tuple[ModelEntry, ...]
    """All models; without `pairs`, every ordered pair of them."""
    pairs: tuple[tuple[str, str], ...] | None = None
    """Pairs of names or models, source first; None for all P(P-1)."""
    data: str
    """Calibration text, as `kvbench calibrate --data`."""
    recipes: tuple[RecipeEntry, ...] = (RecipeEntry(recipe="ridge"),)
    """Mappers to fit on the same moments."""
    controls: tuple[str, ...] | None = None
    """Control arms; None for the default ones."""
    tasks: tuple[str, ...] = ()
    """lm-eval tasks."""
    limit: float | None = None
    """First items of each task."""
    dtype: str = "auto"
    """Computing dtype of all stages."""
    device: str = "cpu"
    """Device of all stages."""
    calibrate: Options = Field(default_factory=dict)
    """Further options of `kvbench calibrate`, by name."""
    fit: Options = Field(default_factory=dict)
    """Further options of `kvbench fit`."""
    evaluate: Options = Field(default_factory=dict)
    """Further options of `kvbench evaluate`."""
    diagnose: Options | None = None
    """Options of `kvbench diagnose`; None leaves it out."""
    screen: Options | None = None
    """Options of `kvbench screen`; None leaves it out."""


class Stage(Stored):
    """One command of a pair."""

    name: str
    """check, calibrate, fit, evaluate, diagnose or screen."""
    arguments: tuple[str, ...]
    """Of kvbench."""
    result: str | None = None
    """File in the pair's directory whose presence says that the stage is done."""


class PairTask(Stored):
    """What is to be done for one ordered pair: decides its results."""

    format: Literal["kvbench-pair-task"] = "kvbench-pair-task"
    """Marks the record."""
    label: str
    """Name of its directory."""
    source: str
    """The model that prefills."""
    target: str
    """The model that answers."""
    stages: tuple[Stage, ...]
    """In order; paths in them are relative to the pair's directory where they name results."""


Known = dict[str, dict[str, tuple[str, str | None, bool]]]
"""Command -> option name -> (flag, flag that turns it off, whether it takes no value)."""
SET_HERE = {
    "calibrate": ("data", "out", "dtype", "device", "source_revision", "target_revision", "overwrite"),
    "fit": ("out", "recipe", "settings", "json", "overwrite", "device"),
    "evaluate": ("tasks", "out", "mapper", "control", "limit", "dtype", "device", "json", "source_revision", "target_revision"),
    "diagnose": ("out", "mapper", "control", "moments", "data", "dtype", "device", "json", "overwrite", "source_revision", "target_revision"),
    "screen": ("data", "out", "dtype", "device", "json", "overwrite", "source_revision", "target_revision"),
}
"""Options that follow from the rest of the file."""
PLACE = "{pair}"
"""Stands for the pair's directory in arguments."""


def read_pairs_file(path: Path) -> PairsFile:
    """Read and check the file.

    Raises:
        BadInputError: missing, not YAML, an unknown key, or a wrong value.
    """
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(f"there is no file '{path}'; docs/scale.md shows one") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"'{path}' cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(given, dict):
        found = "empty" if given is None else f"a {type(given).__name__}"
        raise BadInputError(f"'{path}' is {found}, not a mapping with models, data and tasks")
    try:
        return PairsFile.model_validate(_spelled_out(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = f"; it knows {', '.join(PairsFile.model_fields)}" if first["type"] == "extra_forbidden" and len(first["loc"]) == 1 else ""
        raise BadInputError(f"'{path}': {where}: {first['msg']}{known}") from error


def _spelled_out(given: dict[str, Any]) -> dict[str, Any]:
    """Plain strings stand for entries, one comma-separated string for tasks, `true` for a stage without options."""
    out = dict(given)
    for key, field in (("models", "model"), ("recipes", "recipe")):
        if isinstance(out.get(key), list):
            out[key] = [{field: entry} if isinstance(entry, str) else entry for entry in out[key]]
    for key in ("tasks", "controls"):
        if isinstance(out.get(key), str):
            out[key] = [part.strip() for part in out[key].split(",") if part.strip()]
    for key in ("diagnose", "screen"):
        if isinstance(out.get(key), bool):
            out[key] = {} if out[key] else None
    return out


def pair_tasks(given: PairsFile, known: Known) -> list[PairTask]:
    """One task per ordered pair.

    Args:
        given: the file.
        known: options of the commands.

    Raises:
        BadInputError: doubled names, an unknown model in `pairs`, an unknown option, or nothing to do.
    """
    labels = [m.label for m in given.models]
    if doubled := [label for label in labels if labels.count(label) > 1]:
        raise BadInputError(f"two models are called '{doubled[0]}'; give each a name of its own")
    recipes = [_recipe_name(r) for r in given.recipes]
    if doubled := [name for name in recipes if recipes.count(name) > 1]:
        raise BadInputError(f"two recipes are called '{doubled[0]}'; give each a name of its own")
    if not given.tasks and given.diagnose is None and given.screen is None:
        raise BadInputError("the file names neither tasks nor diagnose nor screen: there is nothing to find out about the pairs")
    if given.diagnose is not None and not given.tasks:
        raise BadInputError("diagnose writes beside an evaluation; name tasks too")
    find = {key: m for m in given.models for key in (m.model, m.name, m.label) if key}
    chosen = list(permutations(given.models, 2))
    if given.pairs is not None:
        for pair in given.pairs:
            if missing := [name for name in pair if name not in find]:
                raise BadInputError(f"pairs: '{missing[0]}' is none of the models ({', '.join(m.name or m.model for m in given.models)})")
        chosen = [(find[a], find[b]) for a, b in dict.fromkeys(given.pairs)]
    if not chosen:
        raise BadInputError("there is no pair: name at least two models")
    return [_task(source, target, given, known) for source, target in chosen]


def _recipe_name(entry: RecipeEntry) -> str:
    return entry.name or Path(entry.recipe).stem.split(":")[-1]


def _task(source: ModelEntry, target: ModelEntry, given: PairsFile, known: Known) -> PairTask:
    pair = [source.model, target.model]
    revisions = [part for role, m in (("source", source), ("target", target)) if m.revision for part in (f"--{role}-revision", m.revision)]
    machine = ["--dtype", given.dtype, "--device", given.device, *revisions]
    mismatched = ["--allow-mismatched"] if any(s.get("allow_mismatched") for s in (given.calibrate, given.evaluate)) else []
    stages = [Stage(name="check", arguments=("check", *pair, "--json", *revisions, *mismatched))]
    mappers = [part for r in given.recipes for part in ("--mapper", f"{_recipe_name(r)}={PLACE}/mappers/{_recipe_name(r)}")]
    controls = [part for c in given.controls or () for part in ("--control", c)] if given.controls != () else ["--control", "none"]
    if given.tasks:
        more = _arguments("calibrate", given.calibrate, known)
        arguments = ("calibrate", *pair, "--data", given.data, "--out", f"{PLACE}/moments", *machine, *more)
        stages.append(Stage(name="calibrate", arguments=arguments, result="moments/manifest.json"))
        for recipe in given.recipes:
            name = _recipe_name(recipe)
            settings = [part for key, value in recipe.set.items() for part in ("--set", f"{key}={_text(value)}")]
            more = [*settings, *_arguments("fit", given.fit, known)]
            arguments = ("fit", f"{PLACE}/moments", "--recipe", recipe.recipe, "--out", f"{PLACE}/mappers/{name}", "--device", given.device, *more)
            stages.append(Stage(name="fit", arguments=arguments, result=f"mappers/{name}/manifest.json"))
        limit = [] if given.limit is None else ["--limit", f"{given.limit:g}"]
        more = [*limit, *controls, *_arguments("evaluate", given.evaluate, known)]
        arguments = ("evaluate", *pair, "--tasks", ",".join(given.tasks), "--out", f"{PLACE}/run", *mappers, *machine, *more)
        stages.append(Stage(name="evaluate", arguments=arguments, result="run/provenance.json"))
    if given.diagnose is not None:
        more = [*controls, *_arguments("diagnose", given.diagnose, known)]
        arguments = ("diagnose", *pair, "--moments", f"{PLACE}/moments", "--out", f"{PLACE}/run", *mappers, *machine, *more)
        stages.append(Stage(name="diagnose", arguments=arguments, result="run/diagnostics.json"))
    if given.screen is not None:
        arguments = ("screen", *pair, "--data", given.data, "--out", f"{PLACE}/screen", *machine, *_arguments("screen", given.screen, known))
        stages.append(Stage(name="screen", arguments=arguments, result="screen/verdict.json"))
    return PairTask(label=f"{source.label}--{target.label}", source=source.model, target=target.model, stages=tuple(stages))


def _arguments(command: str, options: Options, known: Known) -> list[str]:
    out: list[str] = []
    for key, value in options.items():
        name = key.replace("-", "_")
        if name in SET_HERE[command]:
            raise BadInputError(f"{command}.{key} follows from the rest of the file; leave it out")
        if name not in known[command]:
            raise BadInputError(f"{command}.{key} is no option of 'kvbench {command}' (it has {', '.join(sorted(known[command]))})")
        flag, off, bare = known[command][name]
        if bare:
            if not isinstance(value, bool):
                raise BadInputError(f"{command}.{key} is {value!r}; it is true or false")
            out += [flag] if value else [off] if off else []
        elif value is not None:
            for one in value if isinstance(value, list) else [value]:
                out += [flag, _text(one)]
    return out


def _text(value: JsonValue) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
