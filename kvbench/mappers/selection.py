"""Which source layers a target layer reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError
from kvbench.mappers.solve import factorise, r_squared, ridge

RULES = ("top_k", "greedy", "depth", "all")


@dataclass(frozen=True)
class SingleSource:
    """R2 of every (source layer, target layer) on its own.

    Attributes:
        layers: source layer indices, the row order of the matrices.
        k: `[source layers, target layers]` R2 of stripped keys, averaged over coordinates.
        v: the same for values.
    """

    layers: tuple[int, ...]
    k: Tensor
    v: Tensor

    def score(self) -> Tensor:
        """Mean of K and V, `[source layers, target layers]`: the paper's selection score."""
        return (self.k + self.v) / 2


@dataclass(frozen=True)
class Selection:
    """What was chosen, and the scores of all candidates.

    Attributes:
        layers: for each target layer its source layers, ascending.
        scores: single-source R2, whatever the rule.
    """

    layers: list[tuple[int, ...]]
    scores: SingleSource


def select(calibration: Calibration, rule: str, k: int | str, *, penalty: float, kind: str, part: str, key_kind: str = "k") -> Selection:
    """Choose source layers for every target layer.

    Args:
        calibration: stored moments.
        rule: `top_k` (the paper's: best k by single-source R2), `greedy` (forward selection by joint R2), `depth` (the k layers around the same
            relative depth), `all`, or a fixed list: `0,4,8` for every target layer, or one list per target layer, `0,1;1,2;...`.
        k: how many, or `all`; rule `all` and fixed lists do not read it.
        penalty: lambda.
        kind: `absolute` or `relative`.
        part: `heldout` or `fit`, whose R2 is the score.
        key_kind: `k`, or `k_rotated` with content space off.

    Raises:
        BadInputError: an unknown rule, k out of range, or layers that were not calibrated.
    """
    fixed = None if rule in RULES else fixed_layers(rule, calibration)
    count = None if fixed is not None or rule == "all" else _count(k, len(calibration.source_layers))
    scores = single_source(calibration, penalty=penalty, kind=kind, part=part, key_kind=key_kind)
    if fixed is not None:
        return Selection(fixed, scores)
    if count is None:
        return Selection([calibration.source_layers] * calibration.target_layers, scores)
    if rule == "depth":
        return Selection(by_depth(calibration, count), scores)
    if rule == "greedy":
        from kvbench.mappers.greedy import greedy

        return Selection(greedy(calibration, count, penalty=penalty, kind=kind, part=part, key_kind=key_kind), scores)
    return Selection(top_k(scores, count), scores)


def _count(k: int | str, available: int) -> int | None:
    if isinstance(k, str):
        if k != "all":
            raise BadInputError(f"k = '{k}'; it is a number of source layers or 'all'")
        return None
    if not isinstance(k, int) or not 1 <= k <= available:
        raise BadInputError(f"k = {k}, but the calibration has {available} candidate source layers; use 1 to {available}, or 'all'")
    return k


def single_source(calibration: Calibration, *, penalty: float, kind: str, part: str, key_kind: str = "k") -> SingleSource:
    """Score every single source layer for every target layer; each source layer is factorised once for all targets.

    Args:
        calibration: stored moments.
        penalty: lambda.
        kind: `absolute` or `relative`.
        part: `heldout` or `fit`, whose R2 is the score.
        key_kind: `k`, or `k_rotated` with content space off.
    """
    everything = slice(0, calibration.target_layers * calibration.target_width)
    matrices = []
    for moment_kind in (key_kind, "v"):
        fit, judged = calibration.moments("fit", moment_kind), calibration.moments(part, moment_kind)
        rows = []
        for layer in calibration.source_layers:
            columns = calibration.columns([layer])
            first, last = int(columns[0]), int(columns[-1]) + 1
            factor = factorise(fit.xx[first:last, first:last], penalty, kind)
            weight, bias = ridge(fit, columns, everything, factor)
            r2 = r_squared(judged, columns, everything, weight, bias)
            rows.append(r2.reshape(calibration.target_layers, -1).nanmean(1))
        matrices.append(torch.stack(rows))
    return SingleSource(calibration.source_layers, matrices[0], matrices[1])


def top_k(scores: SingleSource, k: int | None) -> list[tuple[int, ...]]:
    """The k best source layers of each target layer, ascending; None takes all.

    Raises:
        BadInputError: k below 1 or above the number of candidates.
    """
    if k is None:
        return [scores.layers] * scores.k.shape[1]
    _count(k, len(scores.layers))
    # A target layer whose coordinates do not vary has no R2; it takes the first candidates.
    order = scores.score().nan_to_num(nan=-torch.inf).argsort(dim=0, descending=True, stable=True)[:k]
    return [tuple(sorted(scores.layers[i] for i in order[:, target].tolist())) for target in range(order.shape[1])]


def by_depth(calibration: Calibration, k: int) -> list[tuple[int, ...]]:
    """The k calibrated layers nearest to the same relative depth, for each target layer; the deeper one of two equally near."""
    source_depth = max(1, int(calibration.manifest["source"]["geometry"]["layers"]) - 1)
    target_depth = max(1, calibration.target_layers - 1)
    chosen = []
    for target in range(calibration.target_layers):
        centre = target / target_depth * source_depth
        nearest = sorted(calibration.source_layers, key=lambda layer: (abs(layer - centre), -layer))[:k]
        chosen.append(tuple(sorted(nearest)))
    return chosen


def fixed_layers(text: str, calibration: Calibration) -> list[tuple[int, ...]]:
    """Parse `0,4,8` (every target layer) or `0,1;1,2;...` (one list per target layer).

    Raises:
        BadInputError: neither a rule nor a list, a list too many or too few, or a layer that was not calibrated.
    """
    try:
        lists = [tuple(sorted({int(part) for part in piece.split(",")})) for piece in text.split(";")]
    except ValueError:
        raise BadInputError(
            f"selection = '{text}'; it is one of {', '.join(RULES)}, or source layers "
            "such as '0,4,8' (or one such list per target layer, separated by ';')"
        ) from None
    if len(lists) == 1:
        lists *= calibration.target_layers
    if len(lists) != calibration.target_layers:
        raise BadInputError(f"selection lists source layers for {len(lists)} target layers, but the target has {calibration.target_layers}")
    for layers in lists:
        calibration.columns(layers)
    return lists
