"""Greedy forward selection of source layers by joint R2, exact, without solving any set from scratch.

Source: arXiv:2608.03893, appendix B (there an analysis tool). The algebra is block Gram-Schmidt on moments: a chosen layer becomes
an orthonormal block `z` of the penalised inner product, every candidate keeps its residual `x~` after the chosen blocks, and its
joint R2 follows from small matrices. Target layers that chose the same layers so far share all of it, since the recursion splits only where choices differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.errors import BadInputError
from kvbench.mappers.solve import penalty_amount, ratio


@dataclass
class _Branch:
    """Candidates' residuals after some chosen layers, for one of keys and values; s candidates of width w, P = s * w.

    Attributes:
        fit_rows: per chosen layer `z' x` in the penalised fit moments, `[w, P]`.
        judged_rows: per chosen layer `z' x~` in the judged moments, `[w, P]`.
        judged_z: `z_i' z_j` in the judged moments, `[w, w]`, both ways round.
        fit_own: `[s, w, w]` penalised `x~' x~` of each candidate.
        judged_own: `[s, w, w]` the same in the judged moments, without penalty.
    """

    fit_rows: list[Tensor]
    judged_rows: list[Tensor]
    judged_z: list[list[Tensor]]
    fit_own: Tensor
    judged_own: Tensor


@dataclass
class _Residual:
    """One target layer's residual `e` after the chosen layers: `x~' e` for all candidates, `[s, w, q]`, and `e' e` judged `[q]`."""

    fit: Tensor
    judged: Tensor
    judged_rss: Tensor


