"""Training of the residual mapper on the attention-output error.

Per step and target layer: a split b and some query positions at or behind it; keys and values before b are mapped, those from b on are the
target's own; the loss is the squared error of the per-head attention outputs relative to those of the target's own cache (the
`native` protocol of docs/diagnostics.md). Queries are the target's own, so layers do not influence each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import (
    PairBatch,
    attention_scale,
    layer_window,
    load_tokens,
    pair_of,
    refuse_unusual_attention,
    run_pair,
)
from kvbench.errors import BadInputError
from kvbench.mappers.base import Progress
from kvbench.mappers.closed_form import mean_r2
from kvbench.mappers.linear import SelectedMapper
from kvbench.mappers.solve import ratio
from kvbench.mappers.training import KINDS, load_state, save_state

if TYPE_CHECKING:
    from kvbench.mappers.residual import Residual
    from kvbench.pairs.models import LoadedModel

NAMES = ("U1", "u1", "U2", "u2")


@dataclass(frozen=True)
class Trained:
    """What training leaves.

    Attributes:
        tensors: residual weights by artifact name, standardisation folded in.
        error_before: held-out attention-output error of the closed form, per target layer.
        error_after: the same of what is kept.
        r2_heldout: per kind and target layer.
        steps: optimiser steps taken.
    """

    tensors: dict[str, Tensor]
    error_before: list[float]
    error_after: list[float]
    r2_heldout: dict[str, list[float]]
    steps: int


@dataclass(frozen=True)
class Split:
    """Where the mapped prefix ends, and which positions ask."""

    at: int
    queries: Tensor


def one_cycle(step: int, total: int, peak: float) -> float:
    """Learning rate: a linear rise over the first 30 % of the steps, then a cosine to a thousandth of the peak (Smith and Topin, 2018)."""
    rise = max(1, round(0.3 * total))
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, total - rise)
    return peak * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * done)))


def draw_split(seed: int, step: int, tokens: int, count: int) -> Split:
    """A split in the middle half of the sequence and sorted query positions behind it, from (seed, step) alone."""
    rng = np.random.default_rng([seed, step])
    at = int(rng.integers(max(1, tokens // 4), max(2, 3 * tokens // 4)))
    asked = rng.choice(np.arange(at, tokens), size=min(count, tokens - at), replace=False)
    return Split(at, torch.from_numpy(np.sort(asked)))


def attention_output(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of some queries, `[batch, kv_heads, group, queries, head_dim]`.

    Args:
        queries: `[batch, tokens, query_heads, head_dim]` with RoPE.
        keys: `[batch, tokens, kv_heads, head_dim]` with RoPE.
        values: the same shape.
        positions: which queries.
        scale: factor on query-key products.
        window: sliding window in tokens.
    """
    batch, tokens, kv_heads, dim = keys.shape
    q = queries[:, positions].transpose(1, 2).reshape(batch, kv_heads, -1, len(positions), dim)
    k, v = keys.transpose(1, 2)[:, :, None], values.transpose(1, 2)[:, :, None]
    token = torch.arange(tokens, device=keys.device)
    at = positions.to(keys.device)[:, None]
    seen = token <= at
    if window is not None:
        seen &= at - token < window
    scores = (q @ k.mT) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def output_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Squared error relative to the squared output, per head, mean over heads."""
    lost, whole = (t.square().sum((0, 3, 4)) for t in (found - wanted, wanted))
    return (lost / whole.clamp_min(torch.finfo(whole.dtype).tiny)).mean()


class Trainer:
    """One training run.

    Args:
        recipe: its settings.
        calibration: moments and sequences.
        frozen: the closed form.
        models: loaded source and target, or None to load them.
        folder: where the state is kept.
    """

    def __init__(
        self, recipe: Residual, calibration: Calibration, frozen: SelectedMapper, models: tuple[LoadedModel, LoadedModel] | None, folder: Path
    ) -> None:
        self.recipe, self.calibration, self.frozen = recipe, calibration, frozen
        self.blocks = load_tokens(calibration)
        self.source, self.target = pair_of(calibration, models)
        refuse_unusual_attention(self.target)
        if self.blocks.fit.shape[1] < 4:
            raise BadInputError(
                f"recipe 'residual' splits sequences, but they have {self.blocks.fit.shape[1]} tokens; calibrate with --seq-len 4 or more"
            )
        self.file = folder / "training.pt"
        self.layers = range(calibration.target_layers)
        self.device = self.target.device
        self.scales = {(t, kind): self._standard(t, kind) for t in self.layers for kind in KINDS}
        self.weights = {(t, kind): self._initial(t, kind) for t in self.layers for kind in KINDS}

    def _standard(self, target: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and deviation of the features, deviation of the outputs, from the moments."""
        fit = self.calibration.moments("fit", self.recipe.key_kind if kind == "k" else "v")
        columns = self.calibration.columns(self.frozen.source_layers[target])
        width = self.calibration.target_width
        spread = (fit.xx.diagonal()[columns] / fit.rows).clamp_min(1e-12).sqrt()
        out = (fit.yy[target * width : (target + 1) * width] / fit.rows).clamp_min(1e-12).mean().sqrt()
        return fit.mean_x[columns].float().to(self.device), spread.float().to(self.device), out.float().to(self.device)

    def _initial(self, target: int, kind: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + target * 2 + (kind == "v"))
        features = len(self.frozen.source_layers[target]) * self.calibration.source_width
        inner, width = self.recipe.bottleneck, self.calibration.target_width
        into = torch.randn(features, inner, generator=generator) / features**0.5
        parts = [into, torch.zeros(inner), torch.zeros(inner, width), torch.zeros(width)]
        return [part.to(self.device).requires_grad_() for part in parts]

    def run(self, progress: Progress | None) -> Trained:
        """Train to the end, or until no layer improves any more."""
        r = self.recipe
        flat = [part for t in self.layers for kind in KINDS for part in self.weights[t, kind]]
        optimiser = torch.optim.AdamW(flat, lr=r.learning_rate, weight_decay=r.weight_decay)
        per_epoch = -(-len(self.blocks.fit) // r.batch_size)
        passes = r.epochs * per_epoch
        total = passes * r.inner_steps
        marks = {max(1, round(passes * (i + 1) / r.evaluations)) for i in range(r.evaluations)}
        state = load_state(self.file)
        if state is None:
            before = self._judge()
            best, errors, idle, start = [part.detach().clone() for part in flat], list(before), 0, 0
        else:
            before, errors, best, idle, start = state["before"], state["errors"], state["best"], int(state["idle"]), int(state["passes"])
            optimiser.load_state_dict(state["optimiser"])
            with torch.no_grad():
                for part, kept in zip(flat, state["weights"], strict=True):
                    part.copy_(kept)
        done = start
        per_layer = len(KINDS) * len(NAMES)
        while done < passes and idle < r.patience:
            order = np.random.default_rng([r.seed, done // per_epoch]).permutation(len(self.blocks.fit))
            at = done % per_epoch * r.batch_size
            batch = self._batch(self.blocks.fit[order[at : at + r.batch_size]], f"training pass {done}")
            closed = {t: self._closed(batch, t) for t in self.layers}
            for inner in range(r.inner_steps):
                step = done * r.inner_steps + inner
                for group in optimiser.param_groups:
                    group["lr"] = one_cycle(step, total, r.learning_rate)
                self._step(optimiser, batch, closed, draw_split(r.seed, step, batch.target.tokens, r.queries))
            done += 1
            if done in marks:
                found = self._judge()
                better = [t for t in self.layers if found[t] < errors[t]]
                for t in better:
                    errors[t] = found[t]
                    span = slice(t * per_layer, (t + 1) * per_layer)
                    best[span] = [part.detach().clone() for part in flat[span]]
                idle = 0 if better else idle + 1
                weights = [part.detach() for part in flat]
                kept = {"before": before, "errors": errors, "best": best, "idle": idle, "passes": done, "weights": weights}
                save_state(self.file, {**kept, "optimiser": optimiser.state_dict()})
            if progress:
                progress("training the residual", done, passes)
        with torch.no_grad():
            for part, kept_part in zip(flat, best, strict=True):
                part.copy_(kept_part)
        return Trained(self._folded(), before, errors, self._r2(), done * r.inner_steps)

    def _batch(self, rows: np.ndarray[tuple[int, int], np.dtype[np.int32]], where: str) -> PairBatch:
        return run_pair(self.source, self.target, rows, queries=True, strip=self.recipe.content_space, where=where)

    def _closed(self, batch: PairBatch, target: int) -> tuple[Tensor, Tensor]:
        """The frozen map in float32, `[batch, tokens, kv_heads, head_dim]`."""
        keys, values = self.frozen.map_layer(batch.source, target)
        return keys.float(), values.float()

    def _content(self, batch: PairBatch, closed: tuple[Tensor, Tensor], target: int, until: int) -> tuple[Tensor, Tensor]:
        """Closed form plus residual for the first `until` tokens, in content space."""
        out = []
        for base, kind in zip(closed, KINDS, strict=True):
            layers = self.frozen.source_layers[target]
            rows = torch.cat([batch.source.layer(layer, kind)[:, :until].flatten(2).float().to(base.device) for layer in layers], dim=2)
            mean, spread, scale = self.scales[target, kind]
            into, into_bias, back, back_bias = self.weights[target, kind]
            hidden = torch.nn.functional.gelu((rows - mean) / spread @ into + into_bias)
            out.append(base[:, :until] + ((hidden @ back + back_bias) * scale).reshape(base[:, :until].shape))
        return out[0], out[1]

    def _mapped(self, batch: PairBatch, closed: tuple[Tensor, Tensor], target: int, until: int) -> tuple[Tensor, Tensor]:
        """The same with RoPE on the keys."""
        keys, values = self._content(batch, closed, target, until)
        if self.recipe.content_space:
            cos, sin = self.target.rope.cos_sin(batch.target.positions[:1, :until])
            keys = self.target.rope.apply(keys, cos, sin)
        return keys, values

    def _error(self, batch: PairBatch, closed: tuple[Tensor, Tensor], target: int, split: Split) -> Tensor:
        own_keys = batch.target_rotated.keys[target].transpose(1, 2).float()
        own_values = batch.target_rotated.values[target].transpose(1, 2).float()
        keys, values = self._mapped(batch, closed, target, split.at)
        scale, window = attention_scale(self.target, target), layer_window(self.target, target)
        queries = batch.queries[target]
        wanted = attention_output(queries, own_keys, own_values, split.queries, scale, window)
        keys, values = torch.cat([keys, own_keys[:, split.at :]], dim=1), torch.cat([values, own_values[:, split.at :]], dim=1)
        return output_error(attention_output(queries, keys, values, split.queries, scale, window), wanted)

    def _step(self, optimiser: torch.optim.Optimizer, batch: PairBatch, closed: dict[int, tuple[Tensor, Tensor]], split: Split) -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.enable_grad():
            for t in self.layers:
                # Layer by layer, so that one layer's activations are held at a time; each layer has weights of its own.
                self._error(batch, closed[t], t, split).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    @torch.no_grad()
    def _judge(self) -> list[float]:
        """Held-out error per target layer, always with the same splits."""
        sums, count = [0.0] * len(self.layers), 0
        rows = self.blocks.heldout
        for first in range(0, len(rows), self.recipe.batch_size):
            batch = self._batch(rows[first : first + self.recipe.batch_size], f"held-out sequence {first}")
            size = batch.source.batch
            # Splits numbered from the end of the range that training steps come from.
            split = draw_split(self.recipe.seed, 2**31 + first, batch.target.tokens, self.recipe.queries)
            for t in self.layers:
                sums[t] += size * float(self._error(batch, self._closed(batch, t), t, split))
            count += size
        return [value / count for value in sums]

    def _folded(self) -> dict[str, Tensor]:
        """Weights on raw features: `(x - mean) / spread` goes into the first layer, the output scale into the second."""
        tensors = {}
        for (t, kind), parts in self.weights.items():
            mean, spread, scale = self.scales[t, kind]
            into, into_bias, back, back_bias = (part.detach() for part in parts)
            folded = (into / spread[:, None], into_bias - (mean / spread) @ into, back * scale, back_bias * scale)
            tensors.update({f"target.{t}.{kind}.{name}": part.cpu() for name, part in zip(NAMES, folded, strict=True)})
        return tensors

    @torch.no_grad()
    def _r2(self) -> dict[str, list[float]]:
        """Held-out R2 of content, on the same rows as the closed form's."""
        stride, width = int(self.calibration.manifest["data"]["stride"]), self.calibration.target_width
        rss = {(t, kind): torch.zeros(width, dtype=torch.float64) for t in self.layers for kind in KINDS}
        for first in range(0, len(self.blocks.heldout), self.recipe.batch_size):
            batch = self._batch(self.blocks.heldout[first : first + self.recipe.batch_size], f"held-out sequence {first}")
            for t in self.layers:
                for kind, found in zip(KINDS, self._content(batch, self._closed(batch, t), t, batch.target.tokens), strict=True):
                    lost = (batch.target.layer(t, kind).float() - found)[:, ::stride]
                    rss[t, kind] += lost.double().square().sum((0, 1)).reshape(-1).cpu()
        out: dict[str, list[float]] = {}
        for kind in KINDS:
            moments = self.calibration.moments("heldout", self.recipe.key_kind if kind == "k" else "v")
            out[kind] = [mean_r2(ratio(total, rss[t, kind])) for t, total in enumerate(moments.yy.reshape(-1, width))]
        return out
