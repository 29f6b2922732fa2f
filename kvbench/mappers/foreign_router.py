"""The mapper directories of vLLM's semantic router: manifest.json, weights.safetensors, SHA256SUMS.

Layout, schema_version 1: `mapper_id`, `compatibility` (source_model, source_revision, target_model, target_revision, variant, precision, source_tp,
target_tp, head_order, num_kv_heads, head_dim), topk, ridge_alpha, centered_inputs, rope_stripped_on_keys, `source_layers_per_target`
(`{"k": {"0": [...]}, "v": {...}}`), calibration, evaluation_report; tensors `target.{layer}.{k|v}.{W|b}`, W `[topk * kv_heads * head_dim,
kv_heads * head_dim]`, rows and columns in kvbench's own order. One KV geometry serves both models. A manifest lacks the layer counts, RoPE,
tokenizers and weights fingerprints of both models, and R2; the layout of the variant `per_head` and of sharded maps is not published.

Source: `src/training/kv_mapper/{README.md,artifact.py,fit.py,fit_run.py}` of vllm-project/semantic-router.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.foreign_layout import (
    PRECISIONS,
    ForeignMap,
    Side,
    TensorFile,
    check_complete,
    check_source_layers,
    finite,
    part,
    read_json,
    size,
)
from kvbench.storage import verify_sums

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERSION = 1
HEAD_ORDERS = ("contiguous", "hf")
"""Both name the order of the model's own projections: head by head, dimension by dimension."""
UNKNOWN = "unknown"
CALIBRATION = {
    "name": ("dataset", "corpus"),
    "fingerprint": ("token_sha256",),
    "sequences": ("num_sequences",),
    "seq_len": ("seq_len",),
    "stride": ("fitting_token_step",),
    "seed": ("seed",),
}
"""kvbench's names of what the router records of a run, and the router's."""


def read(path: Path, given: Mapping[str, Side], variant: str | None) -> ForeignMap:
    """Read a mapper that the router's `write_artifact` wrote.

    Args:
        path: the directory.
        given: layer counts are checked where the user named the models.
        variant: refused, a directory holds one map.

    Raises:
        BadInputError: no such directory or files, or a variant is asked for.
        ArtifactError: another schema, changed files, a variant of unpublished layout, wrong shapes, missing or impossible layers.
    """
    if variant is not None:
        raise BadInputError(f"--variant {variant} is given, but a router directory holds one map; drop it")
    file = path / MANIFEST
    manifest = read_json(file)
    if str(manifest.get("format", "")).startswith("kvbench"):
        raise BadInputError(f"'{path}' is a kvbench artifact already; use it as it is")
    if manifest.get("schema_version", VERSION) != VERSION or "compatibility" not in manifest:
        raise ArtifactError(
            f"'{file}' has schema_version {manifest.get('schema_version')!r} and the entries {', '.join(sorted(manifest)) or 'none'}; "
            f"a router manifest has schema_version {VERSION}, mapper_id, compatibility, source_layers_per_target"
        )
    verify_sums(path, only=(MANIFEST, WEIGHTS))
    said = part(manifest, file, "compatibility", kind=dict)
    _refuse_unpublished(said, file)
    heads, dim = size(manifest, file, "compatibility", "num_kv_heads"), size(manifest, file, "compatibility", "head_dim")
    precision = PRECISIONS.get(str(said.get("precision")), str(said.get("precision")))
    sides = {
        role: Side(
            part(manifest, file, "compatibility", f"{role}_model", kind=str),
            _stated(part(manifest, file, "compatibility", f"{role}_revision", kind=str)),
            None,
            heads,
            dim,
            dtype=precision,
        )
        for role in ("source", "target")
    }
    lists = part(manifest, file, "source_layers_per_target", kind=dict)
    asked = {role: given[role].layers if role in given else None for role in ("source", "target")}
    chosen = {kind: _layers(file, lists, kind, asked["source"], asked["target"]) for kind in ("k", "v")}
    tensors = _tensors(path, chosen, heads, dim)
    content = part(manifest, file, "rope_stripped_on_keys", kind=bool)
    data = manifest.get("calibration") if isinstance(manifest.get("calibration"), dict) else {}
    return ForeignMap(
        sides["source"],
        sides["target"],
        chosen["k"],
        chosen["v"],
        tensors,
        rotated=not content,
        settings={"k": manifest.get("topk"), "lambda_": manifest.get("ridge_alpha"), "content_space": content},
        calibration=_calibration(data or {}),
        statements={**{key: value for key, value in manifest.items() if key != "source_layers_per_target"}},
    )


def _stated(revision: str) -> str | None:
    return None if revision.strip() in ("", UNKNOWN) else revision


def _refuse_unpublished(said: Mapping[str, Any], file: Path) -> None:
    for key, known in (("variant", ("full_head",)), ("head_order", HEAD_ORDERS), ("source_tp", (1,)), ("target_tp", (1,))):
        if said.get(key) not in known:
            raise ArtifactError(
                f"'{file}': compatibility.{key} is {said.get(key)!r}, whose tensor layout is not published; kvbench reads {', '.join(map(str, known))}"
            )


