"""Each target coordinate from the same coordinate of the source layer at the same relative depth: one slope, one intercept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.mappers.base import Recipe
from kvbench.mappers.controls import relative_depth
from kvbench.mappers.linear import LinearMapper, MemoryStore


@dataclass(frozen=True)
class Diagonal(Recipe):
    method: ClassVar[str] = "diagonal"
    mapper_class: ClassVar = LinearMapper

    lambda_: float = 0.01

    def fit(self, calibration, **_):
        depths = range(calibration.target_layers)
        layers = [(calibration.source_layers[relative_depth(t, len(calibration.source_layers), len(depths))],) for t in depths]
        width, tensors = calibration.target_width, {}
        for kind in ("k", "v"):
            m = calibration.moments("fit", kind)
            for t, chosen in enumerate(layers):
                x, y = calibration.columns(chosen), slice(t * width, (t + 1) * width)
                slope = m.xy[x, y].diagonal() / (m.xx[x, x] + self.lambda_)
                tensors[f"target.{t}.{kind}.W"] = slope.diag().float()
                tensors[f"target.{t}.{kind}.b"] = (m.mean_y[y] - slope * m.mean_x[x]).float()
        return LinearMapper(layers, width, calibration.kv_heads, calibration.head_dim, MemoryStore(tensors))
