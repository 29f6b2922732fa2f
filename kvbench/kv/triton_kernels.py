"""One Triton kernel that turns keys by given cos and sin from any strided layout into any other, in one pass over memory.

It is strip-and-gather (cache layout -> rows of a design matrix, inverse rotation), rotate-and-write (mapped rows -> cache layout)
and, with the cos and sin of `between`, the re-encoding from one RoPE basis into another. Import only where triton is installed.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _turn(  # type: ignore[no-untyped-def]
    x, cos, sin, out, tokens, heads, half, rest, xb, xh, xt, ob, oh, ot, cb, ct, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    row = tl.program_id(0)
    b, t = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    angle = tl.arange(0, HALF)
    inside = (h < heads) & (d < half)
    source = x + b * xb + h * xh + t * xt + d
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    where = b * cb + t * ct + angle
    cos1 = tl.load(cos + where, mask=angle < half, other=0.0)[None, :]
    sin1 = tl.load(sin + where, mask=angle < half, other=0.0)[None, :]
    cos2 = tl.load(cos + where + half, mask=angle < half, other=0.0)[None, :]
    sin2 = tl.load(sin + where + half, mask=angle < half, other=0.0)[None, :]
    target = out + b * ob + h * oh + t * ot + d
    tl.store(target, (first * cos1 - second * sin1).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * cos2 + first * sin2).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        r = tl.arange(0, REST)[None, :]
        kept = (h < heads) & (r < rest)
        copied = tl.load(x + b * xb + h * xh + t * xt + 2 * half + r, mask=kept, other=0.0)
        tl.store(out + b * ob + h * oh + t * ot + 2 * half + r, copied.to(out.dtype.element_ty), mask=kept)


def turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write `x cos + rotate_half(x) sin` into `out`, computed in float32; entries beyond `rotary_dim` are copied.

    Args:
        x: `[batch, kv_heads, tokens, head_dim]`, any strides with adjacent head entries.
        cos: float32 `[1 or batch, tokens, rotary_dim]`.
        sin: the same.
        out: like `x`, of any dtype and strides with adjacent head entries.

    Raises:
        ValueError: head entries that are not adjacent in memory.
    """
    batch, heads, tokens, width = x.shape
    if x.stride(3) != 1 or out.stride(3) != 1 or out.shape != x.shape:
        raise ValueError(
            f"turn needs equal shapes with adjacent head entries, not {tuple(x.shape)} {x.stride()} and {tuple(out.shape)} {out.stride()}"
        )
    if not x.numel():
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    rotary = cos.shape[-1]
    per_row = cos.stride(0) if cos.shape[0] > 1 else 0
    rest = width - rotary
    blocks = {
        "HEADS": triton.next_power_of_2(heads),
        "HALF": triton.next_power_of_2(rotary // 2),
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
    _turn[(batch * tokens,)](
        x,
        cos,
        sin,
        out,
        tokens,
        heads,
        rotary // 2,
        rest,
        *(x.stride(0), x.stride(1), x.stride(2)),
        *(out.stride(0), out.stride(1), out.stride(2)),
        per_row,
        cos.stride(1),
        **blocks,
    )


def between(source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cos and sin that take keys from one RoPE basis straight into another (equal rotary widths): undo `source`, apply `target`.

    Source: composition of plane rotations, `a_t R(u) R(-v) / a_s = (a_t / a_s) R(u - v)`.
    """
    (c, s), (u, v) = source, target
    scale = torch.square(c) + torch.square(s)
    return (u * c + v * s) / scale, (v * c - u * s) / scale
