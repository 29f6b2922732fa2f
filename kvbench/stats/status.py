"""How a statistic says what it found, or why it found nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias


class Undefined(NamedTuple):
    """A figure without a value. It stands where the value would stand; never NaN, never 0."""

    reason: str
    """Why there is no value, in words that can be printed in a report."""


class Interval(NamedTuple):
    """A two-sided confidence interval."""

    lower: float
    """Lower bound, in the unit of the estimate."""
    upper: float
    """Upper bound, in the unit of the estimate."""
    level: float
    """Nominal coverage, e.g. 0.95."""
    method: str
    """How it was computed, e.g. 'BCa bootstrap, 10000 resamples of items'."""


Value: TypeAlias = float | Undefined
"""A number, or the reason why there is none."""

MaybeInterval: TypeAlias = Interval | Undefined
"""An interval, or the reason why there is none."""

JSONValue: TypeAlias = bool | int | float | str | list["JSONValue"] | dict[str, "JSONValue"] | None


def as_json(result: object) -> JSONValue:
    """Turn a result of this package into plain JSON values.

    A named tuple becomes an object with its field names; `Undefined` becomes `{"undefined": reason}`.

    Args:
        result: any result, or a mapping or sequence of results.

    Raises:
        ValueError: if a number is not finite, which no function of this package returns.
        TypeError: if a type is not known here.
    """
    if isinstance(result, Undefined):
        return {"undefined": result.reason}
    if isinstance(result, Enum):
        return as_json(result.value)
    if result is None or isinstance(result, bool | int | str):
        return result
    if isinstance(result, float):
        if not math.isfinite(result):
            raise ValueError(f"{result} is not finite; an undefined figure must be an Undefined with a reason")
        return float(result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return {str(name): as_json(value) for name, value in zip(result._fields, result, strict=True)}
    if isinstance(result, Mapping):
        return {str(name): as_json(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [as_json(value) for value in result]
    raise TypeError(f"cannot turn {type(result).__name__} into JSON")
