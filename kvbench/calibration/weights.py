"""How much a target reads each cached token: the row weights of attention repair.

Source: arXiv:2609.00891 (CacheBridge). With `a_u = softmax(q_u k / sqrt d)` over the prefix and `o_u = sum_i a_ui v_i` for the query heads u of a
KV group: `r_V,i = sum_u a_ui^2`, `r_K,i = sum_u a_ui^2 |v_i - o_u|^2 |q_u|^2 / d`; each boundary normalised to unit mass, then summed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FIRST_BOUNDARY = 12


def boundaries(seq_len: int, count: int) -> list[int]:
    """Query positions, log-spaced from token 12 to the last; fewer in short sequences, where neighbours coincide."""
    first = min(FIRST_BOUNDARY, max(1, seq_len // 2))
    return sorted({round(float(position)) for position in np.geomspace(first, seq_len - 1, count)})


def attention_mass(
    queries: Tensor, keys: Tensor, values: Tensor, positions: list[int], scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """What queries at some positions read of the tokens before them.

    Args:
        queries: `[batch, tokens, query_heads, head_dim]` with RoPE.
        keys: `[batch, kv_heads, tokens, head_dim]` with RoPE.
        values: the same shape.
        positions: of the queries; each reads tokens `[0, position)`.
        scale: factor on query-key products.
        window: sliding window in tokens.

    Returns:
        `r_K` and `r_V`, each `[batch, kv_heads, tokens]`: unit mass per position, summed over positions.
    """
    batch, kv_heads, tokens, dim = keys.shape
    k, v = keys.float(), values.float()
    q = queries[:, positions].float().transpose(1, 2).reshape(batch, kv_heads, -1, len(positions), dim)
    at = torch.tensor(positions, device=k.device)
    token = torch.arange(tokens, device=k.device)
    seen = token < at[:, None]
    if window is not None:
        seen &= at[:, None] - token < window
    scores = (q @ k[:, :, None].mT) * scale
    attention = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = attention @ v[:, :, None]
    # |v - o|^2 expanded, so that no tensor of size positions * tokens * dim appears.
    apart = v.square().sum(-1)[:, :, None, None] - 2 * (out @ v[:, :, None].mT) + out.square().sum(-1, keepdim=True)
    squared = attention.square()
    by_value = squared.sum(2)
    by_key = (squared * apart.clamp_min(0) * (q.square().sum(-1, keepdim=True) * scale**2)).sum(2)
    return _unit_mass(by_key), _unit_mass(by_value)


def _unit_mass(r: Tensor) -> Tensor:
    """`[batch, heads, positions, tokens]` to unit mass per position, summed over positions."""
    return (r / r.sum(-1, keepdim=True).clamp_min(torch.finfo(r.dtype).tiny)).sum(2)


def largest_alpha(rows: int, squares: float, features: int) -> float:
    """The largest alpha in [0, 1] at which weights `w = 1 + alpha (r - 1)` keep enough effective rows.

    For mean-one r, `sum w = n` and `sum w^2 = n + alpha^2 (sum r^2 - n)`; Kish's effective sample size `(sum w)^2 / sum w^2` must be
    at least `min(n, 2p)`.

    Args:
        rows: n.
        squares: sum of the squared mean-one r.
        features: p.
    """
    spread = squares - rows
    needed = min(rows, 2 * features)
    if spread <= 0:
        return 1.0
    return min(1.0, math.sqrt(rows * (rows / needed - 1) / spread))
