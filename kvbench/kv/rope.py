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
    """`x cos + rotate_half(x) sin`; rotate_half is a roll by half with the sign in the sine, which keeps all operations on whole rows."""
    half = x.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return (x * cos).addcmul_(x.roll(half, -1), signed)


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
        return self._turn(keys, *self.inverse(cos, sin))

    @staticmethod
    def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of the rotation back; yarn's attention factor in them is undone too."""
        scale = cos.square() + sin.square()
        return cos / scale, -sin / scale

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

    def strip_into(self, cached: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Undo the rotation of cached keys in float32 and write them token-major.

        Args:
            cached: `[batch, kv_heads, tokens, head_dim]`.
            cos: of `inverse`.
            sin: of `inverse`.
            out: `[batch, tokens, kv_heads, head_dim]`, in its dtype.
        """
        if not fused(cached.device) or cached.device != out.device or not cached.stride(-1) == out.stride(-1) == 1:
            out.copy_(self._turn(cached.transpose(1, 2), cos, sin))
            return
        from kvbench.kv.triton_kernels import turn

        turn(cached, cos.to(cached.device), sin.to(cached.device), out.transpose(1, 2))

    @staticmethod
    def _turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos = cos.to(keys.device).unsqueeze(2)
        sin = sin.to(keys.device).unsqueeze(2)
        rotary_dim = cos.shape[-1]
        x = keys.float()
        if rotary_dim < x.shape[-1]:
            return torch.cat((_rotated(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
        return _rotated(x, cos, sin)
