"""The paper's non-linear mapper: per target layer, head, and keys or values, an own network of two hidden ReLU layers.

Source: arXiv:2608.03893, section 4.4 (1,024 hidden units, Adam 1e-3, 20 epochs, batches of 4,096 rows, mean squared error). The heads of one
target layer read the same rows, so they are trained together as one batched network; Adam works per entry, so each head's
weights are those of training it alone with the same batches. Inputs and outputs are standardised for training and folded back.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Mapper, Progress
from kvbench.mappers.closed_form import Selecting, defined, mean_r2
from kvbench.mappers.linear import MemoryStore, SelectedMapper, design_matrix
from kvbench.mappers.solve import ratio
from kvbench.mappers.training import KINDS, RowStore, identity_of, load_state, save_state, workplace

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel

# Rows mapped at once: the hidden layers of all heads are several times as wide as a cache.
CHUNK_ROWS = 4096


class MLPMapper(SelectedMapper):
    """Tensors `target.{layer}.{k|v}.W{i}` `[kv_heads, in, out]` and `.b{i}` `[kv_heads, 1, out]`, i from 1; ReLU between them."""

    name = "mlp"

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """All heads of one layer at once."""
        return self._map(source, target_layer, "k"), self._map(source, target_layer, "v")

    def _map(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        design = design_matrix(source, self.source_layers[target_layer], kind)
        prefix = f"target.{target_layer}.{kind}."
        depth = len(self.details["widths"]) + 1
        weights = [self.weights.get(f"{prefix}W{i + 1}", design.dtype, design.device) for i in range(depth)]
        biases = [self.weights.get(f"{prefix}b{i + 1}", design.dtype, design.device) for i in range(depth)]
        parts = [forward(rows, weights, biases).transpose(0, 1) for rows in torch.split(design, CHUNK_ROWS)]
        return torch.cat(parts).reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)


def forward(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """`[rows, features]` to `[heads, rows, head_dim]`."""
    hidden = rows
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        hidden = torch.matmul(hidden, weight) + bias
        if i < len(weights) - 1:
            hidden = hidden.relu()
    return hidden


@dataclass(frozen=True)
class MLP(Selecting):
    """Multilayer perceptron per head; see `Selecting` for the choice of source layers, which goes by single-source ridge scores.

    Attributes:
        widths: hidden units of each layer.
        epochs: passes over the rows.
        batch_rows: rows per step.
        learning_rate: of Adam.
        seed: of initial weights and of the order of rows.
        batch_size: sequences per forward pass of the two models.
    """

    method: ClassVar[str] = "mlp"
    mapper_class: ClassVar[type[SelectedMapper]] = MLPMapper
    needs_models: ClassVar[bool] = True

    widths: tuple[int, ...] = (1024, 1024)
    epochs: int = 20
    batch_rows: int = 4096
    learning_rate: float = 1e-3
    seed: int = 0
    batch_size: int = 8

    def check(self, calibration: Calibration) -> None:
        """Also refuse sizes that cannot be."""
        super().check(calibration)
        sizes = {"epochs": self.epochs, "batch_rows": self.batch_rows, "batch_size": self.batch_size}
        wrong = [f"{name} = {value}" for name, value in sizes.items() if value < 1]
        if wrong or not self.widths or any(width < 1 for width in self.widths) or not self.learning_rate > 0:
            raise BadInputError(
                f"recipe 'mlp' has {', '.join(wrong) or f'widths = {list(self.widths)}, learning_rate = {self.learning_rate}'}; all of them must be positive"
            )

    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Gather rows once, then train target layer by target layer; finished layers are kept in `checkpoint`."""
        started = time.perf_counter()
        self.check(calibration)
        selected = self.choose(calibration)
        tensors: dict[str, Tensor] = {}
        figures: dict[str, Any] = {f"r2_{kind}_{part}": [] for kind in KINDS for part in ("insample", "heldout")}
        device = models[1].device if models else torch.device("cpu")
        with workplace(checkpoint, identity_of(self.configuration(), calibration)) as folder:
            rows = RowStore(folder, calibration.source_width, calibration.target_width)
            used = sorted({layer for layers in selected.layers for layer in layers})
            rows.gather(calibration, models, used, batch_size=self.batch_size, strip=self.content_space, progress=progress)
            units = list(itertools.product(range(calibration.target_layers), KINDS))
            for done, (target, kind) in enumerate(units, 1):
                file = folder / f"target.{target}.{kind}.pt"
                state = load_state(file)
                if state is None:
                    state = self._train_layer(rows, selected.layers[target], target, kind, calibration.kv_heads, device)
                    save_state(file, state)
                tensors.update({f"target.{target}.{kind}.{name}": tensor for name, tensor in state.items() if name[:2] != "r2"})
                for part in ("insample", "heldout"):
                    figures[f"r2_{kind}_{part}"].append(float(state[f"r2_{part}"]))
                if progress:
                    progress("training layers", done, len(units))
        figures = {name: defined(values) for name, values in figures.items()}
        facts = {**self.facts(calibration, selected), **figures, "widths": list(self.widths), "seconds": round(time.perf_counter() - started, 3)}
        return MLPMapper(
            selected.layers,
            calibration.source_width,
            calibration.kv_heads,
            calibration.head_dim,
            MemoryStore(tensors),
            facts,
            rotated=not self.content_space,
        )

    def _train_layer(self, rows: RowStore, layers: tuple[int, ...], target: int, kind: Kind, heads: int, device: torch.device) -> dict[str, Any]:
        x, y = rows.design("fit", kind, layers), rows.read("fit", "target", kind, target)
        seed = self.seed * 1_000_003 + target * 2 + (kind == "v")
        weights, biases = self.train(x, y.reshape(len(y), heads, -1), seed, device)
        state: dict[str, Any] = {f"W{i}": w for i, w in enumerate(weights, 1)} | {f"b{i}": b for i, b in enumerate(biases, 1)}
        if not all(math.isfinite(float(tensor.sum())) for tensor in state.values()):
            raise BadInputError(f"training of target layer {target} ({kind}) diverged; use a smaller learning_rate (now {self.learning_rate})")
        state["r2_insample"] = row_r2(x, y, weights, biases)
        state["r2_heldout"] = row_r2(rows.design("heldout", kind, layers), rows.read("heldout", "target", kind, target), weights, biases)
        return state

    def train(self, x: Tensor, y: Tensor, seed: int, device: torch.device | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Train the networks of all heads of one layer.

        Args:
            x: `[rows, features]`.
            y: `[rows, heads, head_dim]`.
            seed: of weights and order.
            device: where to train; the CPU by default.

        Returns:
            Weights `[heads, in, out]` and biases `[heads, 1, out]` per layer, standardisation folded in.
        """
        generator = torch.Generator().manual_seed(seed)
        mean_x, scale_x = x.mean(0), x.std(0).clamp_min(1e-6)
        # One scale per head: scaling its coordinates apart would change what the squared error weighs.
        mean_y = y.mean(0)
        scale_y = (y - mean_y).square().mean((0, 2)).sqrt().clamp_min(1e-6)
        inputs, goals = ((x - mean_x) / scale_x).to(device), ((y - mean_y) / scale_y[:, None]).to(device)
        sizes = [x.shape[1], *self.widths, y.shape[2]]
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for before, after in itertools.pairwise(sizes):
            bound = before**-0.5
            for group, rows in ((weights, before), (biases, 1)):
                drawn = torch.empty(y.shape[1], rows, after).uniform_(-bound, bound, generator=generator)
                group.append(drawn.to(device).requires_grad_())
        optimiser = torch.optim.Adam([*weights, *biases], lr=self.learning_rate)
        with torch.enable_grad():
            for _ in range(self.epochs):
                for some in torch.split(torch.randperm(len(inputs), generator=generator), self.batch_rows):
                    error = forward(inputs[some], weights, biases).transpose(0, 1) - goals[some]
                    # Mean within a head, sum over heads: no head's gradient depends on how many there are.
                    loss = error.square().mean((0, 2)).sum()
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
        final_w, final_b = [w.detach().cpu() for w in weights], [b.detach().cpu() for b in biases]
        final_b[0] = final_b[0] - (mean_x / scale_x)[None] @ final_w[0]
        final_w[0] = final_w[0] / scale_x[:, None]
        final_w[-1] = final_w[-1] * scale_y[:, None, None]
        final_b[-1] = final_b[-1] * scale_y[:, None, None] + mean_y[:, None]
        return final_w, final_b


@torch.no_grad()
def row_r2(x: Tensor, y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> float:
    """R2 on rows, mean over coordinates."""
    rss = torch.zeros(y.shape[1], dtype=torch.float64)
    for some, goal in zip(torch.split(x, CHUNK_ROWS), torch.split(y, CHUNK_ROWS), strict=True):
        predicted = forward(some, weights, biases).transpose(0, 1).reshape(len(some), -1)
        rss += (goal - predicted).double().square().sum(0)
    total = (y.double() - y.double().mean(0)).square().sum(0)
    return mean_r2(ratio(total, rss))
