"""kvxfer's stored maps (`scripts/fit_maps.py --out maps/<pair>`): maps.json and one `.pt` file per variant and kind.

Known, from `kvxfer/mapstore.py` of puneethgv/kvxfer: `maps.json` (source, target, settings, n_fit_tokens, layer_selection, diagnostics, variants) and
`{variant}__keys.pt`, `{variant}__values.pt`, each a pickled `{target layer: {weight, bias, source_layers, target_layer, r2, rank, factors}}`, with
`weight` `[k * kv_heads * head_dim, target kv_heads * head_dim]` or, where it is None, `factors` `([.., rank], [rank, ..])`; rows run over source
layers as listed, then KV head, then head dimension, as kvbench's do. Keys and values choose their source layers separately.

Not stored: KV heads, head width and layer counts of either model (so both models have to be named), RoPE, revisions, tokenizers, fingerprints,
seed and text of the calibration, a format version, checksums. The trained residual (`train_residual.py`) is another, non-linear object, not read here.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.foreign_layout import ForeignMap, Side, all_finite, check_complete, check_shape, check_source_layers, finite, part, read_json

MANIFEST = "maps.json"
KINDS = {"k": "keys", "v": "values"}
EXPECTED = "maps.json, <variant>__keys.pt and <variant>__values.pt, as kvxfer's fit_maps.py writes them"


def read(path: Path, given: Mapping[str, Side], variant: str | None) -> ForeignMap:
    """Read one variant of a directory that `save_maps` wrote. Pickles are opened for tensors and plain values only; no code in them runs.

    Args:
        path: the directory.
        given: geometry of both models, which the format does not store.
        variant: which map, where there are several.

    Raises:
        BadInputError: no such directory, a model is not named, or the variant is unknown.
        ArtifactError: wrong shapes, missing or impossible layers, a file that is not what it should be.
    """
    if not (path / MANIFEST).is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise BadInputError(f"'{path}' holds {found}; expected {EXPECTED}")
    file = path / MANIFEST
    manifest = read_json(file)
    names = part(manifest, file, "variants", kind=list)
    if variant is None and len(names) == 1:
        variant = str(names[0])
    if variant not in names:
        asked = f"--variant {variant} is not among them" if variant else "choose one with --variant"
        raise BadInputError(f"'{path}' holds the maps {', '.join(map(str, names)) or 'none'}; {asked}")
    missing = [role for role in ("source", "target") if role not in given]
    if missing:
        raise BadInputError(
            f"kvxfer's maps do not say how many KV heads the models have; name them: --source {manifest.get('source', 'NAME')} --target {manifest.get('target', 'NAME')}"
        )
    tensors: dict[str, Tensor] = {}
    chosen: dict[str, list[list[int]]] = {}
    for kind, word in KINDS.items():
        found_tensors, chosen[kind] = _one_kind(path / f"{variant}__{word}.pt", kind, given["source"], given["target"])
        tensors |= found_tensors
    settings = manifest["settings"] if isinstance(manifest.get("settings"), dict) else {}
    diagnosed = manifest["diagnostics"].get(variant, {}) if isinstance(manifest.get("diagnostics"), dict) else {}
    figures = {}
    for kind, word in KINDS.items():
        by_layer = diagnosed.get(word) or {}
        for ours, theirs in (("heldout", "held_out_r2"), ("insample", "in_sample_r2")):
            values = all_finite([(by_layer.get(str(i)) or {}).get(theirs) for i in range(len(chosen[kind]))])
            if values is not None:
                figures[f"r2_{kind}_{ours}"] = values
    return ForeignMap(
        Side(manifest.get("source")),
        Side(manifest.get("target")),
        chosen["k"],
        chosen["v"],
        tensors,
        rotated=False,
        settings={"k": settings.get("k"), "lambda_": settings.get("lam"), "variant": variant},
        calibration={"rows": manifest.get("n_fit_tokens")},
        figures=figures,
        statements={"settings": settings, "variants": names, "penalties": diagnosed.get("lambda"), "rank": diagnosed.get("rank")},
        notes=("penalties may differ by kind, see the statements",) if diagnosed.get("lambda") else (),
    )


def _one_kind(path: Path, kind: str, source: Side, target: Side) -> tuple[dict[str, Tensor], list[list[int]]]:
    if not path.is_file():
        raise BadInputError(f"'{path.parent}' has no {path.name}; expected {EXPECTED}")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(f"'{path}' cannot be read as tensors and plain values: {reason}; fit the maps again with kvxfer's fit_maps.py") from error
    if not isinstance(stored, dict) or not all(type(layer) is int and isinstance(state, dict) for layer, state in stored.items()):
        raise ArtifactError(f"'{path}' is not a map per target layer; expected {EXPECTED}")
    count = check_complete(path, stored, "map", target.layers)
    chosen = [check_source_layers(path, i, stored[i].get("source_layers"), source.layers) for i in range(count)]
    tensors: dict[str, Tensor] = {}
    for i in range(count):
        for name, tensor in _layer(path, i, stored[i], len(chosen[i]), source, target).items():
            tensors[f"target.{i}.{kind}.{name}"] = tensor
    return tensors, chosen


def _layer(path: Path, layer: int, state: Mapping[str, Any], k: int, source: Side, target: Side) -> dict[str, Tensor]:
    (source_heads, source_dim), (heads, dim) = source.heads(), target.heads()
    rows, width = k * source_heads * source_dim, heads * dim
    why = f"k * KV heads * head width = {k} * {source_heads} * {source_dim} = {rows} into {heads} * {dim} = {width}"
    factors = state.get("factors")
    shapes: dict[str, tuple[int, ...]]
    if state.get("weight") is not None:
        parts, shapes = {"W": state["weight"]}, {"W": (rows, width)}
    elif isinstance(factors, list | tuple) and len(factors) == 2 and all(isinstance(f, Tensor) and f.dim() == 2 for f in factors):
        rank = int(factors[0].shape[1])
        parts, shapes = {"A": factors[0], "B": factors[1]}, {"A": (rows, rank), "B": (rank, width)}
    else:
        raise ArtifactError(f"'{path}': target layer {layer} has neither a weight nor two factors")
    parts, shapes = {**parts, "b": state.get("bias")}, {**shapes, "b": (width,)}
    for name, tensor in parts.items():
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        label = {"W": "weight", "A": "factors[0]", "B": "factors[1]", "b": "bias"}[name]
        check_shape(str(path), f"{layer}.{label}", shape, shapes[name], why)
        finite(path, f"{layer}.{label}", tensor)
    return {name: tensor.contiguous() for name, tensor in parts.items()}
