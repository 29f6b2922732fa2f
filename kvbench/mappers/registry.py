"""Recipes by name: built-in, from the entry-point group `kvbench.mappers`, or `module:Class`."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points

from kvbench.errors import BadInputError
from kvbench.mappers.base import Recipe

BUILT_IN = {
    "attn_repair": "kvbench.mappers.attn_repair:AttentionRepair",
    "head_local": "kvbench.mappers.head_local:HeadLocal",
    "low_rank": "kvbench.mappers.low_rank:LowRank",
    "mean": "kvbench.mappers.mean:Mean",
    "mlp": "kvbench.mappers.mlp:MLP",
    "residual": "kvbench.mappers.residual:Residual",
    "ridge": "kvbench.mappers.ridge:Ridge",
}
GROUP = "kvbench.mappers"


def known_recipes() -> dict[str, str]:
    """Name -> `module:Class` of all recipes that can be found.

    Raises:
        BadInputError: two plug-ins, or a plug-in and a built-in recipe, share a name.
    """
    found = dict(BUILT_IN)
    for point in entry_points(group=GROUP):
        if found.get(point.name, point.value) != point.value:
            raise BadInputError(f"two recipes are called '{point.name}': {found[point.name]} and {point.value}; uninstall or rename one")
        found[point.name] = point.value
    return found


def recipe_class(name: str) -> type[Recipe]:
    """The recipe class called `name` or at `module:Class`.

    Raises:
        BadInputError: unknown, not importable, or not a Recipe.
    """
    known = known_recipes()
    location = known.get(name, name if ":" in name else None)
    if location is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise BadInputError(f"unknown mapper recipe '{name}'; {hint}known recipes: {', '.join(sorted(known))} (or module:Class)")
    module_name, _, attribute = location.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInputError(f"recipe '{name}' cannot be imported from {location}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise BadInputError(f"recipe '{name}' at {location} is not a subclass of kvbench.mappers.base.Recipe")
    return found
