"""Head-local ridge: target head h reads only head h of its source layers, with n_kv times fewer coefficients than full-head ridge.

Source: arXiv:2609.00891 (CacheBridge), head-local design; source layers by the full-head single-source scores.
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
from kvbench.mappers.linear import SelectedMapper
from kvbench.mappers.solve import block, factorise, penalty_amount, r_squared, r_squared_of_solution, ridge


class HeadLocalMapper(SelectedMapper):
    """Per target head one product with the same head of its source layers.

    Tensors `target.{layer}.{k|v}.W` `[kv_heads, k * head_dim, head_dim]` and `.b` `[kv_heads, head_dim]`.
    """

    name = "head_local"

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """A batched product over heads for keys, one for values."""
        return self.map_kind(source, target_layer, "k"), self.map_kind(source, target_layer, "v")

    def map_kind(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        """One of the two."""
        layers = self.source_layers[target_layer]
        dtype, device = source.values[0].dtype, source.values[layers[0]].device
        weight = self.weights.get(f"target.{target_layer}.{kind}.W", dtype, device)
        bias = self.weights.get(f"target.{target_layer}.{kind}.b", dtype, device)
        # One contiguous design matrix per head, in one copy: batched products of low precision copy a strided one again.
        parts = [source.flat(layer, kind, dtype, device).view(-1, source.kv_heads, source.head_dim).transpose(0, 1) for layer in layers]
        design = torch.cat(parts, dim=2)
        out = torch.baddbmm(bias[:, None], design, weight)
        return out.transpose(0, 1).reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)

    def parameters(self) -> int:
        """Entries of all W."""
        return sum(2 * len(layers) * self.source_width * self.head_dim for layers in self.source_layers)


@dataclass(frozen=True)
class HeadLocal(ClosedForm):
    """Head-local ridge; see `ClosedForm` for its settings."""

    method: ClassVar[str] = "head_local"
    mapper_class: ClassVar[type[SelectedMapper]] = HeadLocalMapper

    def check(self, calibration: Calibration) -> None:
        """Also refuse pairs whose heads do not correspond."""
        super().check(calibration)
        refuse_unmatched_heads(self.method, calibration)

    def features(self, calibration: Calibration, layers: Sequence[int]) -> int:
        """One head of each source layer."""
        return len(layers) * int(calibration.source_head_dim)

    def solve(
        self, calibration: Calibration, fit: CrossMoments, heldout: CrossMoments, layers: tuple[int, ...], targets: Sequence[int]
    ) -> list[Solved]:
        """One small factorisation per head, shared by all these target layers."""
        width, dim = calibration.target_width, calibration.head_dim
        solved: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]] = [[] for _ in targets]
        for head in range(calibration.kv_heads):
            columns = head_columns(calibration, layers, head)
            where = torch.cat([torch.arange(t * width + head * dim, t * width + (head + 1) * dim) for t in targets])
            gram = block(fit.xx, columns, columns)
            weight, bias = ridge(fit, columns, where, factorise(gram, self.lambda_, self.lambda_kind))
            insample = r_squared_of_solution(fit, columns, where, weight, penalty_amount(gram, self.lambda_, self.lambda_kind))
            judged = r_squared(heldout, columns, where, weight, bias)
            count = len(targets)
            for i, parts in enumerate(zip(weight.chunk(count, 1), bias.chunk(count), insample.chunk(count), judged.chunk(count), strict=True)):
                solved[i].append(parts)
        out = []
        for heads in solved:
            weights, biases, insamples, judgements = (torch.stack(parts) for parts in zip(*heads, strict=True))
            out.append(Solved({"W": weights, "b": biases}, mean_r2(insamples), mean_r2(judgements)))
        return out


def head_columns(calibration: Calibration, layers: Sequence[int], head: int) -> Tensor:
    """Feature indices of one head of the given source layers, in that order."""
    shape = (len(layers), calibration.source_kv_heads, calibration.source_head_dim)
    return calibration.columns(layers).reshape(shape)[:, head].reshape(-1)


def refuse_unmatched_heads(method: str, calibration: Calibration) -> None:
    """Head-wise mappers need head h of the source to mean head h of the target.

    Raises:
        BadInputError: unequal head counts or head widths.
    """
    source = (calibration.source_kv_heads, calibration.source_head_dim)
    target = (calibration.kv_heads, calibration.head_dim)
    if source != target:
        raise BadInputError(
            f"recipe '{method}' maps head by head, but the source has {source[0]} KV heads of {source[1]} "
            f"and the target {target[0]} of {target[1]}; use 'ridge', which maps all heads together"
        )
