"""The constant mean cache: every token gets the target's average key and value. The floor of all maps.

Source: the intercept alone of arXiv:2608.03893's ridge (lambda to infinity); held-out R2 is zero up to the drift of the mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Mapper, Progress, Recipe, TensorStore
from kvbench.mappers.closed_form import defined, mean_r2
from kvbench.mappers.linear import MemoryStore, Weights
from kvbench.mappers.solve import ratio

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel


class MeanMapper(Mapper):
    """Tensors `target.{layer}.{k|v}.b` `[target width]`.

    Args:
        kv_heads: KV heads of the target.
        head_dim: head width of the target.
        store: the means.
        details: figures for the manifest.
    """

    name = "mean"

    def __init__(self, kv_heads: int, head_dim: int, store: TensorStore, details: Mapping[str, Any]) -> None:
        self.kv_heads, self.head_dim, self.details = kv_heads, head_dim, dict(details)
        self.weights = Weights(store, 0)

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """The same key and value for every token."""
        return self._constant(source, target_layer, "k"), self._constant(source, target_layer, "v")

    def _constant(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        like = source.values[0]
        mean = self.weights.get(f"target.{target_layer}.{kind}.b", like.dtype, like.device)
        return mean.reshape(1, 1, self.kv_heads, self.head_dim).expand(source.batch, source.tokens, -1, -1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The means."""
        for name in self.weights.store.names():
            yield name, self.weights.store.get(name)

    def describe(self) -> dict[str, Any]:
        """Size and figures of the fit."""
        return {**self.details, "parameters": self.parameters(), "multiply_adds_per_token": self.cost_per_token()}

    @classmethod
    def from_artifact(cls, manifest: Mapping[str, Any], store: TensorStore) -> Self:
        """Read back stored means."""
        geometry = manifest["target"]["geometry"]
        return cls(geometry["kv_heads"], geometry["head_dim"], store, manifest["fit"])


@dataclass(frozen=True)
class Mean(Recipe):
    """Constant mean cache; no settings."""

    method: ClassVar[str] = "mean"
    mapper_class: ClassVar[type[Mapper]] = MeanMapper

    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Take the means of the fit part."""
        started = time.perf_counter()
        width = calibration.target_width
        tensors: dict[str, Tensor] = {}
        figures: dict[str, Any] = {}
        for kind in ("k", "v"):
            fit, heldout = calibration.moments("fit", kind), calibration.moments("heldout", kind)
            for target, mean in enumerate(fit.mean_y.reshape(-1, width)):
                tensors[f"target.{target}.{kind}.b"] = mean.float()
            judged = ratio(heldout.yy, heldout.yy + heldout.rows * (heldout.mean_y - fit.mean_y).square())
            figures[f"r2_{kind}_heldout"] = defined([mean_r2(r2) for r2 in judged.reshape(-1, width)])
            figures[f"r2_{kind}_insample"] = [0.0] * calibration.target_layers
        figures.update(rows=calibration.moments("fit", "v").rows, features=0, seconds=round(time.perf_counter() - started, 3))
        return MeanMapper(calibration.kv_heads, calibration.head_dim, MemoryStore(tensors), figures)
