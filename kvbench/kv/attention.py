"""Attention behind a prefix without copying it: the query heads of one KV head become further query rows.

transformers' sdpa path repeats keys and values for every query head as soon as there is a mask, at each layer and each step;
behind a long prefix those copies cost more than the attention. Folding the query heads of a group into the query axis is the
same sum over the same numbers, with one copy of the keys. Registered under a name of its own through transformers'
`AttentionInterface` and switched on only while kvbench runs queries behind a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "kvbench_folded"


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of grouped queries under an explicit mask.

    Args:
        module: the attention module.
        query: `[batch, query_heads, queries, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: the same for values.
        attention_mask: boolean `[batch, 1, queries, keys]`; None falls back to transformers' own function.
        dropout: none at evaluation.
        scaling: of the logits.
        **kwargs: as transformers passes them.

    Returns:
        `[batch, queries, query_heads, head_dim]`, and None for the weights.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or groups == 1:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    folded = query.reshape(batch, key.shape[1], groups * queries, width)
    # Rows are ordered group by group, queries within: the mask repeats as a whole.
    mask = attention_mask if queries == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, queries, out.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, folded_attention)


@contextmanager
def folded(config: Any) -> Iterator[None]:
    """Use `folded_attention` in a model that uses sdpa, and nothing else in others; the setting is back afterwards."""
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before
