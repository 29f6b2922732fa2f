"""Attention repair: head-local ridge whose rows count by how much the target's own queries read them.

Source: arXiv:2609.00891 (CacheBridge): weights `w = 1 + alpha (r - 1)`, the largest alpha that keeps Kish's effective sample size at or above
`min(n, 2p)`, per target layer, head, and keys or values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.calibration.sequences import (
    PairBatch,
    attention_scale,
    batches,
    layer_window,
    load_tokens,
    pair_of,
    refuse_unusual_attention,
    run_pair,
)
from kvbench.calibration.weights import attention_mass, boundaries, largest_alpha
from kvbench.errors import BadInputError
from kvbench.kv.content import Kind
from kvbench.mappers.base import Mapper, Progress
from kvbench.mappers.closed_form import defined, mean_r2
from kvbench.mappers.head_local import HeadLocal, HeadLocalMapper, head_columns
from kvbench.mappers.linear import MemoryStore
from kvbench.mappers.solve import block, factorise, r_squared

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel


class _Weighted:
    """r-weighted sums over rows for all heads of one target layer, of keys or of values; features relative to the stored means.

    `w = 1 + alpha (r - 1)` is linear in r, so these sums and the stored moments give the weighted moments at any alpha: one pass
    suffices although alpha depends on every row.
    """

    def __init__(self, heads: int, features: int, dim: int) -> None:
        self.mass = torch.zeros(heads, dtype=torch.float64)
        self.squares = torch.zeros(heads, dtype=torch.float64)
        self.x = torch.zeros(heads, features, dtype=torch.float64)
        self.y = torch.zeros(heads, dim, dtype=torch.float64)
        self.xx = torch.zeros(heads, features, features, dtype=torch.float64)
        self.xy = torch.zeros(heads, features, dim, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor, r: Tensor) -> None:
        """Add rows: `x` `[heads, n, features]`, `y` `[heads, n, dim]`, `r` `[heads, n]`."""
        weighted = x * r[:, :, None]
        self.mass += r.double().sum(1).cpu()
        self.squares += r.double().square().sum(1).cpu()
        self.x += weighted.sum(1).double().cpu()
        self.y += (y * r[:, :, None]).sum(1).double().cpu()
        self.xx += (weighted.mT @ x).double().cpu()
        self.xy += (weighted.mT @ y).double().cpu()


@dataclass(frozen=True)
class AttentionRepair(HeadLocal):
    """Attention-repaired head-local ridge; see `ClosedForm` for the other settings.

    Attributes:
        queries: positions per sequence whose queries weigh the tokens before them, log-spaced from token 12 to the last.
        batch_size: sequences per forward pass.
    """

    method: ClassVar[str] = "attn_repair"
    needs_models: ClassVar[bool] = True

    queries: int = 32
    batch_size: int = 8

    def check(self, calibration: Calibration) -> None:
        """Also refuse counts that cannot be."""
        super().check(calibration)
        if self.queries < 1 or self.batch_size < 1:
            raise BadInputError(f"queries = {self.queries}, batch_size = {self.batch_size}; both must be at least 1")

    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Select layers on the moments, weigh all rows in one pass over the sequences, then solve per head."""
        started = time.perf_counter()
        self.check(calibration)
        selected = self.choose(calibration)
        sums = self._weigh(calibration, selected.layers, models, progress)
        tensors: dict[str, Tensor] = {}
        figures: dict[str, Any] = {}
        for name, kind in (("k", self.key_kind), ("v", "v")):
            fit, heldout = calibration.moments("fit", kind), calibration.moments("heldout", kind)
            insample, judged, alphas, effective = [], [], [], []
            for target, layers in enumerate(selected.layers):
                parts = [
                    self._solve_head(calibration, fit, heldout, sums[target, name], layers, target, head) for head in range(calibration.kv_heads)
                ]
                for suffix in ("W", "b"):
                    stacked = torch.stack([part[suffix] for part in parts])
                    tensors[f"target.{target}.{name}.{suffix}"] = self.finite(stacked, target, name)
                insample.append(mean_r2(torch.stack([part["insample"] for part in parts])))
                judged.append(mean_r2(torch.stack([part["heldout"] for part in parts])))
                alphas.append([round(float(part["alpha"]), 6) for part in parts])
                effective.append([round(float(part["effective"]), 1) for part in parts])
            figures[f"r2_{name}_insample"], figures[f"r2_{name}_heldout"] = defined(insample), defined(judged)
            figures[f"alpha_{name}"], figures[f"effective_rows_{name}"] = alphas, effective
        details = {**self.facts(calibration, selected), **figures, "seconds": round(time.perf_counter() - started, 3)}
        return HeadLocalMapper(
            selected.layers,
            calibration.source_width,
            calibration.kv_heads,
            calibration.head_dim,
            MemoryStore(tensors),
            details,
            rotated=not self.content_space,
        )

    def _weigh(
        self,
        calibration: Calibration,
        selected: list[tuple[int, ...]],
        models: tuple[LoadedModel, LoadedModel] | None,
        progress: Progress | None,
    ) -> dict[tuple[int, str], _Weighted]:
        """Run the sequences of the fit part and gather r-weighted sums for every target layer."""
        rows = load_tokens(calibration).fit
        source, target = pair_of(calibration, models)
        refuse_unusual_attention(target)
        positions = boundaries(rows.shape[1], self.queries)
        heads, dim = calibration.kv_heads, calibration.head_dim
        sums = {(t, name): _Weighted(heads, len(layers) * dim, dim) for t, layers in enumerate(selected) for name in ("k", "v")}
        for first, some in batches(rows, self.batch_size):
            batch = run_pair(source, target, some, queries=True, strip=self.content_space, where=f"batch at fit sequence {first}")
            for t, layers in enumerate(selected):
                cached = batch.target_rotated
                scale, window = attention_scale(target, t), layer_window(target, t)
                mass = attention_mass(batch.queries[t], cached.keys[t], cached.values[t], positions, scale, window)
                kinds: tuple[tuple[Kind, Tensor], ...] = (("k", mass[0]), ("v", mass[1]))
                for name, r in kinds:
                    sums[t, name].add(*self._rows(calibration, batch, layers, t, name), self._strided(calibration, r[..., None])[:, :, 0])
            if progress:
                progress("weighing rows", min(first + self.batch_size, len(rows)), len(rows))
        return sums

    def _rows(self, calibration: Calibration, batch: PairBatch, layers: tuple[int, ...], target: int, name: Kind) -> tuple[Tensor, Tensor]:
        """`[heads, rows, features]` of source and target, less the stored means."""
        fit = calibration.moments("fit", self.key_kind if name == "k" else "v")
        heads, dim = calibration.kv_heads, calibration.head_dim
        device = batch.target.values[target].device
        x = torch.cat([self._strided(calibration, batch.source.layer(layer, name).transpose(1, 2)).to(device) for layer in layers], dim=2)
        y = self._strided(calibration, batch.target.layer(target, name).transpose(1, 2))
        mean_x = torch.stack([fit.mean_x[head_columns(calibration, layers, head)] for head in range(heads)])
        mean_y = fit.mean_y[target * heads * dim : (target + 1) * heads * dim].reshape(heads, dim)
        return x - mean_x[:, None].float().to(device), y - mean_y[:, None].float().to(device)

    @staticmethod
    def _strided(calibration: Calibration, tensor: Tensor) -> Tensor:
        """`[batch, heads, tokens, d]` to `[heads, rows, d]` float32, every stride-th token."""
        picked = tensor[:, :, :: calibration.manifest["data"]["stride"]].float()
        return picked.transpose(0, 1).reshape(picked.shape[1], -1, picked.shape[3])

    def _solve_head(
        self, calibration: Calibration, fit: CrossMoments, heldout: CrossMoments, sums: _Weighted, layers: tuple[int, ...], target: int, head: int
    ) -> dict[str, Tensor]:
        """Weighted ridge of one head; in-sample and held-out R2 are of unweighted rows, as everywhere."""
        dim, n = calibration.head_dim, fit.rows
        columns = head_columns(calibration, layers, head)
        start = target * calibration.target_width + head * dim
        own = slice(start, start + dim)
        mean_one = n / float(sums.mass[head])
        squares = float(sums.squares[head]) * mean_one**2
        alpha = largest_alpha(n, squares, len(columns))
        share = alpha * mean_one
        shift_x, shift_y = sums.x[head] * (share / n), sums.y[head] * (share / n)
        xx = torch.addr(block(fit.xx, columns, columns) * (1 - alpha) + share * sums.xx[head], shift_x, shift_x, alpha=-n)
        xy = torch.addr(block(fit.xy, columns, own) * (1 - alpha) + share * sums.xy[head], shift_x, shift_y, alpha=-n)
        weight = torch.cholesky_solve(xy, factorise(xx, self.lambda_, self.lambda_kind))
        bias = fit.mean_y[own] + shift_y - (fit.mean_x[columns] + shift_x) @ weight
        return {
            "W": weight,
            "b": bias,
            "insample": r_squared(fit, columns, own, weight, bias),
            "heldout": r_squared(heldout, columns, own, weight, bias),
            "alpha": torch.tensor(alpha),
            "effective": torch.tensor(n * n / (n + alpha**2 * (squares - n))),
        }
