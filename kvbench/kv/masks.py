"""Attention masks for rows that hold a cached prefix of unequal length and packed queries behind it."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_mask(header: int, lengths: Tensor, padded: int, segments: Tensor) -> Tensor:
    """Who may look at whom.

    The keys of a row are `[header | own prefix, padded | queries]`. Segment 0 of the queries is the held-back context,
    segments 1, 2, ... are continuations that must not see each other, segment -1 is padding.

    Args:
        header: tokens of the header that all rows share.
        lengths: `[batch]`, true own-prefix tokens of each row.
        padded: padded own-prefix tokens.
        segments: `[batch, queries]`.

    Returns:
        Boolean `[batch, queries, header + padded + queries]`, True where attention is allowed.
    """
    batch, queries = segments.shape
    device = segments.device
    prefix = torch.arange(padded, device=device) < lengths[:, None]
    prefix = torch.cat([torch.ones(batch, header, dtype=torch.bool, device=device), prefix], dim=1)
    causal = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
    own = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
    # A padding query sees at least itself, so its softmax stays finite; no other query sees it.
    seen = own & (segments[:, None, :] >= 0) | torch.eye(queries, dtype=torch.bool, device=device)
    return torch.cat([prefix[:, None, :].expand(-1, queries, -1), seen & causal], dim=2)


def within_window(mask: Tensor, query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """Narrow `mask` to keys fewer than `window` tokens back, as sliding-window layers do."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return mask & (distance < window)


def as_attention_mask(allowed: Tensor, dtype: torch.dtype, additive: bool) -> Tensor:
    """The mask in the form an attention backend takes, `[batch, 1, queries, keys]`: boolean for sdpa, additive for eager."""
    allowed = allowed[:, None]
    if not additive:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
