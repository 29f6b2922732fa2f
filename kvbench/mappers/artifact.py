"""A fitted mapper on disk: manifest.json, weights.safetensors, SHA256SUMS. See docs/artifact.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.base import Mapper
from kvbench.storage import FORMAT_VERSION, atomic_directory, dump_json, read_manifest, utc_now, verify_sums, versions


class Manifest(BaseModel):
    """manifest.json of a mapper."""

    model_config = ConfigDict(extra="forbid")

    format: str = "kvbench-mapper"
    """Always `kvbench-mapper`."""
    format_version: int = FORMAT_VERSION
    """Raised when an older kvbench could misread the directory."""
    recipe: dict[str, Any]
    """Method name and every setting."""
    source: dict[str, Any]
    """Pin of the source model: name, revision, fingerprints, geometry, RoPE, dtype."""
    target: dict[str, Any]
    """Pin of the target model."""
    head_order: str = "layer,head,dim"
    """Row and column order of W: source layers as listed, then KV head, then head dimension."""
    calibration: dict[str, Any]
    """Data name, token fingerprint, sequences, stride, rows, seed."""
    fit: dict[str, Any]
    """Source layers per target layer, held-out and in-sample R2 per layer, rows per parameter, seconds."""
    weights_dtype: str
    """dtype of the stored tensors."""
    created: str
    """UTC time of writing."""
    versions: dict[str, str]
    """kvbench, torch, transformers."""
    experimental: bool = False
    """Source and target differ in KV heads or head width, which no published method covers."""
    imported: dict[str, Any] | None = None
    """Where a map that others fitted came from (format, directory), what its manifest said, and notes."""


class DiskStore:
    """Tensors of an artifact, memory-mapped and read one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"'{path}' cannot be read as safetensors: {error}; fetch or fit it again") from error
        self._names = sorted(self._file.keys())  # type: ignore[no-untyped-call]

    def get(self, name: str) -> Tensor:
        """The tensor called `name`."""
        if name not in self._names:
            raise ArtifactError(f"'{self._path}' lacks tensor '{name}'; the artifact does not fit its manifest")
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def names(self) -> list[str]:
        """All names, sorted."""
        return list(self._names)


def caveats(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What every reader of a figure of this mapper must be told: experimental, imported, pins that are unknown."""
    told = {}
    if manifest.get("experimental"):
        shapes = (f"{g['kv_heads']} x {g['head_dim']}" for g in (manifest[role]["geometry"] for role in ("source", "target")))
        told["experimental"] = (
            f"mismatched KV, {' -> '.join(shapes)} (KV heads x head width); no published method covers it, trust held-out results only"
        )
    if manifest.get("imported"):
        told["imported from"] = str(manifest["imported"]["format"])
        data = sorted(key for key in ("name", "fingerprint", "rows", "seed") if manifest["calibration"].get(key) is None)
        unknown = [f"{role} {name}" for role in ("source", "target") for name in manifest[role].get("unknown", ())] + [
            f"calibration {key}" for key in data
        ]
        if unknown:
            told["unknown"] = ", ".join(unknown)
    return told


def check_dtype(name: str) -> torch.dtype:
    """The storage dtype called `name`.

    Raises:
        BadInputError: unknown.
    """
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in known:
        raise BadInputError(f"weights dtype '{name}' is unknown; use one of {', '.join(known)}")
    return known[name]


def save_mapper(
    mapper: Mapper,
    path: Path,
    *,
    recipe: Mapping[str, Any],
    calibration: Mapping[str, Any],
    dtype: str = "float32",
    overwrite: bool = False,
    imported: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a mapper.

    Args:
        mapper: the fitted mapper.
        path: directory to create.
        recipe: `Recipe.configuration()`.
        calibration: manifest of the moments it was fitted on.
        dtype: storage dtype of the weights.
        overwrite: replace an existing directory.
        imported: where a map that others fitted came from.

    Raises:
        BadInputError: an unknown dtype, or `path` exists.
    """
    stored_as = check_dtype(dtype)
    manifest = Manifest(
        recipe=dict(recipe),
        source=calibration["source"],
        target=calibration["target"],
        calibration=dict(calibration["data"]),
        fit=mapper.describe(),
        weights_dtype=dtype,
        created=utc_now(),
        versions=versions(),
        experimental=len({(pin["geometry"]["kv_heads"], pin["geometry"]["head_dim"]) for pin in (calibration["source"], calibration["target"])}) > 1,
        imported=dict(imported) if imported is not None else None,
    )
    with atomic_directory(path, overwrite=overwrite) as directory:
        tensors = {name: tensor.to(stored_as).contiguous() for name, tensor in mapper.tensors()}
        save_file(tensors, str(directory / "weights.safetensors"))
        (directory / "manifest.json").write_text(dump_json(manifest.model_dump()), encoding="utf-8")
    return manifest


def load_mapper(path: Path, *, verify: bool = True) -> tuple[Mapper, dict[str, Any]]:
    """Read a mapper; weights stay on disk until a layer is asked for.

    Args:
        path: the artifact.
        verify: check all checksums first.

    Returns:
        The mapper and its manifest.

    Raises:
        ArtifactError: damaged, foreign, newer, or of an unknown method.
    """
    from kvbench.mappers.registry import recipe_class

    manifest = read_manifest(path, "mapper")
    if verify:
        verify_sums(path)
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"'{path}/manifest.json' does not fit the format: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    store = DiskStore(path / "weights.safetensors")
    mapper = recipe_class(manifest["recipe"]["method"]).mapper_class.from_artifact(manifest, store)
    mapper.name = path.name if path.name else manifest["recipe"]["method"]
    return mapper, manifest
