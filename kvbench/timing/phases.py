"""The pieces of work that are timed: one function per phase group, each returning the seconds of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvbench.kv.capture import to_content
from kvbench.kv.content import RotatedKV
from kvbench.kv.inject import PrefixCache
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel, Query
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine
from kvbench.timing.clock import Stopwatch

PLAIN_PHASES = ("strip", "map", "rotate", "inject")


@dataclass(frozen=True)
class Context:
    """The same random tokens for both models and all arms.

    Attributes:
        source: the model that prefills.
        target: the model that answers.
        ids: `[batch, tokens]` token ids.
        hold_back: last tokens that the target runs itself after a transfer.
    """

    source: LoadedModel
    target: LoadedModel
    ids: Tensor
    hold_back: int

    @property
    def batch(self) -> int:
        """Rows."""
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        """Context tokens."""
        return int(self.ids.shape[1])

    @property
    def prefix(self) -> int:
        """Transferred tokens."""
        return self.tokens - self.hold_back

    def rows(self) -> list[list[int]]:
        """The transferred prefix as the engine takes it."""
        found: list[list[int]] = self.ids[:, : self.prefix].tolist()
        return found

    def watch(self) -> Stopwatch:
        """A clock that waits for every device of both models."""
        return Stopwatch(*dict.fromkeys([*self.source.devices, *self.target.devices]))


def _body(model: LoadedModel, ids: Tensor) -> Tensor:
    """Hidden states of a plain transformers forward of the body, its cache filled as an answering model needs it."""
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
    hidden: Tensor = model.decoder(input_ids=ids, position_ids=positions, cache=DynamicCache(), use_cache=True).last_hidden_state
    return hidden


def _first_token(model: LoadedModel, hidden: Tensor) -> Tensor:
    """The most likely next token from the last hidden state."""
    return model.logits(hidden[:, -1]).argmax(-1)


@torch.no_grad()
def re_prefill(context: Context) -> list[float]:
    """The target over the whole context, then logits of the last position: [body, first logits]."""
    watch = context.watch()
    hidden = _body(context.target, context.ids)
    watch.split()
    _first_token(context.target, hidden)
    watch.split()
    return watch.splits


@torch.no_grad()
def prefill_with_head(context: Context) -> list[float]:
    """The target's plain forward, logits at every position."""
    ids = context.ids.to(context.target.device)
    watch = context.watch()
    context.target.model(input_ids=ids, cache=DynamicCache(), use_cache=True)
    watch.split()
    return watch.splits


@torch.no_grad()
def source_prefill(context: Context) -> list[float]:
    """The source over the prefix, without its head."""
    rows = context.rows()
    watch = context.watch()
    context.source.prefill(rows)
    watch.split()
    return watch.splits


@torch.no_grad()
def transfer(context: Context, arm: Arm, engine: TransferEngine, kv: RotatedKV) -> list[float]:
    """Strip, map, rotate and inject as the engine does it, then the held-back tokens: [transfer, first token].

    The target's cache is allocated inside: whoever transfers has to.
    """
    watch = context.watch()
    cache = context.target.cache_for(context.batch, context.tokens, context.prefix)
    engine.map_into(cache, slice(0, context.batch), 0, arm, context.target, kv, context.source)
    watch.split()
    answer(context, cache)
    watch.split()
    return watch.splits


@torch.no_grad()
def answer(context: Context, cache: PrefixCache) -> Tensor:
    """Run the held-back tokens behind the prefix and take the first token."""
    device = context.target.device
    held = context.ids[:, context.prefix :].to(device)
    positions = torch.arange(context.prefix, context.tokens, device=device).expand(context.batch, -1)
    lengths = torch.full((context.batch,), context.prefix, device=device)
    hidden = context.target.run(cache, Query(held, positions, torch.zeros_like(held)), 0, lengths, context.prefix)
    return _first_token(context.target, hidden)


@torch.no_grad()
def plain_phases(context: Context, mapper: Mapper, kv: RotatedKV) -> list[float]:
    """The same work one step after the other for all layers, nothing fused: [strip, map, rotate, inject]."""
    target = context.target
    watch = context.watch()
    content = to_content(kv, context.source.rope, strip=not mapper.rotated)
    watch.split()
    mapped = [mapper.map_layer(content, layer) for layer in range(target.layers)]
    watch.split()
    if mapper.rotated:
        keys = [k for k, _ in mapped]
    else:
        cos, sin = target.rope.cos_sin(content.positions[:1])
        keys = [target.rope.apply(k, cos, sin) for k, _ in mapped]
    watch.split()
    cache = target.cache_for(context.batch, context.tokens, context.prefix)
    for layer, rotated, (_, values) in zip(cache.layers, keys, mapped, strict=True):
        layer.keys[:, :, : context.prefix].copy_(rotated.transpose(1, 2))
        layer.values[:, :, : context.prefix].copy_(values.transpose(1, 2))
    watch.split()
    return watch.splits


def paging(mapper: Mapper, device: torch.device, dtype: torch.dtype) -> Callable[[], list[float]]:
    """Bring every tensor of a mapper to the device in the cache dtype, one after the other, none kept."""

    def once() -> list[float]:
        watch = Stopwatch(device)
        for _, tensor in mapper.tensors():
            tensor.to(device=device, dtype=dtype, copy=True)
        watch.split()
        return watch.splits

    return once
