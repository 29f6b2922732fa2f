"""Controls: what an evaluation must show before a mapper's figure means anything."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Mapper, Reads

CONTROLS = ("identity", "oracle", "zero", "raw", "random", "shuffled")


def relative_depth(target_layer: int, source_layers: int, target_layers: int) -> int:
    """The source layer at the same relative depth: `round(l * (Ls - 1) / (Lt - 1))`."""
    return round(target_layer * (source_layers - 1) / max(1, target_layers - 1))


class Identity(Mapper):
    """Layer l of the cache it reads becomes layer l of the target, unchanged."""

    def __init__(self, name: str, reads: Reads, target_layers: int) -> None:
        self.name, self.reads, self._target_layers = name, reads, target_layers

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """The same layer."""
        if source.layers != self._target_layers:
            raise BadInputError(
                f"control 'identity' needs equally deep models, but the source has {source.layers} layers and the target {self._target_layers}; use 'raw', which goes by relative depth"
            )
        return source.keys[target_layer], source.values[target_layer]


class Zero(Mapper):
    """Zero keys and values: what the target answers without any prefix content."""

    name = "zero"

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self._shape = (kv_heads, head_dim)

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """All zeros."""
        zeros = source.values[0].new_zeros(source.batch, source.tokens, *self._shape)
        return zeros, zeros


class Raw(Mapper):
    """The source cache by relative depth, content unchanged (the identity null of earlier work)."""

    name = "raw"

    def __init__(self, target_layers: int) -> None:
        self._target_layers = target_layers

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """The source layer at the same relative depth."""
        layer = relative_depth(target_layer, source.layers, self._target_layers)
        return source.keys[layer], source.values[layer]


class Random(Mapper):
    """A fixed random linear map of the layer at the same relative depth; the scale of keys and values survives, the content does not."""

    name = "random"

    def __init__(self, target_layers: int, kv_heads: int, head_dim: int, seed: int = 0) -> None:
        self._target_layers, self._kv_heads, self._head_dim, self._seed = target_layers, kv_heads, head_dim, seed

    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """A Gaussian map seeded by layer and kind."""
        layer = relative_depth(target_layer, source.layers, self._target_layers)
        return self._map(source, layer, target_layer, "k"), self._map(source, layer, target_layer, "v")

    def _map(self, source: ContentKV, layer: int, target_layer: int, kind: Kind) -> Tensor:
        flat = source.flat(layer, kind, torch.float32)
        generator = torch.Generator().manual_seed(self._seed * 100_003 + target_layer * 2 + (kind == "v"))
        weight = torch.randn(flat.shape[1], self._kv_heads * self._head_dim, generator=generator) / flat.shape[1] ** 0.5
        mapped: Tensor = flat @ weight.to(flat.device)
        return mapped.reshape(source.batch, source.tokens, self._kv_heads, self._head_dim)


def control(name: str, *, target_layers: int, kv_heads: int, head_dim: int) -> Mapper:
    """A control by name, for a target of this geometry.

    Raises:
        BadInputError: an unknown name.
    """
    match name:
        case "identity":
            return Identity("identity", "source", target_layers)
        case "oracle":
            return Identity("oracle", "target", target_layers)
        case "shuffled":
            return Identity("shuffled", "shuffled", target_layers)
        case "zero":
            return Zero(kv_heads, head_dim)
        case "raw":
            return Raw(target_layers)
        case "random":
            return Random(target_layers, kv_heads, head_dim)
        case _:
            raise BadInputError(f"unknown control '{name}'; the controls are {', '.join(CONTROLS)}")
