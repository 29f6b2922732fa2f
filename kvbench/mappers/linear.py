"""Applying a linear map from k source layers to each target layer, with weights read layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Mapper, TensorStore

# Weights up to this size stay in memory between batches; larger mappers are read again layer by layer.
RESIDENT_BYTES = 2 << 30


class MemoryStore:
    """Tensors that were just fitted."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def get(self, name: str) -> Tensor:
        """The tensor called `name`."""
        return self._tensors[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._tensors)


class Weights:
    """Tensors of a mapper in the dtype and on the device of the cache; kept from one batch to the next unless they are large.

    Args:
        store: where they are.
        parameters: entries in all, which decides whether they stay.
    """

    def __init__(self, store: TensorStore, parameters: int) -> None:
        self.store = store
        self._parameters = parameters
        self._resident: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def resident(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype stay in memory between uses."""
        return self._parameters * dtype.itemsize <= RESIDENT_BYTES

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor called `name`."""
        key = (name, dtype, device)
        if key in self._resident:
            return self._resident[key]
        weight = self.store.get(name).to(device=device, dtype=dtype)
        if self.resident(dtype):
            if weight.ndim == 2 and device.type == "cpu":
                # Packed once, by columns: products of a few hundred rows in low precision run some 5 % faster on a CPU.
                weight = weight.t().contiguous().t()
            self._resident[key] = weight
        return weight


class SelectedMapper(Mapper):
    """What mappers that read chosen source layers share: the layers, the geometry, the weights, the figures of the fit.

    Args:
        source_layers: for each target layer its source layers, in the row order of its weights.
        source_width: KV heads times head width of the source.
        kv_heads: KV heads of the target.
        head_dim: head width of the target.
        store: its tensors.
        details: further manifest entries (R2, rows, ...).
        rotated: fitted on rotated keys (content space off); the engine then neither strips nor re-applies RoPE.
    """

    def __init__(
        self,
        source_layers: Sequence[Sequence[int]],
        source_width: int,
        kv_heads: int,
        head_dim: int,
        store: TensorStore,
        details: Mapping[str, Any] | None = None,
        *,
        rotated: bool = False,
    ) -> None:
        self.source_layers = tuple(tuple(layers) for layers in source_layers)
        self.source_width, self.kv_heads, self.head_dim, self.rotated = source_width, kv_heads, head_dim, rotated
        self.details = dict(details or {})
        self.store = store
        self.weights = Weights(store, self.parameters())
        self._last_reader: dict[int, int] = {}

    tokenwise = True
    """A token's result depends on that token alone, so a prefix may be mapped block by block."""

    @property
    def kinds_apart(self) -> bool:
        """Whether `map_kind` maps one kind without the other: a class that overrides `map_layer` alone does not."""
        for cls in type(self).__mro__:
            if "map_kind" in vars(cls):
                return cls is not SelectedMapper
            if "map_layer" in vars(cls):
                return False
        return False

    def map_kind(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        """Keys (`"k"`) or values (`"v"`) of one target layer, `[batch, tokens, kv_heads, head_dim]`."""
        return self.map_layer(source, target_layer)[0 if kind == "k" else 1]

    def finished(self, target_layer: int) -> list[int]:
        """Source layers that no target layer after this one reads."""
        if not self._last_reader:
            for target, layers in enumerate(self.source_layers):
                self._last_reader.update(dict.fromkeys(layers, target))
        return [layer for layer, last in self._last_reader.items() if last <= target_layer]

    @property
    def width(self) -> int:
        """Features of one target layer."""
        return self.kv_heads * self.head_dim

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything in the store, sorted by name."""
        for name in self.store.names():
            yield name, self.store.get(name)

    def parameters(self) -> int:
        """Entries of all matrices: tensors whose last name is a capital, biases being small letters."""
        return sum(self.store.get(name).numel() for name in self.store.names() if name.rpartition(".")[2][0].isupper())

    def describe(self) -> dict[str, Any]:
        """Source layers, size and figures of the fit."""
        return {
            **self.details,
            "source_layers": [list(layers) for layers in self.source_layers],
            "rotated": self.rotated,
            "parameters": self.parameters(),
            "multiply_adds_per_token": self.cost_per_token(),
        }

    @classmethod
    def from_artifact(cls, manifest: Mapping[str, Any], store: TensorStore) -> Self:
        """Read back a stored map."""
        fit = manifest["fit"]
        source, target = manifest["source"]["geometry"], manifest["target"]["geometry"]
        width = source["kv_heads"] * source["head_dim"]
        details = {k: v for k, v in fit.items() if k not in OWN_ENTRIES}
        return cls(fit["source_layers"], width, target["kv_heads"], target["head_dim"], store, details, rotated=bool(fit["rotated"]))


OWN_ENTRIES = frozenset({"source_layers", "rotated", "parameters", "multiply_adds_per_token"})


class LinearMapper(SelectedMapper):
    """`Y = X W + b` per target layer; X is the concatenation of its source layers, all KV heads.

    Tensors `target.{layer}.{k|v}.{W|b}`; W `[k * source width, target width]`.
    """

    name = "linear"

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """One product for keys, one for values."""
        return self.map_kind(source, target_layer, "k"), self.map_kind(source, target_layer, "v")

    def map_kind(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        """One of the two."""
        design = design_matrix(source, self.source_layers[target_layer], kind)
        weight = self.weights.get(f"target.{target_layer}.{kind}.W", design.dtype, design.device)
        bias = self.weights.get(f"target.{target_layer}.{kind}.b", design.dtype, design.device)
        return torch.addmm(bias, design, weight).reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)

    def parameters(self) -> int:
        """Entries of all W (biases not counted, as in the paper)."""
        return sum(2 * len(layers) * self.source_width * self.width for layers in self.source_layers)


def design_matrix(source: ContentKV, layers: Sequence[int], kind: Kind) -> Tensor:
    """The source layers side by side, `[batch * tokens, k * source width]`, in the cache dtype, on the device of the first."""
    dtype, device = source.values[0].dtype, source.values[layers[0]].device
    return source.design(layers, kind, dtype, device)
