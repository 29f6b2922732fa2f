"""What all closed forms share: choose source layers on held-out moments, solve once per distinct set of them, judge out of sample."""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.errors import BadInputError
from kvbench.mappers.base import Mapper, Progress, Recipe
from kvbench.mappers.linear import MemoryStore, SelectedMapper
from kvbench.mappers.selection import Selection, select
from kvbench.mappers.solve import check_lambda

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel


class Solved(NamedTuple):
    """One target layer, one of keys and values.

    Attributes:
        tensors: what to store, by the last part of its name (`W`, `b`, ...), float64.
        r2_insample: mean over coordinates on the rows it was solved on.
        r2_heldout: the same on held-out rows.
    """

    tensors: dict[str, Tensor]
    r2_insample: float
    r2_heldout: float


@dataclass(frozen=True)
class Selecting(Recipe):
    """Settings of every recipe that chooses source layers.

    Attributes:
        k: source layers per target layer; `all` takes every calibrated one.
        lambda_: ridge penalty.
        lambda_kind: `absolute` (the paper's) or `relative` to the mean Gram diagonal.
        selection: `top_k`, `greedy`, `depth`, `all`, or a fixed list (see `kvbench.mappers.selection.select`).
        select_on: part whose R2 selects the layers, `heldout` or `fit` (in-sample).
        content_space: map keys without RoPE; off is an ablation and ties the map to the calibrated positions.
    """

    mapper_class: ClassVar[type[SelectedMapper]]

    k: int | str = 8
    lambda_: float = 0.01
    lambda_kind: str = "absolute"
    selection: str = "top_k"
    select_on: str = "heldout"
    content_space: bool = True

    @property
    def key_kind(self) -> str:
        """Kind of the key moments: `k`, or `k_rotated` with content space off."""
        return "k" if self.content_space else "k_rotated"

    def check(self, calibration: Calibration) -> None:
        """Refuse settings that cannot be meant, before any work."""
        check_lambda(self.lambda_, self.lambda_kind)
        if self.select_on not in ("heldout", "fit"):
            raise BadInputError(f"select_on = '{self.select_on}'; it is 'heldout' or 'fit'")

    def choose(self, calibration: Calibration) -> Selection:
        """Source layers per target layer, with the single-source scores of all candidates."""
        return select(calibration, self.selection, self.k, penalty=self.lambda_, kind=self.lambda_kind, part=self.select_on, key_kind=self.key_kind)

    def features(self, calibration: Calibration, layers: Sequence[int]) -> int:
        """Coefficients per target coordinate for one set of source layers."""
        return len(layers) * int(calibration.source_width)

    def facts(self, calibration: Calibration, selected: Selection) -> dict[str, Any]:
        """Manifest entries that do not depend on the solution; warns where there are more features than rows."""
        rows = calibration.moments("fit", "v").rows
        features = max(self.features(calibration, layers) for layers in selected.layers)
        if features > rows:
            warnings.warn(
                f"{self.method}: {features} features per target coordinate but only {rows} calibration rows; "
                "in-sample R2 means nothing here, trust the held-out one",
                stacklevel=3,
            )
        return {
            "features": features,
            "rows": rows,
            "rows_per_feature": round(rows / features, 3),
            "single_source_layers": list(selected.scores.layers),
            "single_source_r2_k": [defined(row) for row in selected.scores.k.tolist()],
            "single_source_r2_v": [defined(row) for row in selected.scores.v.tolist()],
        }

    def finite(self, tensor: Tensor, target: int, name: str) -> Tensor:
        """The tensor in float32 and row by row, as it will be read back from disk; refused where it is not finite."""
        tensor = tensor.float().contiguous()
        # A sum is non-finite exactly when an entry is, at one pass over the tensor.
        if not math.isfinite(float(tensor.sum())):
            raise BadInputError(
                f"the fit of target layer {target} ({name}) is not finite; "
                f"raise lambda (now {self.lambda_}, {self.lambda_kind}) or calibrate again in float32"
            )
        return tensor


@dataclass(frozen=True)
class ClosedForm(Selecting):
    """A recipe that needs moments only."""

    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Select layers, then solve; no model is needed."""
        started = time.perf_counter()
        self.check(calibration)
        selected = self.choose(calibration)
        tensors: dict[str, Tensor] = {}
        figures: dict[str, Any] = {}
        sets = list(dict.fromkeys(selected.layers))
        for step, (name, kind) in enumerate((("k", self.key_kind), ("v", "v"))):
            fit, heldout = calibration.moments("fit", kind), calibration.moments("heldout", kind)
            insample_r2, heldout_r2 = [0.0] * calibration.target_layers, [0.0] * calibration.target_layers
            for done, layers in enumerate(sets):
                targets = [i for i, chosen in enumerate(selected.layers) if chosen == layers]
                for target, solved in zip(targets, self.solve(calibration, fit, heldout, layers, targets), strict=True):
                    for suffix, tensor in solved.tensors.items():
                        tensors[f"target.{target}.{name}.{suffix}"] = self.finite(tensor, target, name)
                    insample_r2[target], heldout_r2[target] = solved.r2_insample, solved.r2_heldout
                if progress:
                    progress("solving", step * len(sets) + done + 1, 2 * len(sets))
            figures[f"r2_{name}_insample"], figures[f"r2_{name}_heldout"] = defined(insample_r2), defined(heldout_r2)
        details = {**self.facts(calibration, selected), **figures, "seconds": round(time.perf_counter() - started, 3)}
        return self.mapper_class(
            selected.layers,
            calibration.source_width,
            calibration.kv_heads,
            calibration.head_dim,
            MemoryStore(tensors),
            details,
            rotated=not self.content_space,
        )

    @abstractmethod
    def solve(
        self, calibration: Calibration, fit: CrossMoments, heldout: CrossMoments, layers: tuple[int, ...], targets: Sequence[int]
    ) -> list[Solved]:
        """Solve all target layers that read one set of source layers, for keys or for values.

        Args:
            calibration: geometry and feature indices.
            fit: moments to solve on.
            heldout: moments to judge on.
            layers: the source layers.
            targets: target layers, all of which read exactly these.
        """


def defined(values: Sequence[float]) -> list[float | None]:
    """R2 values for JSON: undefined ones (a layer whose coordinates do not vary) as None."""
    return [value if math.isfinite(value) else None for value in values]


def mean_r2(r2: Tensor) -> float:
    """Mean over coordinates that vary."""
    return float(torch.nanmean(r2))
