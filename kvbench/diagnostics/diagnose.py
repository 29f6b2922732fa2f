"""All diagnostics of several mappers in one pass over held-out text. Definitions: docs/diagnostics.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.calibration.sequences import attention_scale, layer_window, recorded_queries, refuse_unusual_attention
from kvbench.diagnostics.agreement import compare_predictions, greedy, greedy_figures, output_inputs, run_behind
from kvbench.diagnostics.concentration import attention_weights, k_concentration, v_concentration
from kvbench.diagnostics.reconstruction import CLASSES, KINDS, Reconstruction, token_classes
from kvbench.errors import BadInputError
from kvbench.kv.capture import finite_or_raise, to_content
from kvbench.kv.content import ContentKV, RotatedKV
from kvbench.kv.inject import PrefixCache
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel, write_prefix
from kvbench.runs.measured import DiagnosticFigure, Diagnostics, LayerDiagnostics, Profile
from kvbench.runs.schema import Role
from kvbench.stats import MIN_CLUSTERS, Interval, paired_bootstrap

Floats = NDArray[np.float64]
Step = Callable[[int, int], None]
SOURCE = "source"
UNITS = {"kl_nats": "nats/token", "nll_difference": "nats/token", "greedy_identical_tokens": "tokens"}


@dataclass(frozen=True)
class DiagnoseSettings:
    """What is diagnosed.

    Attributes:
        prefixes: context tokens, ascending; all but the last of each are mapped.
        suffix: tokens behind the prefix that the target runs and that are scored.
        batch_size: sequences at once.
        greedy_tokens: length of the greedy continuations; 0 leaves them out.
        greedy_sequences: how many sequences are continued.
        seed: of the bootstrap.
        level: coverage of the intervals.
    """

    prefixes: tuple[int, ...] = (512,)
    suffix: int = 512
    batch_size: int = 4
    greedy_tokens: int = 64
    greedy_sequences: int = 16
    seed: int = 0
    level: float = 0.95


class _Arm:
    """What is gathered of one arm at one prefix length."""

    def __init__(self, mapper: Mapper | None, layers: int) -> None:
        self.mapper = mapper
        self.reconstruction = Reconstruction(layers) if mapper is not None else None
        self.scalars: dict[str, list[float]] = {}
        self.by_layer: dict[str, list[Floats]] = {}
        """Name -> per sequence `[layers, query_heads]`."""

    def scalar(self, values: Mapping[str, Floats]) -> None:
        for name, found in values.items():
            self.scalars.setdefault(name, []).extend(float(v) for v in found)

    def layer(self, name: str, batch: Sequence[Tensor]) -> None:
        """One `[batch, query_heads]` per layer."""
        self.by_layer.setdefault(name, []).extend(torch.stack(list(batch), dim=1).double().cpu().numpy())


def diagnose(
    source: LoadedModel,
    target: LoadedModel,
    mappers: Mapping[str, Mapper],
    tokens: NDArray[Any],
    settings: DiagnoseSettings,
    *,
    labels: Mapping[str, str] | None = None,
    fitted: Sequence[str] = (),
    source_baseline: bool = True,
    data: Mapping[str, Any] | None = None,
    progress: Step | None = None,
) -> Diagnostics:
    """Diagnose mappers and controls on held-out sequences.

    Args:
        source: the model that prefills.
        target: the model that answers.
        mappers: arms by name, controls included.
        tokens: `[sequences, tokens]` held-out ids; the first `prefix + suffix` of each are used.
        settings: what is measured.
        labels: artifact or control behind each arm, for the record.
        fitted: arms that are fitted mappers; the others are controls.
        source_baseline: also ask how well the source model's own answers agree with the target's.
        data: where the text comes from, for the record.
        progress: called with work done and work in all.

    Raises:
        BadInputError: a prefix below 2 or beyond the models' positions, sequences too short, an arm called 'source' or 'target', or a model
            whose attention is more than a softmax over scaled products.
    """
    check_settings(source, target, mappers, tokens, settings)
    refuse_unusual_attention(target)
    entries: list[LayerDiagnostics] = []
    done, total = 0, len(settings.prefixes) * len(tokens)
    for prefix in settings.prefixes:
        arms = {name: _Arm(mapper, target.layers) for name, mapper in mappers.items()}
        if source_baseline:
            arms[SOURCE] = _Arm(None, target.layers)
        mass: list[Floats] = []
        for first in range(0, len(tokens), settings.batch_size):
            rows = np.asarray(tokens[first : first + settings.batch_size, : prefix + settings.suffix])
            before = (
                np.asarray(tokens[first - 1 : first, : prefix + settings.suffix]) if first else np.asarray(tokens[-1:, : prefix + settings.suffix])
            )
            _batch(source, target, arms, rows, before, prefix, settings, mass, first)
            done += len(rows)
            if progress is not None:
                progress(done, total)
        classes = token_classes(np.asarray(tokens)[:, : prefix - 1], np.stack(mass))
        for name, arm in arms.items():
            role: Role = "source" if arm.mapper is None else "mapper" if name in fitted else "control"
            entries.append(_entry(name, role, (labels or {}).get(name), arm, prefix, classes, settings))
    recorded: dict[str, Any] = {**asdict(settings), "prefixes": list(settings.prefixes), "sequences": len(tokens), "dtype": str(target.dtype)}
    recorded |= {"device": str(target.device), "attention": target.attention_backend}
    return Diagnostics(source=source.name, target=target.name, data=dict(data or {}), settings=recorded, mappers=tuple(entries))


def check_settings(source: LoadedModel, target: LoadedModel, mappers: Mapping[str, Mapper], tokens: NDArray[Any], settings: DiagnoseSettings) -> None:
    """Refuse what cannot be measured before anything runs.

    Raises:
        BadInputError: see `diagnose`.
    """
    if not mappers:
        raise BadInputError("no mapper to diagnose; name one with --mapper")
    for name in ("source", "target"):
        if name in mappers:
            raise BadInputError(f"an arm may not be called '{name}'; choose another name for the mapper")
    if not settings.prefixes or min(settings.prefixes) < 2:
        raise BadInputError(f"prefixes {settings.prefixes}; each needs at least 2 tokens, one to map and one that the target runs itself")
    if settings.suffix < 1 or settings.batch_size < 1 or settings.greedy_tokens < 0 or settings.greedy_sequences < 0:
        raise BadInputError(
            f"suffix {settings.suffix}, batch size {settings.batch_size}, {settings.greedy_tokens} greedy tokens; they must be positive"
        )
    longest = max(settings.prefixes) + max(settings.suffix, settings.greedy_tokens)
    reach = min(int(model.config.max_position_embeddings) for model in (source, target))
    if longest > reach:
        raise BadInputError(
            f"prefix {max(settings.prefixes)} and {longest - max(settings.prefixes)} tokens behind it exceed the {reach} positions of the pair; choose shorter ones"
        )
    if len(tokens) < 1 or tokens.shape[1] < max(settings.prefixes) + settings.suffix:
        raise BadInputError(
            f"the text gives {len(tokens)} sequences of {tokens.shape[1] if len(tokens) else 0} tokens, but prefix {max(settings.prefixes)} and suffix "
            f"{settings.suffix} need {max(settings.prefixes) + settings.suffix}; give more text or shorter ones"
        )


@torch.no_grad()
def _batch(
    source: LoadedModel,
    target: LoadedModel,
    arms: Mapping[str, _Arm],
    rows: NDArray[Any],
    before: NDArray[Any],
    prefix: int,
    settings: DiagnoseSettings,
    mass: list[Floats],
    first: int,
) -> None:
    """All arms on some sequences, one layer in memory at a time besides the caches."""
    mapped, ids = prefix - 1, rows.tolist()
    where = f"held-out sequence {first}"
    from_source = source.prefill([row[:mapped] for row in ids])
    finite_or_raise(from_source, source.name, where)
    with recorded_queries(target) as seen:
        native = target.prefill(ids)
    finite_or_raise(native, target.name, where)
    contents = _Contents(source, target, from_source, native, mapped, before)
    room = 1 + max(settings.suffix, settings.greedy_tokens)
    own = target.cache_for(len(rows), mapped + room, mapped)
    write_prefix(own, _cut(native, mapped), slice(None), 0)
    caches = {name: target.cache_for(len(rows), mapped + room, mapped) for name, arm in arms.items() if arm.mapper is not None}
    mass.extend(_layers(target, arms, contents, native, seen, caches, prefix))
    suffix = torch.tensor([row[mapped:] for row in ids], device=target.device)
    wanted = suffix[:, 1:]
    with output_inputs(target) as (recorded, _):
        hidden = run_behind(target, own, suffix, mapped)
    reference = [recorded[layer] for layer in range(target.layers)]
    continued = max(0, min(len(rows), settings.greedy_sequences - first)) if settings.greedy_tokens else 0
    said = greedy(target, _rows(own, continued), suffix[:continued, 0], mapped, settings.greedy_tokens) if continued else None
    for name, arm in arms.items():
        if arm.mapper is None:
            model, cache = source, source.cache_for(len(rows), mapped + room, mapped)
            write_prefix(cache, from_source, slice(None), 0)
            other = run_behind(source, cache, suffix.to(source.device), mapped)
        else:
            model, cache = target, caches[name]
            with output_inputs(target, reference) as (_, cosines):
                other = run_behind(target, cache, suffix, mapped)
            # The held-back token is the first one; the suffix begins behind it.
            arm.layer("attention_cosine_propagated", [cosines[layer][:, 1:].mean(1) for layer in range(target.layers)])
        arm.scalar(compare_predictions(target, hidden[:, :-1], model, other[:, :-1], wanted))
        if said is not None:
            answer = greedy(model, _rows(cache, continued), suffix[:continued, 0], mapped, settings.greedy_tokens)
            arm.scalar(greedy_figures(said, answer))


def _layers(
    target: LoadedModel,
    arms: Mapping[str, _Arm],
    contents: _Contents,
    native: RotatedKV,
    seen: Mapping[int, Tensor],
    caches: Mapping[str, PrefixCache],
    prefix: int,
) -> Floats:
    """Everything that is measured layer by layer; fills the caches on the way. Returns the attention mass on the prefix, `[batch, tokens]`."""
    mapped = prefix - 1
    cos, sin = target.rope.cos_sin(native.positions()[:1])
    suffix = torch.arange(prefix, native.tokens)
    mass = torch.zeros(native.keys[0].shape[0], mapped, dtype=torch.float64)
    gathered: dict[str, dict[str, list[Tensor]]] = {name: {"native": [], "k": [], "v": []} for name in caches}
    for name in caches:
        begun = arms[name].reconstruction
        assert begun is not None
        begun.start()
    for layer in range(target.layers):
        queries = target.rope.apply(seen[layer], cos, sin)
        keys, values = (t[layer].transpose(1, 2).float() for t in (native.keys, native.values))
        stripped = target.rope.strip(keys[:, :mapped], cos[:, :mapped], sin[:, :mapped])
        scale, window = attention_scale(target, layer), layer_window(target, layer)
        weights = attention_weights(queries, keys, suffix, scale, window)
        own = weights @ values.transpose(1, 2)[:, :, None]
        mass += weights[..., :mapped].sum((1, 2, 3)).double().cpu()
        for name, cache in caches.items():
            arm = arms[name]
            assert arm.mapper is not None
            assert arm.reconstruction is not None
            new_keys, new_values = arm.mapper.map_layer(contents.of(arm.mapper), layer)
            turned = new_keys.float() if arm.mapper.rotated else target.rope.apply(new_keys, cos[:, :mapped], sin[:, :mapped])
            # As scoring stores them: in the cache dtype.
            turned, new_values = (t.to(native.keys[layer].dtype) for t in (turned, new_values))
            cache.layers[layer].keys[:, :, :mapped].copy_(turned.transpose(1, 2))
            cache.layers[layer].values[:, :, :mapped].copy_(new_values.transpose(1, 2))
            turned, new_values = turned.float(), new_values.float()
            plain = target.rope.strip(turned, cos[:, :mapped], sin[:, :mapped])
            for kind, found, wanted in (
                ("keys", plain, stripped),
                ("keys_rotated", turned, keys[:, :mapped]),
                ("values", new_values, values[:, :mapped]),
            ):
                arm.reconstruction.add(kind, found, wanted)
            mixed_keys, mixed_values = (torch.cat([new, old[:, mapped:]], dim=1) for new, old in ((turned, keys), (new_values, values)))
            output = attention_weights(queries, mixed_keys, suffix, scale, window) @ mixed_values.transpose(1, 2)[:, :, None]
            kept = gathered[name]
            kept["native"].append(torch.nn.functional.cosine_similarity(output, own, dim=-1).double().mean(-1).flatten(1))
            kept["k"].append(k_concentration(turned - keys[:, :mapped], queries[:, suffix]))
            kept["v"].append(v_concentration(new_values - values[:, :mapped], weights[..., :mapped]))
    for name, kept in gathered.items():
        arm = arms[name]
        assert arm.reconstruction is not None
        arm.reconstruction.finish()
        arm.layer("attention_cosine_native", kept["native"])
        arm.layer("k_concentration", kept["k"])
        arm.layer("v_concentration", kept["v"])
    return np.asarray(mass.numpy())


class _Contents:
    """What mappers read, made when first asked for."""

    def __init__(
        self, source: LoadedModel, target: LoadedModel, from_source: RotatedKV, native: RotatedKV, mapped: int, before: NDArray[Any]
    ) -> None:
        self.source, self.target, self.from_source, self.native, self.mapped, self.before = source, target, from_source, native, mapped, before
        self._made: dict[tuple[str, bool], ContentKV] = {}

    def of(self, mapper: Mapper) -> ContentKV:
        """The content that a mapper reads: the source's, the target's own, or the target's of the sequence before."""
        key = (mapper.reads, mapper.rotated)
        if key not in self._made:
            model, kv = (self.source, self.from_source) if mapper.reads == "source" else (self.target, _cut(self.native, self.mapped))
            if mapper.reads == "shuffled":
                other = self.target.prefill([row[: self.mapped] for row in self.before.tolist()])
                keys, values = (
                    [torch.cat([o, t[:-1]]) for o, t in zip(a, b, strict=True)] for a, b in ((other.keys, kv.keys), (other.values, kv.values))
                )
                kv = RotatedKV(keys, values, kv.lengths)
            self._made[key] = to_content(kv, model.rope, strip=not mapper.rotated)
        return self._made[key]


