"""Every use of the Triton kernel against the plain path; run as a script with a device (cpu under TRITON_INTERPRET=1, or cuda)."""

from __future__ import annotations

import itertools
import sys

import torch

from kvbench.kv.rope import Rope


def angles(batch: int, tokens: int, rotary: int, base: float, factor: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as rotary modules make them: both halves alike, scaled by yarn's attention factor."""
    frequency = base ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    angle = (torch.arange(tokens)[None, :, None] + 7 * torch.arange(batch)[:, None, None]) * frequency
    angle = torch.cat((angle, angle), dim=-1).to(device)
    return angle.cos() * factor, angle.sin() * factor


def main(device: str) -> None:
    from kvbench.kv.triton_kernels import between, turn

    generator = torch.Generator().manual_seed(0)
    count = 0
    shapes = [(1, 1, 3, 8, 8), (2, 3, 5, 16, 16), (2, 2, 4, 24, 24), (1, 3, 5, 16, 8), (2, 4, 3, 20, 12)]
    for (batch, heads, tokens, width, rotary), dtype, per_row in itertools.product(shapes, (torch.float32, torch.bfloat16), (False, True)):
        if device == "cpu" and dtype is torch.bfloat16 and (batch, heads) != (2, 3):
            continue
        cos, sin = angles(batch if per_row else 1, tokens, rotary, 10000.0, 1.1, device)
        # A part of a longer cache, as prefixes are.
        cache = torch.randn(batch, heads, tokens + 4, width, generator=generator).to(device, dtype)
        cached = cache[:, :, 2 : 2 + tokens]
        scale = cos.square() + sin.square()
        exact = {"atol": 2e-6, "rtol": 2e-6} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        # strip-and-gather
        rows = torch.empty(batch, tokens, heads, width, device=device, dtype=dtype)
        turn(cached, cos / scale, -sin / scale, rows.transpose(1, 2))
        plain = Rope._turn(cached.transpose(1, 2), cos / scale, -sin / scale)
        torch.testing.assert_close(rows, plain.to(dtype), **exact)
        # rotate-and-write, leaving the rest of the cache alone
        out = torch.full_like(cache, 3.0)
        turn(rows.transpose(1, 2), cos, sin, out[:, :, 2 : 2 + tokens])
        torch.testing.assert_close(out[:, :, 2 : 2 + tokens], Rope._turn(rows, cos, sin).transpose(1, 2).to(dtype), **exact)
        assert bool((out[:, :, :2] == 3).all())
        assert bool((out[:, :, 2 + tokens :] == 3).all())
        # from one basis into another: strip, then apply
        other = angles(batch if per_row else 1, tokens, rotary, 500000.0, 1.0, device)
        turn(cached, *between((cos, sin), other), out[:, :, 2 : 2 + tokens])
        torch.testing.assert_close(
            out[:, :, 2 : 2 + tokens], Rope._turn(plain, *other).transpose(1, 2).to(dtype), **{k: 3 * v for k, v in exact.items()}
        )
        count += 1
    print(f"{count} cases equal")


if __name__ == "__main__":
    main(sys.argv[1])
