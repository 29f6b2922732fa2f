"""How well mapped keys and values match the target's own: R2, relative error, cosine, by layer and head, position and class of token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
KINDS = ("keys", "keys_rotated", "values")
FIRST_TOKENS = 4
"""Positions that count as the first tokens."""
SINK_FACTOR = 10.0
"""A token beyond them that receives this many times the mean attention mass of the prefix is a sink."""
RARE_COUNT = 2
"""Token ids seen at most this often in all the text of the diagnosis are rare."""
CLASSES = ("first tokens", "attention sinks", "rare tokens", "other")


@dataclass
class LayerErrors:
    """Sums of one kind over the prefix tokens, one entry per sequence.

    Attributes:
        rss: `[sequences, layers, kv_heads, head_dim]` squared error.
        total: the same of the target's own entries.
        square: the same of their squares.
        cosine: `[sequences, layers, kv_heads]` summed over tokens.
        by_token: `[sequences, tokens]` squared error over the layer's mean squared norm, mean over layers.
    """

    rss: list[Floats] = field(default_factory=list)
    total: list[Floats] = field(default_factory=list)
    square: list[Floats] = field(default_factory=list)
    cosine: list[Floats] = field(default_factory=list)
    by_token: list[Floats] = field(default_factory=list)


class Reconstruction:
    """Streams over layers and batches of one arm.

    Args:
        layers: target layers.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.tokens = layers, 0
        self.kinds = {kind: LayerErrors() for kind in KINDS}

    def start(self) -> None:
        """Begin a batch of sequences."""
        self._layer: dict[str, list[tuple[Tensor, ...]]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, found: Tensor, wanted: Tensor) -> None:
        """One layer of the batch, layers in order.

        Args:
            kind: one of `KINDS`.
            found: mapped, `[batch, tokens, kv_heads, head_dim]`.
            wanted: the target's own, the same shape.
        """
        found, wanted = found.double(), wanted.double()
        error = (found - wanted).square()
        norm = wanted.square().sum((2, 3))
        scale = norm.mean(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=-1).sum(1)
        sums = error.sum(1), wanted.sum(1), wanted.square().sum(1), cosine, error.sum((2, 3)) / scale
        self._layer[kind].append(tuple(t.cpu() for t in sums))
        self.tokens = wanted.shape[1]

    def finish(self) -> None:
        """End the batch."""
        for kind, layers in self._layer.items():
            if not layers:
                continue
            rss, total, square, cosine, token = (torch.stack(part, dim=1).numpy() for part in zip(*layers, strict=True))
            errors = self.kinds[kind]
            errors.rss.extend(rss)
            errors.total.extend(total)
            errors.square.extend(square)
            errors.cosine.extend(cosine)
            errors.by_token.extend(token.mean(axis=1))

    def r2(self, kind: str) -> tuple[Floats, Floats]:
        """R2 over all sequences, about the mean of each coordinate.

        Returns:
            `[layers, kv_heads]` mean over coordinates that vary (NaN where none does), and `[sequences]`: means over layers whose mean over
            sequences is the overall figure, the total variance being held fixed.
        """
        e = self.kinds[kind]
        rss, total, square = (np.stack(part) for part in (e.rss, e.total, e.square))
        n = len(rss) * self.tokens
        tss = square.sum(0) - total.sum(0) ** 2 / n
        varies = tss > 1e-12 * np.maximum(square.sum(0), 1e-300)
        shares = np.where(varies, 1 - rss * len(rss) / np.where(varies, tss, 1.0), np.nan)
        heads = _mean(shares, axis=(0, 3))
        per_layer = _mean(shares, axis=(2, 3))
        return heads, _mean(per_layer, axis=1)

    def relative_error(self, kind: str) -> tuple[Floats, Floats, Floats]:
        """Root of summed squared error over summed squares.

        Returns:
            `[layers, kv_heads]`, and per sequence the mean over layers of squared error and of squares, each layer scaled by its own squares.
        """
        e = self.kinds[kind]
        rss, square = (np.stack(part).sum(-1) for part in (e.rss, e.square))
        heads = np.sqrt(rss.sum(0) / np.maximum(square.sum(0), 1e-300))
        scale = np.maximum(square.sum((0, 2)), 1e-300)
        return heads, (rss.sum(2) / scale).mean(1), (square.sum(2) / scale).mean(1)

    def cosine(self, kind: str) -> tuple[Floats, Floats]:
        """Mean cosine between mapped and own head vectors.

        Returns:
            `[layers, kv_heads]` and `[sequences]`.
        """
        cosine = np.stack(self.kinds[kind].cosine) / self.tokens
        return cosine.mean(0), cosine.mean((1, 2))

    def by_position(self, kind: str) -> tuple[list[str], list[float], list[int]]:
        """Relative error in bins of position that double in width: labels, values, tokens."""
        errors = np.stack(self.kinds[kind].by_token)
        edges = [0, 1]
        while edges[-1] < errors.shape[1]:
            edges.append(min(edges[-1] * 2, errors.shape[1]))
        labels, values, counts = [], [], []
        for low, high in itertools.pairwise(edges):
            labels.append(str(low) if high == low + 1 else f"{low}-{high - 1}")
            values.append(float(np.sqrt(errors[:, low:high].mean())))
            counts.append(errors[:, low:high].size)
        return labels, values, counts

    def by_class(self, kind: str, classes: NDArray[np.int64]) -> tuple[list[float | None], list[int]]:
        """Relative error by class of token.

        Args:
            kind: one of `KINDS`.
            classes: `[sequences, tokens]` index into `CLASSES`.
        """
        errors = np.stack(self.kinds[kind].by_token)
        counts = [int((classes == i).sum()) for i in range(len(CLASSES))]
        return [float(np.sqrt(errors[classes == i].mean())) if count else None for i, count in enumerate(counts)], counts


def token_classes(tokens: NDArray[np.integer], mass: Floats) -> NDArray[np.int64]:
    """Class of every prefix token, the first that applies of `CLASSES`.

    Args:
        tokens: `[sequences, tokens]` ids of the prefixes.
        mass: `[sequences, tokens]` attention received from the suffix, any scale.
    """
    ids, counts = np.unique(tokens, return_counts=True)
    seen = counts[np.searchsorted(ids, tokens)]
    classes = np.where(seen <= RARE_COUNT, 2, 3)
    classes = np.where(mass > SINK_FACTOR * mass.mean(axis=1, keepdims=True), 1, classes)
    classes[:, :FIRST_TOKENS] = 0
    return classes.astype(np.int64)


def _mean(values: Floats, axis: int | Sequence[int]) -> Floats:
    """Mean over what is defined; NaN where nothing is."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    defined = ~np.isnan(values)
    count = defined.sum(axis=axes)
    return np.asarray(np.where(count > 0, np.where(defined, values, 0.0).sum(axis=axes) / np.maximum(count, 1), np.nan))