def _cut(kv: RotatedKV, tokens: int) -> RotatedKV:
    """The first tokens of a cache."""
    keys, values = ([layer[:, :, :tokens] for layer in part] for part in (kv.keys, kv.values))
    return RotatedKV(keys, values, kv.lengths.clamp_max(tokens))


def _rows(cache: PrefixCache, count: int) -> PrefixCache:
    """The first rows of a cache, sharing its memory."""
    from kvbench.kv.inject import PrefixLayer

    return PrefixCache([PrefixLayer(layer.keys[:count], layer.values[:count], layer.filled) for layer in cache.layers])


def _entry(
    name: str, role: Role, label: str | None, arm: _Arm, prefix: int, classes: NDArray[np.int64], settings: DiagnoseSettings
) -> LayerDiagnostics:
    """Averages, intervals and profiles of one arm."""
    rng = np.random.default_rng([settings.seed, prefix])
    figures: list[DiagnosticFigure] = []
    layers: list[Profile] = []
    by_position: list[Profile] = []
    by_class: list[Profile] = []
    cosines: dict[str, tuple[float | None, ...]] = {}
    found = arm.reconstruction
    if found is not None:
        for kind in KINDS:
            heads, sequences = found.r2(kind)
            figures.append(_figure(f"r2_{kind}", [sequences], _first, rng, settings))
            layers.append(_profile(f"r2_{kind}", heads))
            heads, error, square = found.relative_error(kind)
            figures.append(_figure(f"relative_error_{kind}", [error, square], _root_ratio, rng, settings))
            layers.append(_profile(f"relative_error_{kind}", heads))
            heads, sequences = found.cosine(kind)
            figures.append(_figure(f"cosine_{kind}", [sequences], _first, rng, settings))
            layers.append(_profile(f"cosine_{kind}", heads))
            if kind != "keys_rotated":
                # Rotation changes no length, so the error by token is the same with and without it.
                at, values, counts = found.by_position(kind)
                by_position.append(Profile(name=f"relative_error_{kind}", at=tuple(at), values=tuple(values), n=tuple(counts)))
                shares, counts = found.by_class(kind, classes)
                by_class.append(Profile(name=f"relative_error_{kind}", at=CLASSES, values=tuple(shares), n=tuple(counts)))
    for which, gathered in arm.by_layer.items():
        stacked = np.stack(gathered)
        layers.append(_profile(which, _nanmean(stacked, 0)))
        figures.append(_figure(which, [_nanmean(stacked, (1, 2))], _first, rng, settings))
        if which.startswith("attention_cosine"):
            per_layer = stacked.mean((0, 2))
            cosines[which] = tuple(float(v) for v in per_layer)
            worst = int(per_layer.argmin())
            # The layer is chosen on all sequences, so its interval is that of this layer, not of a minimum.
            figures.append(_figure(f"{which}_worst_layer", [stacked[:, worst].mean(1)], _first, rng, settings))
    for which, numbers in arm.scalars.items():
        figures.append(_figure(which, [np.array(numbers)], _first, rng, settings))
    top1 = arm.scalars.get("top1_agreement", [])
    return LayerDiagnostics(
        arm=name,
        role=role,
        mapper=label,
        prefix=prefix,
        sequences=len(classes),
        positions=settings.suffix,
        figures=tuple(figures),
        layers=tuple(layers),
        by_position=tuple(by_position),
        by_class=tuple(by_class),
        cosine_native=cosines.get("attention_cosine_native"),
        cosine_propagated=cosines.get("attention_cosine_propagated"),
        next_token_agreement=float(np.mean(top1)) if top1 else None,
    )


