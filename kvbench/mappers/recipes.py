"""Recipes from the command line and from YAML files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import BadInputError
from kvbench.mappers.base import Recipe
from kvbench.mappers.registry import recipe_class

# `lambda` is a Python keyword, so the field is `lambda_`; people write `lambda`.
ALIASES = {"lambda": "lambda_"}


def load_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe by name or from a YAML file, with `key=value` settings on top.

    Args:
        name: recipe name, `module:Class`, or a `.yaml` file with `method:` and settings.
        settings: `key=value` strings.

    Raises:
        BadInputError: unknown recipe, file or setting.
    """
    values: dict[str, Any] = {}
    if name.endswith((".yaml", ".yml")):
        values = _read(Path(name))
        method = values.pop("method")
    else:
        method = name
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise BadInputError(f"--set {setting} is not of the form key=value")
        values[key.strip()] = value.strip()
    return recipe_class(str(method)).from_settings({ALIASES.get(k, k): v for k, v in values.items()})


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInputError(f"recipe file '{path}' does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BadInputError(f"recipe file '{path}' is not YAML: {error}") from error
    if not isinstance(values, dict) or "method" not in values:
        raise BadInputError(f"recipe file '{path}' needs a line 'method: NAME' and one line per setting")
    return values
