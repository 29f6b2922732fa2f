"""Caches that live through a conversation: rows of unequal length, extended, mapped and answered from, never copied into text again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kv.content import ContentKV, RotatedKV
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel, Query, write_prefix
from kvbench.scoring.arms import Answering, own_prefill
from kvbench.scoring.batching import Tokens
from kvbench.scoring.engine import Costs, FilledPrefixes
from kvbench.scoring.generation import ROOM, GenerationSettings, Prompt, decode


@torch.no_grad()
def extended(model: LoadedModel, kv: RotatedKV | None, prefixes: Sequence[Tokens]) -> RotatedKV:
    """Run what `prefixes` has beyond the cache.

    Args:
        model: whose cache it is.
        kv: cache of the start of each prefix; None for nothing. Rows beyond the prefixes (finished conversations) are dropped.
        prefixes: all tokens that the result is to cover.

    Returns:
        The cache of the prefixes.
    """
    if kv is None:
        return model.prefill(prefixes)
    kv = _first_rows(kv, len(prefixes))
    rows = [prefix[done:] for prefix, done in zip(prefixes, kv.lengths.tolist(), strict=True)]
    width = max(map(len, rows))
    if width == 0:
        return kv
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.long, device=model.device)
    steps = torch.arange(width, device=model.device)
    segments = torch.where(steps < lengths[:, None], 0, -1)
    cache = model.cache_for(len(rows), kv.tokens + width, kv.tokens)
    write_prefix(cache, kv, slice(None), 0)
    model.run(cache, Query(ids, kv.lengths[:, None] + steps, segments), 0, kv.lengths, kv.tokens)
    new = RotatedKV([layer.keys[:, :, kv.tokens :] for layer in cache.layers], [layer.values[:, :, kv.tokens :] for layer in cache.layers], lengths)
    return appended(kv, new)


def appended(kv: RotatedKV, new: RotatedKV) -> RotatedKV:
    """Each row of `new` moved up behind the true tokens of the same row of `kv`."""
    starts, lengths = kv.lengths.tolist(), (kv.lengths + new.lengths).tolist()

    def join(old: Tensor, more: Tensor) -> Tensor:
        out = old.new_zeros(*old.shape[:2], max(lengths), old.shape[3])
        for row, (start, end) in enumerate(zip(starts, lengths, strict=True)):
            out[row, :, :start] = old[row, :, :start]
            out[row, :, start:end] = more[row, :, : end - start]
        return out

    keys = [join(old, more) for old, more in zip(kv.keys, new.keys, strict=True)]
    return RotatedKV(keys, [join(old, more) for old, more in zip(kv.values, new.values, strict=True)], kv.lengths + new.lengths)


def _first_rows(kv: RotatedKV, count: int) -> RotatedKV:
    if len(kv.lengths) == count:
        return kv
    width = int(kv.lengths[:count].max())
    return RotatedKV([k[:count, :, :width] for k in kv.keys], [v[:count, :, :width] for v in kv.values], kv.lengths[:count])


def _behind(kv: RotatedKV, starts: Tensor) -> RotatedKV:
    """The tokens of each row from `starts` on, moved to the left."""
    lengths = kv.lengths - starts
    width = max(1, int(lengths.max()))

    def cut(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(*tensor.shape[:2], width, tensor.shape[3])
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            out[row, :, :length] = tensor[row, :, start : start + length]
        return out

    return RotatedKV([cut(k) for k in kv.keys], [cut(v) for v in kv.values], lengths)


@torch.no_grad()
def mapped(mapper: Mapper, kv: RotatedKV, reader: LoadedModel, writer: LoadedModel, costs: Costs, *, behind: RotatedKV | None = None) -> RotatedKV:
    """The cache of `reader` as a cache of `writer`.

    Args:
        mapper: from reader to writer; it maps token by token.
        kv: cache of the reader.
        reader: the model that made it.
        writer: the model that will read it.
        costs: counts the mapped tokens.
        behind: what was mapped before; only the tokens that it lacks are mapped.
    """
    if behind is None:
        starts = torch.zeros_like(kv.lengths)
    else:
        behind = _first_rows(behind, len(kv.lengths))
        starts = behind.lengths.to(kv.lengths.device)
        kv = _behind(kv, starts)
    costs.mapped += int(kv.lengths.sum())
    positions = starts[:, None] + torch.arange(kv.tokens, device=starts.device)
    cos, sin = reader.rope.cos_sin(positions)
    keys = [k.transpose(1, 2) for k in kv.keys]
    keys = [k.float() if mapper.rotated else reader.rope.strip(k, cos, sin) for k in keys]
    content = ContentKV(keys, [v.transpose(1, 2) for v in kv.values], positions, kv.lengths)
    cos, sin = writer.rope.cos_sin(positions)
    out_keys, out_values = [], []
    for layer in range(writer.layers):
        new_keys, new_values = mapper.map_layer(content, layer)
        if not mapper.rotated:
            new_keys = writer.rope.apply(new_keys, cos, sin)
        out_keys.append(new_keys.to(writer.devices[layer], writer.dtype).transpose(1, 2))
        out_values.append(new_values.to(writer.devices[layer], writer.dtype).transpose(1, 2))
    new = RotatedKV(out_keys, out_values, kv.lengths.to(writer.device))
    return new if behind is None else appended(behind, new)


@torch.no_grad()
def answered(
    role: Answering, model: LoadedModel, stacks: Sequence[tuple[RotatedKV, Sequence[Prompt]]], settings: GenerationSettings
) -> list[list[list[int]]]:
    """Greedy answers behind several batches of caches in one decode loop; the caches stay as they are.

    Args:
        role: of the model, for the bookkeeping.
        model: the model that answers.
        stacks: caches and their prompts; every prompt holds back equally many tokens.
        settings: how to generate.

    Returns:
        Token ids per stack and row.
    """
    prompts = [prompt for _, members in stacks for prompt in members]
    padded = max(kv.tokens for kv, _ in stacks)
    cache = model.cache_for(len(prompts), padded + len(prompts[0].held) + min(ROOM, settings.max_new_tokens), padded)
    start = 0
    for kv, members in stacks:
        write_prefix(cache, kv, slice(start, start + len(members)), 0)
        start += len(members)
    lengths = torch.cat([kv.lengths.to(model.device) for kv, _ in stacks])
    tokens = decode(model, FilledPrefixes((own_prefill(role, model),), cache, 0, padded, lengths), prompts, settings)
    found, start = [], 0
    for _, members in stacks:
        found.append(tokens[start : start + len(members)])
        start += len(members)
    return found
