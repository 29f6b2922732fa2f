"""Many tests, one report: p-values adjusted over the family."""

from __future__ import annotations

from collections.abc import Mapping

from statsmodels.stats.multitest import multipletests

from kvbench.errors import BadInputError
from kvbench.stats.status import Undefined, Value


def holm(p_values: Mapping[str, Value]) -> dict[str, Value]:
    """Adjust a family of p-values so that any false finding at all is held at the level.

    Args:
        p_values: p by test name. An `Undefined` is passed through and does not count as a test of the family.

    Returns:
        Adjusted p by name, in the order of the input.

    Raises:
        BadInputError: if a p lies outside [0, 1].

    Source:
        Holm, Scandinavian Journal of Statistics 6:65-70 (1979).
    """
    return _adjusted(p_values, "holm")


def benjamini_hochberg(p_values: Mapping[str, Value]) -> dict[str, Value]:
    """Adjust a family of p-values so that the expected share of false findings is held at the level.

    Args:
        p_values: as `holm`.

    Returns:
        Adjusted p by name, in the order of the input.

    Raises:
        BadInputError: if a p lies outside [0, 1].

    Source:
        Benjamini and Hochberg, JRSS B 57:289-300 (1995).
    """
    return _adjusted(p_values, "fdr_bh")


def _adjusted(p_values: Mapping[str, Value], method: str) -> dict[str, Value]:
    defined = {name: p for name, p in p_values.items() if not isinstance(p, Undefined)}
    for name, p in defined.items():
        if not 0 <= p <= 1:
            raise BadInputError(f"the p-value of {name} is {p}; it must lie between 0 and 1, or be Undefined with a reason.")
    adjusted: dict[str, Value] = dict(p_values)
    if defined:
        values = multipletests(list(defined.values()), method=method)[1]
        adjusted.update({name: float(p) for name, p in zip(defined, values, strict=True)})
    return adjusted
