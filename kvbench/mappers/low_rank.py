"""Reduced-rank ridge: full-head ridge whose output lies in the r directions that its fitted values use most; stored and used as two factors.

Source: reduced-rank ridge regression (Mukherjee and Zhu, 2011): with W the ridge solution, the best rank-r map under the same
penalised loss is `W V V'`, V the leading eigenvectors of `W' (X'X + lambda I) W = W' X'Y`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.closed_form import ClosedForm, Solved, mean_r2
from kvbench.mappers.linear import SelectedMapper, design_matrix
from kvbench.mappers.solve import block, factorise, penalty_amount, ratio, ridge


class LowRankMapper(SelectedMapper):
    """`Y = X A B + b`, never multiplied out.

    Tensors `target.{layer}.{k|v}.A` `[k * source width, rank]`, `.B` `[rank, target width]` and `.b` `[target width]`.
    """

    name = "low_rank"

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """Two thin products for keys, two for values."""
        return self.map_kind(source, target_layer, "k"), self.map_kind(source, target_layer, "v")

    def map_kind(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        """One of the two."""
        design = design_matrix(source, self.source_layers[target_layer], kind)
        left, right, bias = (self.weights.get(f"target.{target_layer}.{kind}.{name}", design.dtype, design.device) for name in ("A", "B", "b"))
        return torch.addmm(bias, design @ left, right).reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class LowRank(ClosedForm):
    """Reduced-rank ridge; see `ClosedForm` for the other settings.

    Attributes:
        rank: rank of every map; give this or `energy`.
        energy: smallest rank whose directions hold this share of the fitted variance, per target layer and kind.
    """

    method: ClassVar[str] = "low_rank"
    mapper_class: ClassVar[type[SelectedMapper]] = LowRankMapper

    rank: int | None = None
    energy: float | None = None

    def check(self, calibration: Calibration) -> None:
        """Also refuse a rank or energy that cannot be."""
        super().check(calibration)
        if (self.rank is None) == (self.energy is None):
            raise BadInputError("recipe 'low_rank' needs either rank or energy (--set rank=64, or --set energy=0.99), not both and not neither")
        width = calibration.target_width
        if self.rank is not None and not 1 <= self.rank <= width:
            raise BadInputError(f"rank = {self.rank}, but a target layer is {width} features wide; use 1 to {width}")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise BadInputError(f"energy = {self.energy}; it is a share of the fitted variance, above 0 and at most 1")

    def solve(
        self, calibration: Calibration, fit: CrossMoments, heldout: CrossMoments, layers: tuple[int, ...], targets: Sequence[int]
    ) -> list[Solved]:
        """Ridge for all these target layers at once, then one eigendecomposition each."""
        columns, width = calibration.columns(layers), calibration.target_width
        gram = block(fit.xx, columns, columns)
        amount = penalty_amount(gram, self.lambda_, self.lambda_kind)
        where = torch.cat([torch.arange(t * width, (t + 1) * width) for t in targets])
        full, _ = ridge(fit, columns, where, factorise(gram, self.lambda_, self.lambda_kind))
        judged_gram = block(heldout.xx, columns, columns)
        out = []
        for target, weight in zip(targets, full.chunk(len(targets), dim=1), strict=True):
            own = slice(target * width, (target + 1) * width)
            cross = block(fit.xy, columns, own)
            fitted = weight.mT @ cross
            values, vectors = torch.linalg.eigh((fitted + fitted.mT) / 2)
            basis = vectors.flip(1)[:, : self._rank(values.flip(0))]
            left, right = weight @ basis, basis.mT.contiguous()
            bias = fit.mean_y[own] - (fit.mean_x[columns] @ left) @ right
            # Normal equations: X'X A = X'Y V - lambda A, so no product with the Gram matrix in sample.
            inner = left.mT @ (cross @ basis - amount * left)
            insample = _reduced_r2(fit, own, left.mT @ cross, inner, right, torch.zeros_like(bias))
            offset = heldout.mean_y[own] - (heldout.mean_x[columns] @ left) @ right - bias
            judged = _reduced_r2(heldout, own, left.mT @ block(heldout.xy, columns, own), left.mT @ (judged_gram @ left), right, offset)
            out.append(Solved({"A": left, "B": right, "b": bias}, mean_r2(insample), mean_r2(judged)))
        return out

    def _rank(self, values: Tensor) -> int:
        if self.rank is not None:
            return self.rank
        positive = values.clamp_min(0)
        share = positive.cumsum(0) / positive.sum().clamp_min(torch.finfo(values.dtype).tiny)
        return min(len(values), int((share < float(self.energy or 1) - 1e-12).sum()) + 1)


def _reduced_r2(moments: CrossMoments, own: slice, cross: Tensor, inner: Tensor, right: Tensor, offset: Tensor) -> Tensor:
    """R2 per coordinate of `Z B` with Z = X A, from `Z'Y` `[r, q]` and `Z'Z` `[r, r]`."""
    explained = ((2 * cross - inner @ right) * right).sum(0)
    total = moments.yy[own]
    return ratio(total, total - explained + moments.rows * offset.square())
