"""The lean way from a cache to design matrices: block by block of tokens, each source layer stripped when first read, forgotten after its last reader.

Content of a whole cache is as large as the cache (keys in float32: twice). Mappers that treat tokens independently need only a block
of it at a time, which keeps the peak near source cache + target cache, and the block in the processor's own cache.
On CUDA, with triton installed, strip and rotation are one kernel each (`kvbench.kv.triton_kernels`); elsewhere the plain path runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from kvbench.kv.content import ContentKV, Kind, RotatedKV

if TYPE_CHECKING:
    from kvbench.kv.rope import Rope

# Rows (batch x tokens) mapped at once: large enough for full speed of the matrix products, small enough for the second-level cache.
BLOCK_ROWS = 768


@cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def fused(device: torch.device) -> bool:
    """Whether the fused kernels run on this device."""
    return device.type == "cuda" and has_triton()


class LayerKeys(Sequence[Tensor]):
    """Content keys of some tokens of a cache, made when asked for and not kept.

    Args:
        keys: cached keys per layer, `[batch, kv_heads, tokens, head_dim]`.
        rope: of the model that cached them; None leaves the rotation on.
        cos: `[1, tokens, rotary_dim]` of these tokens.
        sin: the same.
    """

    def __init__(self, keys: Sequence[Tensor], rope: Rope | None, cos: Tensor, sin: Tensor) -> None:
        self.cached, self.rope, self.cos, self.sin = keys, rope, cos, sin

    def __len__(self) -> int:
        return len(self.cached)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        keys = self.cached[index].transpose(1, 2)
        return keys.float() if self.rope is None else self.rope.strip(keys, self.cos, self.sin)


@dataclass(frozen=True)
class BlockContent(ContentKV):
    """Content of a block of tokens; keys are `LayerKeys`."""

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.values[0].shape[0])

    @property
    def tokens(self) -> int:
        """Tokens of this block."""
        return int(self.values[0].shape[1])

    @property
    def kv_heads(self) -> int:
        """KV heads per layer."""
        return int(self.values[0].shape[2])

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return int(self.values[0].shape[3])

    def flat(self, index: int, kind: Kind, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """One layer as a design matrix; on CUDA stripped, gathered and cast by one kernel."""
        keys = self.keys
        if kind == "k" and (index, kind, dtype) not in self._flat and isinstance(keys, LayerKeys) and keys.rope and fused(keys.cached[index].device):
            self._flat[index, kind, dtype] = keys.rope.strip_to_rows(keys.cached[index], keys.cos, keys.sin, dtype)
        return super().flat(index, kind, dtype, device)

    def forget(self, layers: Iterable[int]) -> None:
        """Release the design matrices of source layers that nobody reads any more."""
        gone = set(layers)
        for key in [key for key in self._flat if key[0] in gone]:
            del self._flat[key]


def token_blocks(kv: RotatedKV, rope: Rope, *, strip: bool, rows: int | None = None) -> Iterator[tuple[int, BlockContent]]:
    """A cache as content, some tokens at a time.

    Args:
        kv: the cache.
        rope: RoPE of the model that made it.
        strip: remove RoPE.
        rows: batch x tokens at once; default `BLOCK_ROWS`.

    Yields:
        First token of the block, and its content.
    """
    positions = kv.positions()
    cos, sin = rope.cos_sin(positions[:1])
    step = max(1, (rows or BLOCK_ROWS) // max(1, positions.shape[0]))
    for first in range(0, kv.tokens, step):
        part = slice(first, min(first + step, kv.tokens))
        keys = LayerKeys([k[:, :, part] for k in kv.keys], rope if strip else None, cos[:, part], sin[:, part])
        values = [v[:, :, part].transpose(1, 2) for v in kv.values]
        yield first, BlockContent(keys, values, positions[:, part], (kv.lengths - first).clamp(0, part.stop - first))
