"""Mappers that others fitted: in from three formats, out to two, bit for bit.

What a foreign format does not pin is taken from models that the user names (configurations and tokenizers, never weights), or recorded as unknown in
the pins: `kvbench mapper show` and every report say so. See the modules `foreign_*` for each layout and what is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers import foreign_kvxfer, foreign_router, foreign_veloxquant
from kvbench.mappers.artifact import Manifest, load_mapper, save_mapper
from kvbench.mappers.base import Mapper, Recipe
from kvbench.mappers.foreign_layout import DTYPES, ForeignMap, Reader, plain
from kvbench.mappers.foreign_pins import geometry_unknown, model_pin, side_of, stated_pin
from kvbench.mappers.linear import LinearMapper, MemoryStore, SelectedMapper, design_matrix
from kvbench.storage import atomic_directory, dump_json

READERS: dict[str, Reader] = {"veloxquant": foreign_veloxquant.read, "router": foreign_router.read, "kvxfer": foreign_kvxfer.read}
WRITERS = ("veloxquant", "router")
METHOD = "kvbench.mappers.foreign:Imported"


class ImportedMapper(LinearMapper):
    """A linear map from elsewhere: values may read other source layers than keys do, and a map may be kept as two factors.

    Tensors `target.{layer}.{k|v}.W`, or `.A` and `.B`, and `.b`; as in `LinearMapper` and `LowRankMapper`.
    """

    name = "imported"

    def map_kind(self, source: ContentKV, target_layer: int, kind: Kind) -> Tensor:
        """One product, or two with factors, from the layers of this kind."""
        layers = self.source_layers if kind == "k" else self.value_layers
        design = design_matrix(source, layers[target_layer], kind)

        def weight(name: str) -> Tensor:
            return self.weights.get(f"target.{target_layer}.{kind}.{name}", design.dtype, design.device)

        mapped = torch.addmm(weight("b"), design @ weight("A"), weight("B")) if self._factored else torch.addmm(weight("b"), design, weight("W"))
        return mapped.reshape(source.batch, source.tokens, self.kv_heads, self.head_dim)

    @property
    def value_layers(self) -> tuple[tuple[int, ...], ...]:
        """Source layers of the values, per target layer."""
        own = self.details.get("source_layers_v")
        return tuple(tuple(layers) for layers in own) if own is not None else self.source_layers

    @property
    def _factored(self) -> bool:
        return bool(self.details.get("factored"))

    def parameters(self) -> int:
        """Entries of all matrices."""
        if self._factored:
            return SelectedMapper.parameters(self)
        return sum(len(layers) for lists in (self.source_layers, self.value_layers) for layers in lists) * self.source_width * self.width


@dataclass(frozen=True)
class Imported(Recipe):
    """What is known of how an imported map was fitted; kvbench cannot repeat it.

    Attributes:
        format: where it came from.
        k: source layers per target layer.
        lambda_: ridge penalty, absolute.
        content_space: keys mapped without RoPE.
        variant: which of several maps it was.
    """

    method: ClassVar[str] = METHOD
    mapper_class: ClassVar[type[Mapper]] = ImportedMapper

    format: str = ""
    k: int | None = None
    lambda_: float | None = None
    content_space: bool = True
    variant: str | None = None

    def fit(self, calibration: Calibration, **_: Any) -> Mapper:
        """Refuse: there is nothing to fit."""
        raise BadInputError("an imported map is taken as it is and cannot be fitted; use --recipe ridge for a fit of the same kind")


def import_mapper(
    path: Path,
    out: Path,
    kind: str,
    *,
    models: Mapping[str, tuple[str, str | None]] | None = None,
    variant: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Manifest:
    """Turn a foreign map into a kvbench artifact.

    Args:
        path: directory in the foreign format.
        out: artifact to write.
        kind: `veloxquant`, `router` or `kvxfer`.
        models: by role (`source`, `target`) the model at hand and its revision; pinned by configuration and tokenizer, no weights are read.
        variant: which map, for formats that hold several.
        trust_remote_code: run code that the model repositories carry.
        overwrite: replace an existing directory.

    Returns:
        The manifest, whose pins list what is unknown.

    Raises:
        BadInputError: an unknown format, nothing to read, or a named model that is not the one the map is for.
        ArtifactError: the foreign directory is damaged or its shapes and layers do not add up.
    """
    if kind not in READERS:
        raise BadInputError(f"format '{kind}' is unknown; the formats are {', '.join(READERS)}")
    if not path.is_dir():
        raise BadInputError(f"'{path}' is not a directory; give the directory that holds the {kind} map")
    if out.exists() and not overwrite:
        raise BadInputError(f"'{out}' exists already; choose another --out or pass --overwrite")
    pinned = {role: model_pin(name, revision, trust_remote_code=trust_remote_code) for role, (name, revision) in (models or {}).items()}
    found = READERS[kind](path, {role: side_of(pin) for role, pin in pinned.items()}, variant)
    pins = {role: stated_pin(role, said, pinned.get(role), str(path)) for role, said in (("source", found.source), ("target", found.target))}
    pins["target"] = geometry_unknown({**pins["target"], "geometry": {**pins["target"]["geometry"], "layers": len(found.key_layers)}})
    _check_depth(found, pins["source"]["geometry"]["layers"], str(path))
    mapper = _mapper(found, pins)
    calibration = {"name": None, "fingerprint": None, "sequences": None, "seq_len": None, "stride": None, "rows": None, "seed": None}
    calibration |= found.calibration
    return save_mapper(
        mapper,
        out,
        recipe=Imported.from_settings(
            {"format": kind, **{name: value for name, value in found.settings.items() if value is not None}}
        ).configuration(),
        calibration={**pins, "data": calibration},
        dtype=_stored_dtype(found.tensors),
        overwrite=overwrite,
        imported={"format": kind, "from": path.name, "statements": plain(found.statements), "notes": [*found.notes, *_rounding(found.tensors)]},
    )


def _check_depth(found: ForeignMap, layers: int | None, where: str) -> None:
    """Formats that state no layer counts are checked against the models that the user names."""
    deepest = max(layer for lists in (found.key_layers, found.value_layers) for row in lists for layer in row)
    if layers is not None and deepest >= layers:
        raise BadInputError(f"'{where}' reads source layer {deepest}, but the source has layers 0 to {layers - 1}; name the model it was fitted for")


def _mapper(found: ForeignMap, pins: Mapping[str, Mapping[str, Any]]) -> ImportedMapper:
    source, target = pins["source"]["geometry"], pins["target"]["geometry"]
    details: dict[str, Any] = dict(found.figures)
    if found.value_layers != found.key_layers:
        details["source_layers_v"] = found.value_layers
    factored = [name for name in found.tensors if name.endswith(".A")]
    if factored:
        if any(name.endswith(".W") for name in found.tensors):
            raise BadInputError("some layers of this map are kept as factors and some whole; kvbench stores one kind per map")
        details["factored"] = True
    width = source["kv_heads"] * source["head_dim"]
    return ImportedMapper(found.key_layers, width, target["kv_heads"], target["head_dim"], MemoryStore(found.tensors), details, rotated=found.rotated)


def _stored_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The dtype they have, so that nothing changes; float32 for float64 or a mixture."""
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return found.pop() if len(found) == 1 and found <= set(DTYPES) else "float32"


