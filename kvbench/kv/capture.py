"""From a model's cache to content space and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, RotatedKV

if TYPE_CHECKING:
    from kvbench.kv.rope import Rope


def to_content(kv: RotatedKV, rope: Rope, *, strip: bool = True) -> ContentKV:
    """Token-major content of a cache; keys in float32 without RoPE, values in the cache dtype.

    Args:
        kv: the cache.
        rope: RoPE of the model that made it.
        strip: remove RoPE (off only for the rotated-keys ablation).
    """
    positions = kv.positions()
    cos, sin = rope.cos_sin(positions[:1])
    keys = [rope.strip(k.transpose(1, 2), cos, sin) if strip else k.transpose(1, 2).float() for k in kv.keys]
    return ContentKV(keys, [v.transpose(1, 2) for v in kv.values], positions, kv.lengths)


@contextmanager
def pre_rotation_keys(blocks: list[nn.Module], kv_heads: int, head_dim: int) -> Iterator[dict[int, Tensor]]:
    """Record each layer's keys before RoPE while the model runs: the output of `k_norm` where there is one, else of `k_proj`.

    Yields:
        Layer index -> `[batch, tokens, kv_heads, head_dim]`, filled by the forward passes inside the context.

    Raises:
        BadInputError: an attention module without `k_norm` and `k_proj`.
    """
    seen: dict[int, Tensor] = {}
    handles = []

    def recorder(layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def record(_module: nn.Module, _args: object, output: Tensor) -> None:
            keys = output.detach()
            if keys.dim() == 4 and keys.shape[1] == kv_heads and keys.shape[2] != kv_heads:
                keys = keys.transpose(1, 2)
            seen[layer] = keys.reshape(keys.shape[0], -1, kv_heads, head_dim)

        return record

    try:
        for index, block in enumerate(blocks):
            attention = getattr(block, "self_attn", None)
            module = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
            if not isinstance(module, nn.Module):
                raise BadInputError(
                    f"layer {index} ({type(attention).__name__}) has neither k_norm nor k_proj, so its pre-rotation keys cannot be read"
                )
            handles.append(module.register_forward_hook(recorder(index)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def finite_or_raise(kv: RotatedKV, model: str, where: str) -> None:
    """Refuse NaN or infinite activations.

    Raises:
        BadInputError: names model, layer and batch.
    """
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        for what, tensor in (("keys", keys), ("values", values)):
            # A sum is non-finite exactly when an entry is (or float32 overflows, which is as bad), at one pass over the tensor.
            if not bool(torch.isfinite(tensor.float().sum())):
                raise BadInputError(f"{model}: non-finite {what} in layer {layer}, {where}; the weights or the dtype are broken (try float32)")
