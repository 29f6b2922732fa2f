"""Whether a mapper's error lies where attention reads. Above 1: more than elsewhere.

Source: arXiv:2608.03893 (K- and V-concentration). Queries and keys carry RoPE here, as the products of attention do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k_concentration(error: Tensor, queries: Tensor) -> Tensor:
    """Error of keys along the directions that queries read.

    The error of each token is projected on the right singular vectors of the head's query matrix, each squared component is weighted by its
    squared singular value, and the weighted mean is divided by the plain mean over components. As sum_c s_c^2 (E v_c)^2 = ||E Q'||^2,
    this is d tr(E'E Q'Q) / (||Q||^2 ||E||^2), which needs no decomposition.

    Args:
        error: mapped minus own keys with RoPE, `[batch, tokens, kv_heads, head_dim]`.
        queries: with RoPE, `[batch, queries, query_heads, head_dim]`.

    Returns:
        `[batch, query_heads]`, NaN where there is no error.
    """
    kv_heads, width = error.shape[2:]
    gram_error = torch.einsum("bthd,bthe->bhde", error.double(), error.double())
    grouped = queries.double().reshape(*queries.shape[:2], kv_heads, -1, width)
    gram_query = torch.einsum("bqhgd,bqhge->bhgde", grouped, grouped)
    product = torch.einsum("bhde,bhgde->bhg", gram_error, gram_query)
    size = gram_error.diagonal(dim1=-2, dim2=-1).sum(-1)[:, :, None] * gram_query.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(size > 0, width * product / size.clamp_min(torch.finfo(torch.float64).tiny), torch.nan).flatten(1)


def v_concentration(error: Tensor, weights: Tensor) -> Tensor:
    """Error of values at the positions that attention reads.

    The squared error of each position, weighted by the squared attention weight that the position truly receives, over its plain mean.

    Args:
        error: mapped minus own values, `[batch, tokens, kv_heads, head_dim]`.
        weights: true attention weights on these positions, `[batch, kv_heads, group, queries, tokens]`.

    Returns:
        `[batch, query_heads]`, NaN where there is no error.
    """
    squared = error.double().square().sum(-1).transpose(1, 2)
    read = weights.double().square().sum(3)
    weighted = torch.einsum("bhgt,bht->bhg", read, squared) / read.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    mean = squared.mean(-1)[:, :, None]
    return torch.where(mean > 0, weighted / mean.clamp_min(torch.finfo(torch.float64).tiny), torch.nan).flatten(1)


def attention_weights(queries: Tensor, keys: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention weights of some queries, `[batch, kv_heads, group, queries, tokens]`.

    Args:
        queries: `[batch, tokens, query_heads, head_dim]` with RoPE.
        keys: `[batch, tokens, kv_heads, head_dim]` with RoPE.
        positions: which queries.
        scale: factor on query-key products.
        window: sliding window in tokens.
    """
    batch, tokens, kv_heads, dim = keys.shape
    q = queries[:, positions].transpose(1, 2).reshape(batch, kv_heads, -1, len(positions), dim)
    token, at = torch.arange(tokens, device=keys.device), positions.to(keys.device)[:, None]
    seen = token <= at
    if window is not None:
        seen &= at - token < window
    scores = (q @ keys.transpose(1, 2)[:, :, None].mT) * scale
    return scores.masked_fill_(~seen, -torch.inf).softmax(-1)