def _rounding(tensors: Mapping[str, Tensor]) -> list[str]:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return ["float64 tensors were rounded to float32"] if wide else []


def export_mapper(
    artifact: Path, out: Path, kind: str, *, dtype: str | None = None, revisions: Mapping[str, str | None] | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write an artifact in a foreign format.

    Args:
        artifact: a kvbench artifact of a full-head linear map.
        out: directory to write.
        kind: `veloxquant` or `router`.
        dtype: of the written tensors; by default as stored, so that nothing changes.
        revisions: by role, commits to state in place of those pinned (router).
        overwrite: replace an existing directory.

    Returns:
        The foreign manifest.

    Raises:
        BadInputError: an unknown format or dtype, or a map that the format cannot express.
        ArtifactError: the artifact is damaged.
    """
    if kind not in WRITERS:
        raise BadInputError(f"kvbench does not write format '{kind}'; it writes {', '.join(WRITERS)}")
    if dtype is not None and dtype not in DTYPES:
        raise BadInputError(f"dtype '{dtype}' is unknown; use one of {', '.join(DTYPES)}")
    mapper, manifest = load_mapper(artifact)
    if not isinstance(mapper, LinearMapper) or (isinstance(mapper, ImportedMapper) and mapper.details.get("factored")):
        raise BadInputError(f"'{artifact}' is a {manifest['recipe']['method']} map; the {kind} format holds full-head linear maps (ridge) only")
    layers = _one_list(mapper, artifact, kind)
    stored = dtype or manifest["weights_dtype"]
    pins = {role: manifest[role] for role in ("source", "target")}
    common = (pins, layers, manifest["recipe"], manifest["fit"], manifest["calibration"], stored)
    if kind == "veloxquant":
        foreign, weights = foreign_veloxquant.manifest_of(*common), foreign_veloxquant.WEIGHTS
    else:
        foreign, weights = foreign_router.manifest_of(*common, revisions or {}), foreign_router.WEIGHTS
    tensors = {name: _narrowed(name, tensor, DTYPES[stored]) for name, tensor in mapper.tensors()}
    if kind == "veloxquant":
        tensors = _veloxquant_tensors(tensors, mapper.kv_heads)
    with atomic_directory(out, overwrite=overwrite) as directory:
        save_file(tensors, str(directory / weights))
        (directory / "manifest.json").write_text(dump_json(foreign), encoding="utf-8")
    return foreign


def _one_list(mapper: LinearMapper, artifact: Path, kind: str) -> list[list[int]]:
    """Source layers per target layer, where keys and values share them and all target layers have equally many."""
    if isinstance(mapper, ImportedMapper) and mapper.value_layers != mapper.source_layers:
        raise BadInputError(f"the values of '{artifact}' read other source layers than its keys; the {kind} format has one list for both")
    counts = sorted({len(layers) for layers in mapper.source_layers})
    if len(counts) > 1:
        raise BadInputError(f"target layers of '{artifact}' read {counts[0]} to {counts[-1]} source layers; the {kind} format has one k for all")
    return [list(layers) for layers in mapper.source_layers]


def _narrowed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrowed = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(narrowed).all()):
        raise BadInputError(
            f"tensor '{name}' reaches {float(tensor.float().abs().max()):.3g}, beyond {str(dtype).removeprefix('torch.')}; use --dtype float32"
        )
    return narrowed


def _veloxquant_tensors(tensors: Mapping[str, Tensor], kv_heads: int) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        _, layer, kind, part = name.split(".")
        out[f"{layer}.{part.lower()}_{kind}"] = foreign_veloxquant.stack_heads(tensor, kv_heads) if part == "W" else tensor.reshape(kv_heads, -1)
    return out
