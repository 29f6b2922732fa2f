"""Operations and bytes of every phase, counted from shapes. Formulas: docs/latency.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel


@dataclass(frozen=True)
class Work:
    """What a phase must do at least.

    Attributes:
        operations: floating-point operations of its matrix products (a multiply-add is two).
        bytes_moved: bytes read or written at least once: weights, caches in, caches out.
    """

    operations: int
    bytes_moved: int

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes_moved + other.bytes_moved)


@dataclass(frozen=True)
class ModelSize:
    """The figures of a model that decide its work.

    Attributes:
        body_parameters: entries of all matrices of the blocks that one token uses.
        body_bytes: bytes of the blocks.
        head_parameters: entries of the output embedding.
        layers: blocks.
        query_width: query heads times head width.
        kv_width: KV heads times head width.
        element_bytes: of the cache.
        inner: widest matrix, as (inner, columns).
    """

    body_parameters: int
    body_bytes: int
    head_parameters: int
    layers: int
    query_width: int
    kv_width: int
    element_bytes: int
    inner: tuple[int, int]

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_width * self.element_bytes


def size_of(model: LoadedModel) -> ModelSize:
    """Read the sizes from a loaded model; experts that a token does not use are not its work."""
    config = model.config
    experts = next((int(n) for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, None))), 0)
    share = int(getattr(config, "num_experts_per_tok", 0) or 0) / experts if experts else 1.0
    used, held = 0.0, 0
    widest = (1, 1)
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            held += parameter.numel() * parameter.element_size()
            if parameter.dim() >= 2:
                used += parameter.numel() * (share if "experts" in name else 1.0)
        for module in block.modules():
            if isinstance(module, nn.Linear) and module.weight.numel() > widest[0] * widest[1]:
                widest = (module.in_features, module.out_features)
    head = model.model.get_output_embeddings().weight
    return ModelSize(
        body_parameters=round(used),
        body_bytes=held,
        head_parameters=head.numel(),
        layers=model.layers,
        query_width=int(config.num_attention_heads) * model.head_dim,
        kv_width=model.kv_heads * model.head_dim,
        element_bytes=torch.finfo(model.dtype).bits // 8,
        inner=widest,
    )


def prefill(size: ModelSize, tokens: int, batch: int, *, behind: int = 0, head_positions: int = 0) -> Work:
    """The body of a model over new tokens.

    `2 * batch * tokens * body parameters`, attention `4 * query width * pairs` per layer with `tokens * behind + tokens (tokens + 1) / 2`
    visible (query, key) pairs per row, and `2 * head parameters` per position that gets logits. Weights are read once, the cache behind is read
    once and the new one written once.

    Args:
        size: the model.
        tokens: new tokens per row.
        batch: rows.
        behind: cached tokens that they attend to.
        head_positions: positions per row whose logits are computed.
    """
    pairs = tokens * behind + tokens * (tokens + 1) // 2
    operations = batch * (2 * tokens * size.body_parameters + 4 * size.layers * size.query_width * pairs + 2 * head_positions * size.head_parameters)
    moved = size.body_bytes + batch * (tokens + behind) * size.cache_bytes_per_token
    if head_positions:
        moved += size.head_parameters * size.element_bytes
    return Work(operations, moved)


def mapping(mapper: Mapper, source: ModelSize, target: ModelSize, tokens: int, batch: int) -> Work:
    """The matrix products of a mapper: `2 * tokens * multiply-adds per token`; source content and weights read once, mapped content written once."""
    rows = tokens * batch
    weights = mapper.parameters() * target.element_bytes
    return Work(2 * rows * mapper.cost_per_token(), weights + rows * (source.cache_bytes_per_token + target.cache_bytes_per_token))


def stripping(source: ModelSize, tokens: int, batch: int) -> Work:
    """Keys are read in the cache dtype and written in float32."""
    entries = source.layers * source.kv_width * tokens * batch
    return Work(0, entries * (source.element_bytes + 4))


def rotating(target: ModelSize, tokens: int, batch: int) -> Work:
    """Mapped keys are read in the cache dtype and written in float32."""
    entries = target.layers * target.kv_width * tokens * batch
    return Work(0, entries * (target.element_bytes + 4))


def injecting(target: ModelSize, tokens: int, batch: int) -> Work:
    """Keys and values are read and written once."""
    return Work(0, 2 * tokens * batch * target.cache_bytes_per_token)


def transferring(mapper: Mapper, source: ModelSize, target: ModelSize, tokens: int, batch: int) -> Work:
    """Strip to inject in one: with everything fused, the source cache and the weights are read once and the target cache is written once."""
    return mapping(mapper, source, target, tokens, batch)
