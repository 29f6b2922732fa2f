"""What the statistics accept: finite, equally long, non-empty vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.errors import BadInputError

Vector = NDArray[np.float64]


def finite_vector(name: str, values: ArrayLike) -> Vector:
    """Check and convert one vector of scores.

    Args:
        name: what to call it in a message.
        values: `[n]` numbers or booleans, n >= 1.

    Raises:
        BadInputError: if it is not a vector of numbers, is empty, or holds NaN or infinity.
    """
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{name} must be a vector of numbers: {error}. Pass one score per item.") from error
    if vector.ndim != 1:
        raise BadInputError(f"{name} has shape {vector.shape}; pass a vector with one score per item.")
    if vector.size == 0:
        raise BadInputError(f"{name} is empty; a statistic needs at least one item.")
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        first = int(bad[0])
        raise BadInputError(
            f"{name} holds {bad.size} of {vector.size} values that are not finite (first: item {first} is {vector[first]}). "
            "Score these items again, or leave them out of every arm."
        )
    return vector


def paired_vectors(arm: ArrayLike, reference: ArrayLike) -> tuple[Vector, Vector]:
    """Check two vectors that hold the same items in the same order.

    Raises:
        BadInputError: as `finite_vector`, or if the lengths differ.
    """
    first, second = finite_vector("arm", arm), finite_vector("reference", reference)
    if first.size != second.size:
        raise BadInputError(f"arm has {first.size} items and reference has {second.size}; a paired statistic needs the same items in the same order.")
    return first, second


def zero_one_vectors(arm: ArrayLike, reference: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Check two vectors of right (1) and wrong (0).

    Raises:
        BadInputError: as `paired_vectors`, or if a value is neither 0 nor 1.
    """
    first, second = paired_vectors(arm, reference)
    for name, vector in (("arm", first), ("reference", second)):
        other = np.flatnonzero((vector != 0) & (vector != 1))
        if other.size:
            value = vector[int(other[0])]
            raise BadInputError(
                f"{name} holds {value} at item {int(other[0])}, neither 0 nor 1; use paired_values for scores that are not right or wrong."
            )
    return first == 1, second == 1


def is_zero_one(vector: Vector) -> bool:
    """Whether every score is 0 or 1."""
    return bool(np.all((vector == 0) | (vector == 1)))


def group_codes(groups: ArrayLike, n: int) -> NDArray[np.intp]:
    """Number the clusters 0, 1, ... in the sorted order of their labels.

    Args:
        groups: `[n]` labels, all strings or all numbers.
        n: the number of items.

    Raises:
        BadInputError: if the labels are missing, mixed, or not one per item.
    """
    labels = np.asarray(groups)
    if labels.ndim != 1 or labels.size != n:
        raise BadInputError(f"groups has shape {labels.shape} for {n} items; pass one cluster label per item.")
    if labels.dtype.kind == "f" and not np.all(np.isfinite(labels)):
        raise BadInputError("groups holds a label that is not finite; give every item a cluster label.")
    try:
        codes = np.unique(labels, return_inverse=True)[1]
    except TypeError as error:
        raise BadInputError(f"groups mixes labels that cannot be sorted: {error}. Pass all strings or all integers.") from error
    return np.asarray(codes, dtype=np.intp)


def check_level(level: float) -> float:
    """Check a confidence level.

    Raises:
        BadInputError: if it is not strictly between 0.5 and 1.
    """
    if not 0.5 < level < 1:
        raise BadInputError(f"level is {level}; a confidence level lies between 0.5 and 1, e.g. 0.95.")
    return float(level)


def check_fraction(name: str, value: float) -> float:
    """Check a probability such as alpha or power.

    Raises:
        BadInputError: if it is not strictly between 0 and 1.
    """
    if not 0 < value < 1:
        raise BadInputError(f"{name} is {value}; it must lie between 0 and 1.")
    return float(value)