def _layers(file: Path, lists: Mapping[str, Any], kind: str, source_layers: int | None, target_layers: int | None) -> list[list[int]]:
    stated = lists.get(kind)
    if not isinstance(stated, dict) or not all(str(name).isdigit() for name in stated):
        raise ArtifactError(f"'{file}': source_layers_per_target.{kind} is {type(stated).__name__}, not source layers by target layer")
    by_layer = {int(name): layers for name, layers in stated.items()}
    count = check_complete(file, by_layer, f"entry in source_layers_per_target.{kind}", target_layers)
    return [check_source_layers(file, i, by_layer[i], source_layers) for i in range(count)]


def _tensors(path: Path, chosen: Mapping[str, list[list[int]]], heads: int, dim: int) -> dict[str, Tensor]:
    file, width = TensorFile(path / WEIGHTS), heads * dim
    if len(chosen["k"]) != len(chosen["v"]):
        raise ArtifactError(f"'{path / MANIFEST}' maps {len(chosen['k'])} layers of keys and {len(chosen['v'])} of values")
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for kind, lists in chosen.items():
        for i, layers in enumerate(lists):
            rows = len(layers) * width
            why = f"k * num_kv_heads * head_dim = {len(layers)} * {heads} * {dim} = {rows} into {heads} * {dim} = {width}"
            expected[f"target.{i}.{kind}.W"], expected[f"target.{i}.{kind}.b"] = ((rows, width), why), ((width,), why)
    file.check(expected)
    return {name: finite(file.path, name, file.get(name)) for name in expected}


def _calibration(data: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the router's run record that kvbench has names for."""
    return {ours: next((data[name] for name in theirs if name in data), None) for ours, theirs in CALIBRATION.items()}


def manifest_of(
    pins: Mapping[str, Mapping[str, Any]],
    layers: list[list[int]],
    recipe: Mapping[str, Any],
    fit: Mapping[str, Any],
    data: Mapping[str, Any],
    dtype: str,
    revisions: Mapping[str, str | None],
) -> dict[str, Any]:
    """manifest.json as the router reads it.

    Args:
        pins: by role, `source` and `target`.
        layers: source layers per target layer, all of one length.
        recipe: of the kvbench manifest.
        fit: of the kvbench manifest.
        data: `calibration` of the kvbench manifest.
        dtype: of the stored tensors, stated where the models' own is unknown.
        revisions: by role, in place of those pinned.

    Raises:
        BadInputError: the router cannot express the pair.
    """
    shapes = [(pins[role]["geometry"]["kv_heads"], pins[role]["geometry"]["head_dim"]) for role in ("source", "target")]
    if shapes[0] != shapes[1]:
        raise BadInputError(
            f"the router's format has one KV geometry for both models, and this map goes from {shapes[0]} to {shapes[1]} (KV heads, head width)"
        )
    short = {long: name for name, long in PRECISIONS.items() if name != "half"}
    stored = str(pins["target"].get("dtype") or dtype)
    if stored not in short:
        raise BadInputError(f"the router knows the precisions fp16, bf16 and fp32, but the target ran in {stored}")
    revision = {role: revisions.get(role) or pins[role].get("revision") or UNKNOWN for role in pins}
    compatibility: dict[str, Any] = {
        "variant": "full_head",
        "precision": short[stored],
        "source_tp": 1,
        "target_tp": 1,
        "head_order": "contiguous",
        "num_kv_heads": shapes[1][0],
        "head_dim": shapes[1][1],
    }
    for role in ("source", "target"):
        compatibility |= {f"{role}_model": pins[role]["name"], f"{role}_revision": revision[role]}
    slug = re.sub(r"[^a-z0-9.]+", "-", "-to-".join(Path(pins[role]["name"]).name.lower() for role in ("source", "target"))).strip("-")
    marks = "-".join(f"{role[0]}{revision[role][:40]}" for role in ("source", "target"))
    return {
        "mapper_id": f"{slug}-full_head-{short[stored]}-tp1-h{shapes[1][0]}-{marks}-b1",
        "compatibility": compatibility,
        "topk": len(layers[0]),
        "ridge_alpha": float(recipe.get("lambda_") or 0.0),
        "centered_inputs": True,
        "rope_stripped_on_keys": not fit["rotated"],
        "source_layers_per_target": {kind: {str(i): chosen for i, chosen in enumerate(layers)} for kind in ("k", "v")},
        # Free-form there: a penalty relative to the Gram diagonal must not pass for an absolute one.
        "calibration": {theirs[0]: data.get(ours) for ours, theirs in CALIBRATION.items()}
        | {"ridge_alpha_kind": recipe.get("lambda_kind", "absolute")},
        "evaluation_report": None,
        "schema_version": VERSION,
    }
