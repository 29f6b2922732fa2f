"""VeloxQuant-MLX (`veloxquant_mlx.transfer`): manifest.json and mapper.safetensors.

Layout, format_version 1: `source`, `target` (n_layers, n_kv_heads, head_dim, rope_theta, rope_traditional, rope_scaling, model_type), `config` (k,
ridge_lambda, n_calib_sequences, calib_seq_len, stride, content_space, dtype), `layers` (target_layer, source_layers, r2_k, r2_v), and tensors
`{layer}.w_k|w_v` `[kv_heads, in_dim, head_dim]` and `{layer}.b_k|b_v` `[kv_heads, head_dim]`. Rows of `w` run over source layers as listed, then
KV head, then head dimension, as kvbench's do; its heads are stacked where kvbench has them side by side. It has no checksums and pins neither
model names nor revisions, tokenizers or weights; its R2 figures are in-sample.

Source: the project's documentation and `veloxquant_mlx/transfer/mapper.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.foreign_layout import (
    ForeignMap,
    Side,
    TensorFile,
    all_finite,
    check_complete,
    check_source_layers,
    finite,
    part,
    read_json,
    size,
)

MANIFEST, WEIGHTS = "manifest.json", "mapper.safetensors"
VERSION = 1


def stack_heads(weight: Tensor, kv_heads: int) -> Tensor:
    """`[in_dim, kv_heads * head_dim]` -> `[kv_heads, in_dim, head_dim]`."""
    return weight.reshape(weight.shape[0], kv_heads, -1).transpose(0, 1).contiguous()


def join_heads(weight: Tensor) -> Tensor:
    """`[kv_heads, in_dim, head_dim]` -> `[in_dim, kv_heads * head_dim]`."""
    return weight.transpose(0, 1).reshape(weight.shape[1], -1).contiguous()


def read(path: Path, given: Mapping[str, Side], variant: str | None) -> ForeignMap:
    """Read a mapper that `CrossModelMapper.save` wrote.

    Args:
        path: the directory.
        given: not needed, the format states both geometries.
        variant: refused, the format has none.

    Raises:
        BadInputError: no such directory or files, or a variant is asked for.
        ArtifactError: another version, wrong shapes, missing or impossible layers, a configuration its own loader refuses.
    """
    if variant is not None:
        raise BadInputError(f"--variant {variant} is given, but a VeloxQuant directory holds one map; drop it")
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest.get("format_version") != VERSION or "config" not in manifest:
        raise ArtifactError(
            f"'{file}' has format_version {manifest.get('format_version')!r} and the entries {', '.join(sorted(manifest)) or 'none'}; "
            f"a VeloxQuant manifest has format_version {VERSION}, source, target, config, layers"
        )
    sides = {role: _side(manifest, file, role) for role in ("source", "target")}
    source, target = sides["source"], sides["target"]
    k = size(manifest, file, "config", "k")
    layers: dict[int, dict[str, Any]] = {}
    for entry in part(manifest, file, "layers", kind=list):
        number = part(entry, file, "target_layer", kind=int) if isinstance(entry, dict) else None
        if number is None or number in layers:
            raise ArtifactError(f"'{file}': entry {entry!r} of 'layers' is no layer, or names one twice")
        layers[number] = entry
    count = check_complete(file, layers, "entry in 'layers'", target.layers)
    chosen = [check_source_layers(file, i, layers[i].get("source_layers"), source.layers) for i in range(count)]
    uneven = next((i for i in range(count) if len(chosen[i]) != k), None)
    if uneven is not None:
        raise ArtifactError(f"'{file}': target layer {uneven} reads {len(chosen[uneven])} source layers, but config.k is {k}")
    tensors = _tensors(path, chosen, source, target)
    content = part(manifest, file, "config", "content_space", kind=bool)
    config = manifest["config"]
    figures = {f"r2_{c}_insample": all_finite([layers[i].get(f"r2_{c}") for i in range(count)]) for c in "kv"}
    return ForeignMap(
        source,
        target,
        chosen,
        [list(layers) for layers in chosen],
        tensors,
        rotated=not content,
        settings={"k": k, "lambda_": config.get("ridge_lambda"), "content_space": content},
        calibration={"sequences": config.get("n_calib_sequences"), "seq_len": config.get("calib_seq_len"), "stride": config.get("stride")},
        figures={name: values for name, values in figures.items() if values is not None},
        statements={"source": manifest["source"], "target": manifest["target"], "config": config},
        notes=("calibration sizes are those of its settings; VeloxQuant does not record the data",),
    )


def _side(manifest: Mapping[str, Any], file: Path, role: str) -> Side:
    spec = part(manifest, file, role, kind=dict)
    for setting in ("rope_traditional", "rope_scaling"):
        if spec.get(setting):
            raise ArtifactError(
                f"'{file}': {role}.{setting} is {spec[setting]!r}, which VeloxQuant itself does not map correctly and refuses to fit; fit it with kvbench"
            )
    theta = part(manifest, file, role, "rope_theta", kind=(int, float))
    counts = {name: size(manifest, file, role, name) for name in ("n_layers", "n_kv_heads", "head_dim")}
    return Side(layers=counts["n_layers"], kv_heads=counts["n_kv_heads"], head_dim=counts["head_dim"], rope_theta=float(theta))


def _tensors(path: Path, chosen: list[list[int]], source: Side, target: Side) -> dict[str, Tensor]:
    file = TensorFile(path / WEIGHTS)
    (source_heads, source_dim), (heads, dim) = source.heads(), target.heads()
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for i, layers in enumerate(chosen):
        rows = len(layers) * source_heads * source_dim
        why = f"k * n_kv_heads * head_dim = {len(layers)} * {source_heads} * {source_dim} = {rows} into {heads} heads of {dim}"
        for kind in "kv":
            expected[f"{i}.w_{kind}"] = ((heads, rows, dim), why)
            expected[f"{i}.b_{kind}"] = ((heads, dim), why)
    file.check(expected)
    tensors = {}
    for i in range(len(chosen)):
        for kind in "kv":
            weight, bias = (finite(file.path, f"{i}.{x}_{kind}", file.get(f"{i}.{x}_{kind}")) for x in "wb")
            tensors[f"target.{i}.{kind}.W"], tensors[f"target.{i}.{kind}.b"] = join_heads(weight), bias.reshape(-1).contiguous()
    return tensors


def manifest_of(
    pins: Mapping[str, Mapping[str, Any]],
    layers: list[list[int]],
    recipe: Mapping[str, Any],
    fit: Mapping[str, Any],
    data: Mapping[str, Any],
    dtype: str,
) -> dict[str, Any]:
    """manifest.json as VeloxQuant reads it. Its dataclasses take no further keys, so what it has no place for goes beside them.

    Args:
        pins: by role, `source` and `target`.
        layers: source layers per target layer, all of one length.
        recipe: of the kvbench manifest.
        fit: of the kvbench manifest.
        data: `calibration` of the kvbench manifest.
        dtype: of the stored tensors.

    Raises:
        BadInputError: VeloxQuant cannot express the pair.
    """
    specs = {role: _spec(role, pin) for role, pin in pins.items()}
    shapes = [(specs[role]["n_kv_heads"], specs[role]["head_dim"]) for role in ("source", "target")]
    if shapes[0] != shapes[1]:
        raise BadInputError(f"VeloxQuant refuses mismatched KV, and this map goes from {shapes[0]} to {shapes[1]} (KV heads, head width)")
    r2 = {kind: fit.get(f"r2_{kind}_insample") or [None] * len(layers) for kind in "kv"}
    return {
        "format_version": VERSION,
        **specs,
        "config": {
            "k": len(layers[0]),
            "ridge_lambda": recipe.get("lambda_") if recipe.get("lambda_kind", "absolute") == "absolute" else None,
            "n_calib_sequences": data.get("sequences"),
            "calib_seq_len": data.get("seq_len"),
            "stride": data.get("stride"),
            "content_space": not fit["rotated"],
            "dtype": dtype,
        },
        "layers": [{"target_layer": i, "source_layers": s, "r2_k": r2["k"][i], "r2_v": r2["v"][i]} for i, s in enumerate(layers)],
    }


def _spec(role: str, pin: Mapping[str, Any]) -> dict[str, Any]:
    geometry, rope = pin["geometry"], pin.get("rope") or {}
    if geometry.get("layers") is None or rope.get("theta") is None:
        raise BadInputError(
            f"VeloxQuant needs the layers and RoPE base of the {role}, which this artifact does not know; import it again with --{role} NAME"
        )
    plain = (
        rope.get("type", "default") == "default"
        and not rope.get("interleaved")
        and rope.get("rotary_dim", geometry["head_dim"]) == geometry["head_dim"]
    )
    if not plain:
        raise BadInputError(f"VeloxQuant knows only the default RoPE over whole heads, but that of the {role} '{pin['name']}' is {rope.get('type')}")
    return {
        "n_layers": geometry["layers"],
        "n_kv_heads": geometry["kv_heads"],
        "head_dim": geometry["head_dim"],
        "rope_theta": rope["theta"],
        "rope_traditional": False,
        "rope_scaling": None,
        "model_type": pin.get("model_type") or "unknown",
    }
