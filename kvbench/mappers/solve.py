"""Closed-form solvers on moments. float64 Cholesky; one factorisation per distinct set of source layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvbench.calibration.moments import CrossMoments
from kvbench.errors import BadInputError
from kvbench.kv.kernels import runs

LambdaKind = Literal["absolute", "relative"]


def check_lambda(value: float, kind: str) -> None:
    """Refuse a penalty that makes no sense.

    Raises:
        BadInputError: negative, not finite, or an unknown kind.
    """
    if kind not in ("absolute", "relative"):
        raise BadInputError(f"lambda_kind = '{kind}'; it is 'absolute' (added to the Gram diagonal as it is) or 'relative' (times the mean diagonal)")
    if not 0 <= value < float("inf"):
        raise BadInputError(f"lambda = {value}; it must be zero or a positive number")


def block(matrix: Tensor, rows: Tensor, columns: Tensor | slice) -> Tensor:
    """`matrix[rows][:, columns]`: a view where both are consecutive, else one copy of the block alone."""
    across = [columns] if isinstance(columns, slice) else runs(columns.tolist())
    down = runs(rows.tolist())
    if len(across) == 1 and len(down) == 1:
        return matrix[down[0], across[0]]
    stripes = [torch.cat([matrix[r, c] for c in across], dim=1) if len(across) > 1 else matrix[r, across[0]] for r in down]
    return torch.cat(stripes) if len(stripes) > 1 else stripes[0]


def penalty_amount(gram: Tensor, penalty: float, kind: str) -> float:
    """What is added to the diagonal: lambda itself (`absolute`) or times the mean diagonal (`relative`)."""
    check_lambda(penalty, kind)
    return penalty * float(gram.diagonal().mean()) if kind == "relative" else penalty


def factorise(gram: Tensor, penalty: float, kind: str) -> Tensor:
    """Lower Cholesky factor of `gram + lambda I`, float64.

    Args:
        gram: `[p, p]` centred, un-normalised X'X.
        penalty: lambda.
        kind: `absolute` (the paper's) or `relative` (times the mean diagonal of `gram`).

    Raises:
        BadInputError: the matrix is singular at this lambda.
    """
    amount = penalty_amount(gram, penalty, kind)
    system = gram.clone()
    diagonal = system.diagonal()
    diagonal.add_(amount)
    largest = float(diagonal.max())
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(system)
    # Rounding can leave a singular matrix with a tiny positive pivot; what is then solved is noise.
    rounding = gram.shape[0] * torch.finfo(gram.dtype).eps * largest
    if int(info) or not bool((factor.diagonal().square() > rounding).all() if amount < rounding else torch.isfinite(factor.diagonal()).all()):
        raise BadInputError(
            f"the Gram matrix of {gram.shape[0]} source features is singular at lambda = {penalty} ({kind}); "
            "use a larger lambda, fewer source layers, or more calibration rows"
        )
    return factor


def ridge(fit: CrossMoments, columns: Tensor, targets: Tensor | slice, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge solution for source features `columns` and target features `targets`.

    Returns:
        W `[p, q]` and b `[q]`: `W = (X'X + lambda I)^-1 X'Y`, `b = mean(Y) - mean(X) W`.
    """
    weight = torch.cholesky_solve(block(fit.xy, columns, targets), factor)
    return weight, fit.mean_y[targets] - fit.mean_x[columns] @ weight


def r_squared(moments: CrossMoments, columns: Tensor, targets: Tensor | slice, weight: Tensor, bias: Tensor) -> Tensor:
    """`1 - RSS / TSS` per target coordinate of a given map on any moments, without the data.

    RSS = diag(Y'Y - 2 W'X'Y + W'X'X W) of the centred moments plus n times the squared error of the means.
    A coordinate without variance gives NaN here; callers average over coordinates that vary.

    Returns:
        `[q]` float64.
    """
    gram = block(moments.xx, columns, columns)
    explained = block(moments.xy, columns, targets).mul(2).addmm_(gram, weight, alpha=-1).mul_(weight).sum(0)
    offset = moments.mean_y[targets] - moments.mean_x[columns] @ weight - bias
    return ratio(moments.yy[targets], moments.yy[targets] - explained + moments.rows * offset.square())


def r_squared_of_solution(fit: CrossMoments, columns: Tensor, targets: Tensor | slice, weight: Tensor, amount: float) -> Tensor:
    """In-sample R2 of a ridge solution, without a product with the Gram matrix.

    The normal equations give X'X W = X'Y - lambda W, hence RSS = diag(Y'Y - W'X'Y - lambda W'W); the bias has no error in sample.

    Args:
        fit: moments that W was solved on.
        columns: source features.
        targets: target features.
        weight: `[p, q]` solution.
        amount: what was added to the Gram diagonal.
    """
    explained = block(fit.xy, columns, targets).add(weight, alpha=amount).mul_(weight).sum(0)
    return ratio(fit.yy[targets], fit.yy[targets] - explained)


def ratio(total: Tensor, rss: Tensor) -> Tensor:
    """`1 - RSS / TSS`, NaN where a coordinate does not vary."""
    return torch.where(total > 0, 1 - rss / total, torch.nan)
