"""The paper's mapper: per target layer a ridge regression on all KV heads of the k best source layers.

Source: arXiv:2608.03893, sections 3.1 (ridge, lambda = 0.01 absolute on the un-normalised centred Gram), 3.2 (top-k selection by
head-averaged single-source R2, mean of K and V), 3.3 (content space).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.mappers.closed_form import ClosedForm, Solved, mean_r2
from kvbench.mappers.linear import LinearMapper, SelectedMapper
from kvbench.mappers.solve import block, factorise, penalty_amount, r_squared, r_squared_of_solution, ridge


@dataclass(frozen=True)
class Ridge(ClosedForm):
    """Full-head ridge; see `ClosedForm` for its settings."""

    method: ClassVar[str] = "ridge"
    mapper_class: ClassVar[type[SelectedMapper]] = LinearMapper

    def solve(
        self, calibration: Calibration, fit: CrossMoments, heldout: CrossMoments, layers: tuple[int, ...], targets: Sequence[int]
    ) -> list[Solved]:
        """One factorisation and one product for all heads of all these target layers."""
        columns, width = calibration.columns(layers), calibration.target_width
        gram = block(fit.xx, columns, columns)
        factor = factorise(gram, self.lambda_, self.lambda_kind)
        where = torch.cat([torch.arange(t * width, (t + 1) * width) for t in targets])
        weight, bias = ridge(fit, columns, where, factor)
        insample = r_squared_of_solution(fit, columns, where, weight, penalty_amount(gram, self.lambda_, self.lambda_kind))
        judged = r_squared(heldout, columns, where, weight, bias)
        count = len(targets)
        parts = zip(weight.chunk(count, 1), bias.chunk(count), insample.chunk(count), judged.chunk(count), strict=True)
        return [Solved({"W": w, "b": b}, mean_r2(r_in), mean_r2(r_out)) for w, b, r_in, r_out in parts]
