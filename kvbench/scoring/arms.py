"""Arms: the ways to answer that an evaluation compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import BadInputError
from kvbench.mappers.artifact import load_mapper
from kvbench.mappers.base import Mapper
from kvbench.mappers.controls import CONTROLS, Identity, control
from kvbench.pairs.models import LoadedModel
from kvbench.pairs.pins import check_pin, pin

Answering = Literal["target", "source"]
EMBEDDED = "embedded:"


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
        BadInputError: neither a control nor a directory.
        ArtifactError: damaged, or fitted for other models.
    """
    if spec in CONTROLS:
        mapper = control(spec, target_layers=target.layers, kv_heads=target.kv_heads, head_dim=target.head_dim)
        if spec == "identity" and source.layers != target.layers:
            raise BadInputError(
                f"control 'identity' needs equally deep models, but '{source.name}' has {source.layers} layers and '{target.name}' {target.layers}; use 'raw'"
            )
        return Arm(name or spec, "target", mapper)
    path = artifact_path(spec)
    mapper, manifest = load_mapper(path)
    what = f"mapper '{spec}'"
    check_pin(manifest["source"], pin(source), "source", what)
    check_pin(manifest["target"], pin(target), "target", what)
    return Arm(name or path.name, "target", mapper, manifest)


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
