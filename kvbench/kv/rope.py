"""Rotary position embedding on and off, through the model's own rotary module.

The one place of kvbench where RoPE is removed or applied. cos and sin come from the module that the model itself
calls, so linear, llama3 and yarn scaling are exact. The transform of one key pair is `a * R(angle)` where `a` is
yarn's attention factor (1 elsewhere); the inverse is therefore `R(-angle) / a`, not the transpose.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kvbench.errors import BadInputError
from kvbench.kv.kernels import fused

# Their inverse frequencies depend on the current length, so cached keys of one prefix carry several bases.
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x cos + rotate_half(x) sin` without the temporaries: the halves are added where they belong."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class Rope:
    """RoPE of one model.

    Args:
        model: a causal language model whose decoder owns one rotary module.

    Raises:
        BadInputError: no rotary module, more than one kind of it, or a length-dependent type.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb" and hasattr(m, "inv_freq")]
        if not found:
            raise BadInputError(
                f"{type(model).__name__} has no rotary module; kvbench transfers caches of models with rotary position embedding only"
            )
        self._rotary = found[0]
        rope_type = getattr(self._rotary, "rope_type", "default")
        if rope_type in LENGTH_DEPENDENT:
            raise BadInputError(
                f"{type(model).__name__} uses RoPE type '{rope_type}', whose cached keys cannot be unrotated; use a model with default, linear, llama3 or yarn RoPE"
            )

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 cos and sin, `[batch, tokens, rotary_dim]`, for absolute `positions` `[batch, tokens]`."""
        device = cast(Tensor, self._rotary.inv_freq).device
        carrier = torch.zeros((), dtype=torch.float32, device=device)
        cos, sin = self._rotary(carrier, positions.to(device))
        return cos, sin

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate token-major keys `[batch, tokens, kv_heads, head_dim]` in float32.

        Returns:
            Float32 tensor of the same shape.
        """
        return self._turn(keys, cos, sin)

    def strip(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo the rotation (and yarn's attention factor) of token-major keys, in float32."""
        scale = cos.square() + sin.square()
        return self._turn(keys, cos / scale, -sin / scale)

    def apply_into(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Rotate token-major keys in float32 and write them into a cache.

        Args:
            keys: `[batch, tokens, kv_heads, head_dim]`.
            cos: of `cos_sin`.
            sin: of `cos_sin`.
            out: `[batch, kv_heads, tokens, head_dim]`, part of a cache, in its dtype.
        """
        if fused(keys.device) and keys.device == out.device and keys.stride(-1) == out.stride(-1) == 1:
            from kvbench.kv.triton_kernels import turn

            turn(keys.transpose(1, 2), cos.to(keys.device), sin.to(keys.device), out)
        else:
            out.copy_(self.apply(keys, cos, sin).transpose(1, 2))

    def strip_to_rows(self, cached: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo the rotation of cached keys `[batch, kv_heads, tokens, head_dim]`; rows `[batch * tokens, kv_heads * head_dim]` in `dtype`."""
        batch, heads, tokens, width = cached.shape
        if not fused(cached.device) or cached.stride(-1) != 1:
            return self.strip(cached.transpose(1, 2), cos, sin).reshape(batch * tokens, heads * width).to(dtype)
        from kvbench.kv.triton_kernels import turn

        rows = cached.new_empty(batch, tokens, heads, width, dtype=dtype)
        cos, sin = cos.to(cached.device), sin.to(cached.device)
        scale = cos.square() + sin.square()
        turn(cached, cos / scale, -sin / scale, rows.transpose(1, 2))
        return rows.view(batch * tokens, heads * width)

    @staticmethod
    def _turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos = cos.to(keys.device).unsqueeze(2)
        sin = sin.to(keys.device).unsqueeze(2)
        rotary_dim = cos.shape[-1]
        x = keys.float()
        if rotary_dim < x.shape[-1]:
            return torch.cat((_rotated(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
        return _rotated(x, cos, sin)