class _Kind:
    """Keys or values: moments, and the two updates."""

    def __init__(self, fit: CrossMoments, judged: CrossMoments, layers: int, penalty: float, kind: str) -> None:
        width = fit.xx.shape[0] // layers
        self.layers, self.width = layers, width
        self.fit_xx = fit.xx
        # About the means of the fit, so that the bias is exact and needs no term of its own.
        dx, dy = judged.mean_x - fit.mean_x, judged.mean_y - fit.mean_y
        self.judged_xx = torch.addr(judged.xx, dx, dx, alpha=judged.rows)
        self.fit_xy, self.judged_xy = fit.xy, torch.addr(judged.xy, dx, dy, alpha=judged.rows)
        self.judged_yy, self.total = judged.yy + judged.rows * dy.square(), judged.yy
        # One amount for all sets, unlike a solve of one set at `relative`, where it follows the set's own mean diagonal.
        self.amount = penalty_amount(fit.xx, penalty, kind)

    def start(self) -> _Branch:
        s, w = self.layers, self.width
        diagonal = torch.arange(s)
        own = self.fit_xx.view(s, w, s, w)[diagonal, :, diagonal].clone()
        own.diagonal(dim1=1, dim2=2).add_(self.amount)
        return _Branch([], [], [], own, self.judged_xx.view(s, w, s, w)[diagonal, :, diagonal].clone())

    def residual(self, target: slice) -> _Residual:
        s, w = self.layers, self.width
        return _Residual(
            self.fit_xy[:, target].reshape(s, w, -1).clone(), self.judged_xy[:, target].reshape(s, w, -1).clone(), self.judged_yy[target].clone()
        )

    def scores(self, branch: _Branch, residuals: list[_Residual], targets: list[slice]) -> Tensor:
        """Joint R2 of the chosen layers plus each candidate, `[targets, s]`."""
        factor, info = torch.linalg.cholesky_ex(branch.fit_own)
        usable = info == 0
        factor = torch.where(usable[:, None, None], factor, torch.eye(self.width, dtype=factor.dtype))
        out = []
        for residual, target in zip(residuals, targets, strict=True):
            step = torch.cholesky_solve(residual.fit, factor)
            gain = (torch.baddbmm(residual.judged, branch.judged_own, step, beta=2, alpha=-1) * step).sum(1)
            r2 = ratio(self.total[target], residual.judged_rss - gain).nanmean(1)
            out.append(torch.where(usable, r2, -torch.inf))
        return torch.stack(out)

    def extend(self, branch: _Branch, residuals: list[_Residual], chosen: int) -> tuple[_Branch, list[_Residual]]:
        """The branch and residuals after choosing one more layer."""
        s, w = self.layers, self.width
        mine = slice(chosen * w, (chosen + 1) * w)
        lower = torch.linalg.cholesky(branch.fit_own[chosen])

        def orthonormal(block: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(lower, block, upper=False)
            return solved

        fit_row, across = self.fit_xx[mine].clone(), self.judged_xx[mine].clone()
        for j, m in enumerate(branch.fit_rows):
            fit_row.addmm_(m[:, mine].T, m, alpha=-1)
            # z_j' x of the chosen candidate: what is left of it plus what the chosen layers took away.
            raw = branch.judged_rows[j][:, mine].clone()
            for i, earlier in enumerate(branch.fit_rows):
                raw.addmm_(branch.judged_z[j][i], earlier[:, mine])
            across.addmm_(raw.T, m, alpha=-1).addmm_(m[:, mine].T, branch.judged_rows[j], alpha=-1)
        fit_row, across = orthonormal(fit_row), orthonormal(across)
        own = orthonormal(orthonormal(branch.judged_own[chosen]).mT)
        cross = [orthonormal(row[:, mine].T).T for row in branch.judged_rows]  # z_j' z_new
        judged_rows = [torch.addmm(row, c, fit_row, alpha=-1) for row, c in zip(branch.judged_rows, cross, strict=True)]
        judged_z = [[*line, c] for line, c in zip(branch.judged_z, cross, strict=True)]
        fit_blocks, judged_blocks = (row.reshape(w, s, w).transpose(0, 1) for row in (fit_row, across))
        mixed = judged_blocks.mT @ fit_blocks
        extended = _Branch(
            [*branch.fit_rows, fit_row],
            [*judged_rows, torch.addmm(across, own, fit_row, alpha=-1)],
            [*judged_z, [*(c.T for c in cross), own]],
            branch.fit_own - fit_blocks.mT @ fit_blocks,
            branch.judged_own - mixed - mixed.mT + fit_blocks.mT @ (own @ fit_blocks),
        )
        after = []
        for residual in residuals:
            u, f = orthonormal(residual.fit[chosen]), orthonormal(residual.judged[chosen])
            after.append(
                _Residual(
                    residual.fit - fit_blocks.mT @ u,
                    residual.judged - judged_blocks.mT @ u + fit_blocks.mT @ (own @ u - f),
                    residual.judged_rss + (u * (own @ u - 2 * f)).sum(0),
                )
            )
        return extended, after


def greedy(calibration: Calibration, k: int, *, penalty: float, kind: str, part: str, key_kind: str = "k") -> list[tuple[int, ...]]:
    """Add, k times, the source layer that raises the joint R2 (mean of K and V) of a target layer most.

    With a `relative` penalty, the mean diagonal is that of all candidates together, so that all sets are compared at one penalty.

    Args:
        calibration: stored moments.
        k: source layers per target layer.
        penalty: lambda.
        kind: `absolute` or `relative`.
        part: `heldout` or `fit`, whose R2 decides.
        key_kind: `k`, or `k_rotated` with content space off.

    Returns:
        For each target layer its source layers, ascending.
    """
    kinds = [
        _Kind(calibration.moments("fit", name), calibration.moments(part, name), len(calibration.source_layers), penalty, kind)
        for name in (key_kind, "v")
    ]
    width = calibration.target_width
    chosen: dict[int, tuple[int, ...]] = {}

    def grow(branches: list[_Branch], residuals: list[dict[int, _Residual]], taken: tuple[int, ...]) -> None:
        targets = list(residuals[0])
        where = [slice(t * width, (t + 1) * width) for t in targets]
        parts = [kind.scores(b, [r[t] for t in targets], where) for kind, b, r in zip(kinds, branches, residuals, strict=True)]
        scores = ((parts[0] + parts[1]) / 2).nan_to_num(nan=-torch.inf)
        scores[:, list(taken)] = -torch.inf
        best = scores.argmax(1).tolist()
        for target, score in zip(targets, scores.max(1).values.tolist(), strict=True):
            if score == -torch.inf and not taken:
                raise BadInputError(f"no source layer can be solved for target layer {target} at lambda = {penalty} ({kind}); use a larger lambda")
        for choice in sorted(set(best)):
            group = [t for t, b in zip(targets, best, strict=True) if b == choice]
            now = (*taken, choice)
            if len(now) == k:
                chosen.update({t: tuple(sorted(calibration.source_layers[i] for i in now)) for t in group})
                continue
            extended = [kind.extend(b, [r[t] for t in group], choice) for kind, b, r in zip(kinds, branches, residuals, strict=True)]
            grow([e[0] for e in extended], [dict(zip(group, e[1], strict=True)) for e in extended], now)

    everything = range(calibration.target_layers)
    grow([kind.start() for kind in kinds], [{t: kind.residual(slice(t * width, (t + 1) * width)) for t in everything} for kind in kinds], ())
    return [chosen[t] for t in everything]
