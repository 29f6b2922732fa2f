"""A cache that already holds a prefix and can be answered from any number of times.

`PrefixCache` is handed to a model's forward like any other transformers cache. New tokens land behind the prefix in
room allocated beforehand, so neither the prefix is copied on each use nor does the cache grow between uses:
`rewind` forgets everything but the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer: a buffer `[batch, kv_heads, capacity, head_dim]` of which `filled` tokens are in use."""

    def __init__(self, keys: Tensor, values: Tensor, filled: int = 0) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.filled = filled

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write `[batch, kv_heads, new, head_dim]` behind what is there; return everything in use."""
        end = self.filled + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self._grow(end)
        self.keys[:, :, self.filled : end].copy_(key_states)
        self.values[:, :, self.filled : end].copy_(value_states)
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        room = max(needed, self.keys.shape[-2] * 3 // 2) - self.keys.shape[-2]
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, room))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, room))

    def get_seq_length(self) -> int:
        """Tokens in use."""
        return self.filled


class PrefixCache(Cache):  # type: ignore[misc]  # the same
    """A transformers cache with room behind a prefix.

    Args:
        layers: one `PrefixLayer` per model layer.
    """

    def __init__(self, layers: list[PrefixLayer]) -> None:
        super().__init__(layers=layers)

    @classmethod
    def allocate(cls, devices: Sequence[torch.device], shape: tuple[int, int, int, int], dtype: torch.dtype, filled: int) -> PrefixCache:
        """An empty cache.

        Args:
            devices: device of each layer.
            shape: `(batch, kv_heads, capacity, head_dim)`.
            dtype: the model's cache dtype.
            filled: tokens that the caller is about to write as the prefix.
        """
        # zeros, not empty: padding keys are masked but 0 * NaN from uninitialised values would still poison the output.
        return cls([PrefixLayer(torch.zeros(shape, dtype=dtype, device=d), torch.zeros(shape, dtype=dtype, device=d), filled) for d in devices])

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows.to(layer.keys.device)], layer.values[rows.to(layer.values.device)]

    def rewind(self, filled: int) -> None:
        """Forget everything behind the first `filled` tokens."""
        for layer in self.layers:
            layer.filled = filled
