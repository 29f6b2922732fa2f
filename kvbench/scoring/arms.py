"""Arms: the ways to answer that an evaluation compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ArtifactError, BadInputError
from kvbench.mappers.artifact import load_mapper
from kvbench.mappers.base import Mapper
from kvbench.mappers.controls import CONTROLS, Identity, control
from kvbench.pairs.geometry import geometry_of
from kvbench.pairs.models import LoadedModel
from kvbench.pairs.pins import check_pin, pin

Answering = Literal["target", "source"]
EMBEDDED = "embedded:"
NEEDS_EQUAL_SHAPES = ("identity", "raw")
"""Controls that copy the source cache."""


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Attributes:
        name: as in tables and files.
        answering: which model runs the held-back tokens and the continuation.
        mapper: what fills its cache; arms `target` and `source` read their own prefill.
        manifest: of a stored mapper.
    """

    name: str
    answering: Answering
    mapper: Mapper
    manifest: dict[str, Any] | None = None

    @property
    def transfers(self) -> bool:
        """Whether a source cache is involved at all (false for `target` and `source` themselves)."""
        return self.name not in ("target", "source")


def own_prefill(answering: Answering, model: LoadedModel) -> Arm:
    """The arm that answers from its own prefill, through the same injection path as all others."""
    return Arm(answering, answering, Identity(answering, "target" if answering == "target" else "source", model.layers))


def mapper_arm(spec: str, source: LoadedModel, target: LoadedModel, *, name: str | None = None) -> Arm:
    """A transfer arm from `mapper=`: a control, an artifact directory, or `embedded:ridge`.

    Raises:
        BadInputError: neither a control nor a directory, or a control that this pair's shapes rule out.
        ArtifactError: damaged, or fitted for other models.
    """
    if spec in CONTROLS:
        mapper = control(spec, target_layers=target.layers, kv_heads=target.kv_heads, head_dim=target.head_dim)
        if spec == "identity" and source.layers != target.layers:
            raise BadInputError(
                f"control 'identity' needs equally deep models, but '{source.name}' has {source.layers} layers and '{target.name}' {target.layers}; use 'raw'"
            )
        if spec in NEEDS_EQUAL_SHAPES and not equal_shapes(source, target):
            raise BadInputError(
                f"control '{spec}' puts the source cache into the target as it is, but '{source.name}' has {source.kv_heads} KV heads of {source.head_dim} "
                f"and '{target.name}' {target.kv_heads} of {target.head_dim}; use 'zero' or 'random'"
            )
        return Arm(name or spec, "target", mapper)
    path = artifact_path(spec)
    mapper, manifest = load_mapper(path)
    what = f"mapper '{spec}'"
    check_pin(manifest["source"], pin(source), "source", what)
    check_pin(manifest["target"], pin(target), "target", what)
    if manifest.get("imported"):
        check_unpinned(manifest, {"source": source, "target": target}, what)
    return Arm(name or path.name, "target", mapper, manifest)


def equal_shapes(source: LoadedModel, target: LoadedModel) -> bool:
    """Whether both models have as many KV heads of the same width."""
    return (source.kv_heads, source.head_dim) == (target.kv_heads, target.head_dim)


def check_unpinned(manifest: dict[str, Any], models: dict[str, LoadedModel], what: str) -> None:
    """Compare shapes and RoPE base of an imported map with the models at hand: where fingerprints are unknown, nothing else would.

    Raises:
        ArtifactError: they differ, or the map reads layers that the source lacks.
    """
    for role, model in models.items():
        stored = manifest[role]
        found: dict[str, float] = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
        pairs: list[tuple[str, float | None, float]] = [
            (name.replace("_", " "), stored["geometry"].get(name), value) for name, value in found.items()
        ]
        pairs.append(("RoPE base", (stored.get("rope") or {}).get("theta"), geometry_of(model.config).rope.theta))
        for name, wanted, value in pairs:
            if wanted is not None and wanted != value:
                raise ArtifactError(
                    f"{what} was fitted for a {role} with {name} {wanted}, but '{model.name}' has {value}; use the model it was fitted for"
                )
    lists = (*manifest["fit"]["source_layers"], *manifest["fit"].get("source_layers_v", ()))
    deepest = max(layer for layers in lists for layer in layers)
    if deepest >= models["source"].layers:
        raise ArtifactError(
            f"{what} reads source layer {deepest}, but '{models['source'].name}' has layers 0 to {models['source'].layers - 1}; use the model it was fitted for"
        )


def artifact_path(spec: str) -> Path:
    """Directory of a mapper named on the command line.

    Raises:
        BadInputError: unknown.
    """
    if spec.startswith(EMBEDDED):
        from kvbench.paths import mappers_directory

        path = mappers_directory() / "artifacts" / spec.replace(":", "-")
        if not path.is_dir():
            known = sorted(p.name.replace("-", ":", 1) for p in path.parent.glob("embedded-*")) if path.parent.is_dir() else []
            raise BadInputError(f"there is no embedded mapper '{spec}'; there are {', '.join(known) or 'none'}")
        return path
    path = Path(spec)
    if not path.exists():
        raise BadInputError(
            f"mapper '{spec}' is neither a control ({', '.join(CONTROLS)}) nor a directory; fit one with 'kvbench fit' or check the path"
        )
    return path
