"""The `native` attention-output cosine (docs/diagnostics.md): what the target's attention gives on a mapped prefix, against its own.

Source: arXiv:2608.03893, section 5 (attention-output cosine); the queries are the target's own from a native run over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.calibration.sequences import (
    PairBatch,
    attention_scale,
    layer_window,
    recorded_queries,
    refuse_unusual_attention,
    run_pair,
)
from kvbench.kv.content import ContentKV, RotatedKV
from kvbench.mappers.base import Mapper
from kvbench.mappers.residual_training import attention_output
from kvbench.mappers.sweep import check_prefix
from kvbench.pairs.models import LoadedModel

Mapped = Callable[[int], tuple[Tensor, Tensor]]
"""Target layer -> mapped keys and values of the prefix, `[batch, prefix, kv_heads, head_dim]`."""


def native_attention_cosine(
    target: LoadedModel, content_mapped: Mapped, tokens: NDArray[Any] | Sequence[Sequence[int]], prefix: int, *, rotated: bool = False
) -> Tensor:
    """Cosine between per-head attention outputs over [mapped prefix | native suffix] and over the native cache.

    The target runs natively over the whole sequences; its own queries at the suffix positions read both. Outputs are those before `o_proj`.

    Args:
        target: the model that answers.
        content_mapped: gives one layer of the mapped prefix; keys without RoPE.
        tokens: `[batch, tokens]`, all equally long.
        prefix: tokens of the mapped part.
        rotated: `content_mapped` gives keys with RoPE.

    Returns:
        `[layers]` float64, mean over sequences, suffix positions and query heads.

    Raises:
        BadInputError: no suffix, or a model whose attention is more than a softmax over scaled products.
    """
    refuse_unusual_attention(target)
    rows = [list(map(int, row)) for row in tokens]
    check_prefix(prefix, len(rows[0]))
    with recorded_queries(target) as seen, torch.no_grad():
        native = target.prefill(rows)
    cos, sin = target.rope.cos_sin(native.positions()[:1])
    queries = tuple(target.rope.apply(seen[layer], cos, sin) for layer in range(target.layers))
    return cosine_of(target, content_mapped, native, queries, prefix, rotated=rotated)


@torch.no_grad()
def cosine_of(target: LoadedModel, content_mapped: Mapped, native: RotatedKV, queries: Sequence[Tensor], prefix: int, *, rotated: bool) -> Tensor:
    """The same on a native run that was made already, so that several mappers share it.

    Args:
        target: the model that answers.
        content_mapped: gives one layer of the mapped prefix.
        native: the target's cache of the whole sequences.
        queries: per layer `[batch, tokens, query_heads, head_dim]` with RoPE.
        prefix: tokens of the mapped part.
        rotated: `content_mapped` gives keys with RoPE.
    """
    cos, sin = target.rope.cos_sin(native.positions()[:1, :prefix])
    suffix = torch.arange(prefix, native.tokens)
    out = []
    for layer in range(target.layers):
        own_keys, own_values = (t[layer].transpose(1, 2).float() for t in (native.keys, native.values))
        keys, values = content_mapped(layer)
        if not rotated:
            keys = target.rope.apply(keys, cos, sin)
        # As scoring stores them: in the cache dtype.
        keys, values = (t.to(native.keys[layer].dtype).float() for t in (keys, values))
        scale, window = attention_scale(target, layer), layer_window(target, layer)
        wanted = attention_output(queries[layer], own_keys, own_values, suffix, scale, window)
        mixed = [torch.cat([mapped, own[:, prefix:]], dim=1) for mapped, own in ((keys, own_keys), (values, own_values))]
        found = attention_output(queries[layer], mixed[0], mixed[1], suffix, scale, window)
        out.append(torch.nn.functional.cosine_similarity(found, wanted, dim=-1).double().mean().cpu())
    return torch.stack(out)


def prefix_of(content: ContentKV, prefix: int) -> ContentKV:
    """The first tokens of a content."""
    keys, values = ([layer[:, :prefix] for layer in layers] for layers in (content.keys, content.values))
    return ContentKV(keys, values, content.positions[:, :prefix], content.lengths.clamp_max(prefix))


class AttentionJudge:
    """Native attention-output cosine on held-out sequences, for several mappers at a time.

    Args:
        source: the model that prefills.
        target: the model that answers.
        tokens: `[sequences, tokens]`.
        prefix: tokens of the mapped part.
        batch_size: sequences per batch.

    Raises:
        BadInputError: no suffix, or unusual attention.
    """

    def __init__(self, source: LoadedModel, target: LoadedModel, tokens: NDArray[Any], prefix: int, *, batch_size: int = 4) -> None:
        refuse_unusual_attention(target)
        check_prefix(prefix, tokens.shape[1])
        self.source, self.target, self.tokens, self.prefix, self.batch_size = source, target, tokens, prefix, batch_size

    def __call__(self, mappers: Sequence[Mapper]) -> list[dict[str, float]]:
        """Mean over layers, and the worst layer."""
        layers = self.per_layer(mappers)
        return [{"native attention cosine": float(cosine.mean()), "native attention cosine, worst layer": float(cosine.min())} for cosine in layers]

    def per_layer(self, mappers: Sequence[Mapper]) -> list[Tensor]:
        """`[layers]` for each mapper."""
        sums = [torch.zeros(self.target.layers, dtype=torch.float64) for _ in mappers]
        for first in range(0, len(self.tokens), self.batch_size):
            rows = self.tokens[first : first + self.batch_size]
            batches: dict[bool, tuple[PairBatch, ContentKV]] = {}
            for i, mapper in enumerate(mappers):
                if mapper.rotated not in batches:
                    where = f"held-out sequence {first}"
                    batch = run_pair(self.source, self.target, rows, queries=True, strip=not mapper.rotated, where=where)
                    batches[mapper.rotated] = batch, prefix_of(batch.source, self.prefix)
                batch, source = batches[mapper.rotated]

                def mapped(layer: int, mapper: Mapper = mapper, source: ContentKV = source) -> tuple[Tensor, Tensor]:
                    return mapper.map_layer(source, layer)

                cosine = cosine_of(self.target, mapped, batch.target_rotated, batch.queries, self.prefix, rotated=mapper.rotated)
                sums[i] += cosine * len(rows)
        return [total / len(self.tokens) for total in sums]
