"""Fill one cache per arm from prefixes that each model has prefilled once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.errors import BadInputError
from kvbench.kv.capture import to_content
from kvbench.kv.content import ContentKV, Kind, RotatedKV
from kvbench.kv.inject import PrefixCache, PrefixLayer
from kvbench.kv.kernels import BLOCK_ROWS, BlockContent, token_blocks
from kvbench.kv.rope import Rope
from kvbench.mappers.base import Mapper
from kvbench.mappers.linear import SelectedMapper
from kvbench.pairs.models import LoadedModel, write_prefix
from kvbench.scoring.arms import Answering, Arm
from kvbench.scoring.batching import Tokens, cut

HEADER_BYTES = 1 << 30


@dataclass
class Costs:
    """What a run did and what it saved, in tokens.

    Attributes:
        prefilled: tokens run by each model's prefill.
        saved: tokens that a shared header spared it.
        mapped: tokens mapped, summed over mappers.
        answered: tokens run behind a prefix, summed over arms.
        generated: tokens generated, summed over arms.
        too_short: contexts of at most `hold_back` tokens: nothing to transfer, the answering model runs all of it.
        truncated: contexts cut on the left to fit the position limit.
        contexts: distinct contexts.
    """

    prefilled: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    saved: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    mapped: int = 0
    answered: int = 0
    generated: int = 0
    too_short: int = 0
    truncated: int = 0
    contexts: int = 0

    def add(self, other: Costs) -> None:
        """Count what another has counted."""
        for role in self.prefilled:
            self.prefilled[role] += other.prefilled[role]
            self.saved[role] += other.saved[role]
        for name in ("mapped", "answered", "generated", "too_short", "truncated", "contexts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class FilledPrefixes:
    """Caches of all arms that one model answers, stacked along the batch: arm 0's rows, arm 1's rows, ...

    Attributes:
        arms: the arms, in row order.
        cache: `[arms * batch, ...]` with room behind the prefix.
        header: shared header tokens.
        padded: padded tokens behind the header.
        lengths: `[arms * batch]` true tokens behind the header.
    """

    arms: tuple[Arm, ...]
    cache: PrefixCache
    header: int
    padded: int
    lengths: Tensor

    def take(self, rows: Sequence[int], room: int) -> FilledPrefixes:
        """A copy of some rows, cut to their longest prefix, with room for `room` tokens behind it."""
        chosen = torch.tensor(rows, device=self.lengths.device)
        lengths = self.lengths[chosen]
        padded = max(1, int(lengths.max()))
        filled = self.header + padded
        layers = []
        for layer in self.cache.layers:
            index = chosen.to(layer.keys.device)
            pair = []
            for stored in (layer.keys, layer.values):
                # Behind the prefix nothing is read before it is written, so the room needs no zeros.
                copy = stored.new_empty(len(rows), stored.shape[1], filled + room, stored.shape[3])
                copy[:, :, :filled] = stored[index, :, :filled]
                pair.append(copy)
            layers.append(PrefixLayer(pair[0], pair[1], filled))
        return FilledPrefixes(self.arms, PrefixCache(layers), self.header, padded, lengths)


class TransferEngine:
    """Both models, the arms, and the prefilled headers.

    Args:
        source: the model that prefills; None where no arm needs it.
        target: the model that answers; None where only arm `source` runs.
        arms: what to compare.
        hold_back: last context tokens that the answering model runs itself.
        share_headers: prefill a header that contexts share once.

    Raises:
        BadInputError: an arm needs a model that was not given, or hold_back is below 1.
    """

    def __init__(
        self, source: LoadedModel | None, target: LoadedModel | None, arms: Sequence[Arm], *, hold_back: int = 1, share_headers: bool = True
    ) -> None:
        if hold_back < 1:
            raise BadInputError(f"hold_back = {hold_back}; the answering model must run at least the last context token itself, so it is 1 or more")
        if len({arm.name for arm in arms}) != len(arms):
            raise BadInputError(f"two arms share a name: {', '.join(arm.name for arm in arms)}; name them apart")
        self.models: dict[str, LoadedModel] = {}
        if source is not None:
            self.models["source"] = source
        if target is not None:
            self.models["target"] = target
        self.arms = tuple(arms)
        self.hold_back, self.share_headers = hold_back, share_headers
        self.costs = Costs()
        needed = {arm.answering for arm in arms} | {self._prefiller(arm) for arm in arms}
        if missing := needed - set(self.models):
            raise BadInputError(f"the arms {', '.join(a.name for a in arms)} need the {' and the '.join(sorted(missing))} model; name it")
        self._headers: OrderedDict[tuple[str, str, Tokens], RotatedKV] = OrderedDict()

    @staticmethod
    def _prefiller(arm: Arm) -> Answering:
        return "source" if arm.mapper.reads == "source" else "target"

    def answering(self) -> list[tuple[LoadedModel, tuple[Arm, ...]]]:
        """Each model with the arms it answers."""
        grouped = [(self.models[role], tuple(a for a in self.arms if a.answering == role)) for role in ("target", "source") if role in self.models]
        return [(model, arms) for model, arms in grouped if arms]

    @torch.no_grad()
    def fill(
        self, header: Tokens, prefixes: Sequence[Tokens], others: Sequence[Tokens], *, room: int = 0, at_once: int | None = None
    ) -> list[FilledPrefixes]:
        """Prefill a batch and fill the caches of all arms.

        Args:
            header: common start of all prefixes.
            prefixes: whole prefixes, each starting with `header`; neighbours of like length are prefilled together.
            others: for the control `shuffled`, another prompt's tokens, equally long, for each prefix.
            room: tokens to leave behind the prefix.
            at_once: rows per prefill at most (`kvbench.scoring.batching.cut`); default all.

        Returns:
            One stack per answering model.
        """
        rest = [prefix[len(header) :] for prefix in prefixes]
        batch, padded = len(prefixes), max(1, max(map(len, rest)))
        out = []
        for model, arms in self.answering():
            cache = model.cache_for(batch * len(arms), len(header) + padded + room, len(header) + padded)
            lengths = torch.tensor([len(r) for r in rest] * len(arms), device=model.device)
            out.append(FilledPrefixes(arms, cache, len(header), padded, lengths))
        start = 0
        for size in cut([len(r) for r in rest], at_once) if at_once else [batch]:
            self._fill_chunk(out, header, rest[start : start + size], others[start : start + size], start, batch)
            start += size
        return out

    def _fill_chunk(
        self, stacks: Sequence[FilledPrefixes], header: Tokens, rest: Sequence[Tokens], others: Sequence[Tokens], start: int, batch: int
    ) -> None:
        """Prefill some rows and write them into all arms' caches, from row `start` of each arm."""
        raw: dict[str, RotatedKV] = {}
        content: dict[tuple[str, bool], ContentKV] = {}

        def read(mapper: Mapper) -> ContentKV:
            reads, key = mapper.reads, (mapper.reads, mapper.rotated)
            role = "source" if reads == "source" else "target"
            if reads not in raw:
                # The shuffled prompt shares no header with the row it stands in for.
                rows, shared = (list(others), ()) if reads == "shuffled" else (rest, header)
                raw[reads] = self.models[role].prefill(rows, self._header_kv(role, shared) if shared else None)
                self.costs.prefilled[role] += sum(map(len, rows))
                self.costs.saved[role] += len(shared) * len(rows)
            if key not in content:
                content[key] = to_content(raw[reads], self.models[role].rope, strip=not mapper.rotated)
            return content[key]

        for (model, arms), filled in zip(self.answering(), stacks, strict=True):
            for i, arm in enumerate(arms):
                rows = slice(i * batch + start, i * batch + start + len(rest))
                if arm.mapper.reads == "shuffled":
                    self._write(filled.cache, rows, 0, arm, model, read(arm.mapper))
                    continue
                if header:
                    write_prefix(filled.cache, self._arm_header(arm, model, header), rows, 0)
                self._write(filled.cache, rows, len(header), arm, model, read(arm.mapper))
                self.costs.mapped += sum(map(len, rest)) if arm.transfers else 0

    def _write(self, cache: PrefixCache, rows: slice, start: int, arm: Arm, model: LoadedModel, content: ContentKV) -> None:
        """Map content layer by layer, rotate with the answering model's RoPE, and write it into the cache."""
        cos, sin = model.rope.cos_sin(content.positions[:1])
        width = min(content.tokens, cache.layers[0].filled - start)
        passes: tuple[tuple[Kind, ...], ...] = (("k", "v"),)
        if isinstance(content, BlockContent) and isinstance(arm.mapper, SelectedMapper) and arm.mapper.kinds_apart:
            # First all keys, then all values: half the content is in memory at a time.
            passes = (("k",), ("v",))
        for kinds in passes:
            for layer in range(model.layers):
                for kind, tensor in zip(kinds, _mapped(arm.mapper, content, layer, kinds), strict=True):
                    self._place(
                        cache, rows, slice(start, start + width), layer, kind, tensor[:, :width], None if arm.mapper.rotated else model.rope, cos, sin
                    )
                if isinstance(content, BlockContent) and isinstance(arm.mapper, SelectedMapper):
                    content.forget(arm.mapper.finished(layer))
            if isinstance(content, BlockContent):
                content.release(kinds)

    @staticmethod
    def _place(
        cache: PrefixCache, rows: slice, tokens: slice, layer: int, kind: Kind, tensor: Tensor, rope: Rope | None, cos: Tensor, sin: Tensor
    ) -> None:
        """Write token-major keys (rotated by `rope`, where given) or values into a layer of a cache."""
        target = cache.layers[layer]
        place = (target.keys if kind == "k" else target.values)[rows, :, tokens]
        if kind == "k" and rope is not None:
            rope.apply_into(tensor, cos[:, : tensor.shape[1]], sin[:, : tensor.shape[1]], place)
        else:
            place.copy_(tensor.transpose(1, 2))

    def map_into(self, cache: PrefixCache, rows: slice, start: int, arm: Arm, model: LoadedModel, kv: RotatedKV, reader: LoadedModel) -> None:
        """Strip a cache of `reader`, map it with `arm`, rotate and write it into `cache`: the transfer itself, without any prefill.

        Mappers that treat tokens independently are applied block by block of tokens, so that beside the two caches only a block of
        content is in memory; others see the whole prefix at once.
        """
        strip, mapper = not arm.mapper.rotated, arm.mapper
        if not (isinstance(mapper, SelectedMapper) and mapper.tokenwise):
            self._write(cache, rows, start, arm, model, to_content(kv, reader.rope, strip=strip))
            return
        at_once = BLOCK_ROWS
        if not mapper.weights.resident(model.dtype):
            # Weights that are read again for each block want few blocks, as long as a block stays small beside the caches.
            at_once = max(BLOCK_ROWS, min(4 * BLOCK_ROWS, kv.tokens * kv.keys[0].shape[0] // 8))
        for first, content in token_blocks(kv, reader.rope, strip=strip, rows=at_once):
            self._write(cache, rows, start + first, arm, model, content)

    def _header_kv(self, role: str, header: Tokens) -> RotatedKV:
        """A model's own cache of a header, prefilled once and kept."""
        key = (role, "", header)
        kv = self._recall(key)
        if kv is None:
            kv = self.models[role].prefill([header])
            self.costs.prefilled[role] += len(header)
            self.costs.saved[role] -= len(header)
            self._keep(key, kv)
        return kv

    def _arm_header(self, arm: Arm, model: LoadedModel, header: Tokens) -> RotatedKV:
        """An arm's mapped cache of a header, in the answering model's format, kept."""
        key = (arm.answering, arm.name, header)
        kv = self._recall(key)
        if kv is None:
            role = self._prefiller(arm)
            reader = self.models[role]
            content = to_content(self._header_kv(role, header), reader.rope, strip=not arm.mapper.rotated)
            cache = model.cache_for(1, len(header), len(header))
            self._write(cache, slice(0, 1), 0, arm, model, content)
            self.costs.mapped += len(header) if arm.transfers else 0
            kv = RotatedKV([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers], torch.tensor([len(header)]))
            self._keep(key, kv)
        return kv

    def _recall(self, key: tuple[str, str, Tokens]) -> RotatedKV | None:
        if key in self._headers:
            self._headers.move_to_end(key)
            return self._headers[key]
        return None

    def _keep(self, key: tuple[str, str, Tokens], kv: RotatedKV) -> None:
        self._headers[key] = kv
        held = sum(_bytes(kept) for kept in self._headers.values())
        while held > HEADER_BYTES and len(self._headers) > 1:
            _, dropped = self._headers.popitem(last=False)
            held -= _bytes(dropped)


def _mapped(mapper: Mapper, content: ContentKV, layer: int, kinds: tuple[Kind, ...]) -> tuple[Tensor, ...]:
    if len(kinds) == 1 and isinstance(mapper, SelectedMapper):
        return (mapper.map_kind(content, layer, kinds[0]),)
    return mapper.map_layer(content, layer)


def _bytes(kv: RotatedKV) -> int:
    return sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
