"""Key/value tensors of a batch of prefixes, as a model caches them and in content space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["k", "v"]


@dataclass(frozen=True)
class RotatedKV:
    """Keys and values exactly as a model caches them (keys carry RoPE).

    Attributes:
        keys: one tensor per layer, `[batch, kv_heads, tokens, head_dim]`, on the layer's own device.
        values: the same for values.
        lengths: `[batch]`, true tokens per row; what lies beyond is padding and means nothing.
        offset: position of token 0 of these tensors (more than zero behind a shared header).
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Tensor
    offset: int = 0

    @property
    def tokens(self) -> int:
        """Padded tokens per row."""
        return int(self.keys[0].shape[2])

    def positions(self) -> Tensor:
        """Absolute positions, `[batch, tokens]`."""
        one_row = torch.arange(self.tokens, device=self.keys[0].device) + self.offset
        return one_row.expand(self.keys[0].shape[0], -1)


@dataclass(frozen=True)
class ContentKV:
    """Keys without RoPE, and values, token-major: what every mapper reads and writes.

    Layers stay separate tensors rather than one stacked tensor because the layers of a sharded model live on
    different devices.

    Attributes:
        keys: one tensor per layer, `[batch, tokens, kv_heads, head_dim]`.
        values: the same for values.
        positions: absolute positions, `[batch, tokens]`.
        lengths: `[batch]`, true tokens per row.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    positions: Tensor
    lengths: Tensor
    _flat: dict[tuple[int, str, torch.dtype], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.keys[0].shape[0])

    @property
    def tokens(self) -> int:
        """Padded tokens per row."""
        return int(self.keys[0].shape[1])

    @property
    def kv_heads(self) -> int:
        """KV heads per layer."""
        return int(self.keys[0].shape[2])

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return int(self.keys[0].shape[3])

    def layer(self, index: int, kind: Kind) -> Tensor:
        """The keys (`"k"`) or values (`"v"`) of one layer, `[batch, tokens, kv_heads, head_dim]`."""
        return (self.keys if kind == "k" else self.values)[index]

    def flat(self, index: int, kind: Kind, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """One layer as a design matrix, `[batch * tokens, kv_heads * head_dim]`; kept, since k target layers read it."""
        key = (index, kind, dtype)
        if key not in self._flat:
            layer = self.layer(index, kind)
            self._flat[key] = layer.reshape(self.batch * self.tokens, -1).to(dtype)
        flat = self._flat[key]
        return flat if device is None or flat.device == device else flat.to(device)

    def design(self, layers: Sequence[int], kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Layers side by side, `[batch * tokens, len(layers) * kv_heads * head_dim]`."""
        return torch.cat([self.flat(layer, kind, dtype, device) for layer in layers], dim=1)