def _figure(
    name: str, columns: list[Floats], statistic: Callable[[Floats], Floats], rng: np.random.Generator, settings: DiagnoseSettings
) -> DiagnosticFigure:
    unit, n = UNITS.get(name, ""), len(columns[0])
    if any(np.isnan(column).any() for column in columns):
        why = "there is no error whose place could be asked for" if "concentration" in name else "a layer's coordinates do not vary"
        return DiagnosticFigure(name=name, n=n, unit=unit, reason=why)
    value = float(statistic(np.array([column.mean() for column in columns])))
    if all(float(np.ptp(column)) == 0 for column in columns):
        return DiagnosticFigure(name=name, value=value, lower=value, upper=value, n=n, unit=unit, reason="the same in every sequence")
    bounds = paired_bootstrap(columns, statistic, rng=rng, level=settings.level, min_items=MIN_CLUSTERS, resamples=2_000)
    if isinstance(bounds, Interval):
        return DiagnosticFigure(name=name, value=value, lower=bounds.lower, upper=bounds.upper, n=n, unit=unit)
    return DiagnosticFigure(name=name, value=value, n=n, unit=unit, reason=bounds.reason)


def _profile(name: str, heads: Floats) -> Profile:
    """By layer and head, `[layers, heads]`."""
    per_layer = _nanmean(heads, 1)
    return Profile(
        name=name,
        at=tuple(str(i) for i in range(len(heads))),
        values=tuple(_or_none(v) for v in per_layer),
        heads=tuple(tuple(_or_none(v) for v in row) for row in heads),
    )


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _nanmean(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    defined = ~np.isnan(values)
    count = defined.sum(axis=axis)
    return np.asarray(np.where(count > 0, np.where(defined, values, 0.0).sum(axis=axis) / np.maximum(count, 1), np.nan))


def _first(means: Floats) -> Floats:
    return np.asarray(means[..., 0])


def _root_ratio(means: Floats) -> Floats:
    return np.asarray(np.sqrt(means[..., 0] / means[..., 1]))
