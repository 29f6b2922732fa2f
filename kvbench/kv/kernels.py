"""The lean way from a cache to design matrices: block by block of tokens, each source layer stripped when first read, forgotten after its last reader.

Content of a whole cache is as large as the cache (keys in float32: twice). Mappers that treat tokens independently need only a block
of it at a time, which keeps the peak near source cache + target cache, and the block in the processor's own cache.
On CUDA, with triton installed, strip and rotation are one kernel each (`kvbench.kv.triton_kernels`); elsewhere the plain path runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from kvbench.kv.content import ContentKV, Kind, RotatedKV

if TYPE_CHECKING:
    from kvbench.kv.rope import Rope

# Rows (batch x tokens) mapped at once: large enough for full speed of the matrix products, small enough for the second-level cache.
BLOCK_ROWS = 512


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
        # The rotation back is the same for all layers.
        self.back = None if rope is None else rope.inverse(cos, sin)

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


class Panel:
    """Design matrices of a block with all source layers side by side, `[rows, layers, width]`, so that neighbouring layers are one matrix without a copy.

    Filled layer by layer as they are read. The memory serves keys, then values, and one block after the other.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, rows: int, layers: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for one kind of one block."""
        while self._free:
            memory = self._free.pop()
            if memory.numel() >= rows * layers * width and (memory.dtype, memory.device) == (dtype, device):
                return memory[: rows * layers * width].view(rows, layers, width)
        return torch.empty(rows * layers * width, dtype=dtype, device=device).view(rows, layers, width)

    def give_back(self, panel: Tensor) -> None:
        """Nobody reads it any more."""
        base = panel._base
        self._free.append(panel.flatten() if base is None else base)


@dataclass(frozen=True)
class BlockContent(ContentKV):
    """Content of a block of tokens; keys are `LayerKeys`."""

    memory: Panel = field(default_factory=Panel, repr=False, compare=False)
    _panels: dict[str, tuple[Tensor, set[int]]] = field(default_factory=dict, repr=False, compare=False)

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
        """One layer as a design matrix: columns of the block's panel, where that has its dtype and all layers share a device."""
        if not self._paneled(dtype, device):
            return super().flat(index, kind, dtype, device)
        return self._filled(kind, [index])[:, index]

    def design(self, layers: Sequence[int], kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Layers side by side: a view where they are neighbours, else one copy of whole runs of neighbours."""
        if not self._paneled(dtype, device):
            return super().design(layers, kind, dtype, device)
        panel = self._filled(kind, layers)
        parts = [panel[:, run].flatten(1) for run in runs(layers)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _paneled(self, dtype: torch.dtype, device: torch.device | None) -> bool:
        devices = {value.device for value in self.values}
        return dtype == self.values[0].dtype and len(devices) == 1 and (device is None or device in devices)

    def _filled(self, kind: Kind, layers: Iterable[int]) -> Tensor:
        """The panel, with these layers in it."""
        if kind not in self._panels:
            first = self.values[0]
            panel = self.memory.take(self.batch * self.tokens, len(self.values), self.kv_heads * self.head_dim, first.dtype, first.device)
            self._panels[kind] = (panel, set())
        panel, there = self._panels[kind]
        for layer in layers:
            if layer not in there:
                self._fill(panel.view(self.batch, self.tokens, len(self.values), self.kv_heads, self.head_dim)[:, :, layer], layer, kind)
                there.add(layer)
        return panel

    def _fill(self, place: Tensor, layer: int, kind: Kind) -> None:
        keys = self.keys
        if kind == "k" and isinstance(keys, LayerKeys) and keys.rope is not None and keys.back is not None:
            keys.rope.strip_into(keys.cached[layer], *keys.back, place)
        else:
            place.copy_(self.layer(layer, kind))

    def forget(self, layers: Iterable[int]) -> None:
        """Release single design matrices of source layers that nobody reads any more."""
        gone = set(layers)
        for key in [key for key in self._flat if key[0] in gone]:
            del self._flat[key]

    def release(self, kinds: Iterable[Kind]) -> None:
        """Nobody reads the panels of these kinds any more; their memory serves the next ones."""
        for kind in kinds:
            if kind in self._panels:
                self.memory.give_back(self._panels.pop(kind)[0])


def runs(layers: Sequence[int]) -> list[slice]:
    """Neighbouring indices as slices, in order: slices of a tensor are views, index lists are copies."""
    found: list[slice] = []
    for layer in layers:
        if found and found[-1].stop == layer:
            found[-1] = slice(found[-1].start, layer + 1)
        else:
            found.append(slice(layer, layer + 1))
    return found


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
    memory = Panel()
    step = max(1, (rows or BLOCK_ROWS) // max(1, positions.shape[0]))
    # Blocks of equal size: a short last one would run its matrix products below full speed.
    step = -(-kv.tokens // -(-kv.tokens // step)) if kv.tokens else step
    for first in range(0, kv.tokens, step):
        part = slice(first, min(first + step, kv.tokens))
        keys = LayerKeys([k[:, :, part] for k in kv.keys], rope if strip else None, cos[:, part], sin[:, part])
        values = [v[:, :, part].transpose(1, 2) for v in kv.values]
        yield first, BlockContent(keys, values, positions[:, part], (kv.lengths - first).clamp(0, part.stop - first), memory=memory)
