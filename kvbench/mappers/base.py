"""The contract of every mapper and every recipe."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from torch import Tensor

from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV

if TYPE_CHECKING:
    from kvbench.calibration.moments import Calibration
    from kvbench.pairs.models import LoadedModel

Reads = Literal["source", "target", "shuffled"]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Mapper(ABC):
    """Turns source content into target content, one target layer at a time.

    Layer by layer, so that weights are read when needed and released afterwards, and peak memory holds one layer of them.
    """

    name: str = "mapper"
    reads: Reads = "source"
    """Whose cache it is given: the source's, or (controls) the target's own, or the target's of another prompt."""
    rotated: bool = False
    """Maps rotated keys onto rotated keys (content space off, an ablation)."""

    @abstractmethod
    def map_layer(self, source: ContentKV, target_layer: int) -> tuple[Tensor, Tensor]:
        """Map one layer.

        Args:
            source: content of the prefix; keys without RoPE.
            target_layer: index of the target layer to produce.

        Returns:
            Keys without RoPE and values, each `[batch, tokens, target kv_heads, target head_dim]`.
        """

    def parameters(self) -> int:
        """Entries of all weight matrices over all target layers (biases not counted, as in the paper)."""
        return 0

    def cost_per_token(self) -> int:
        """Multiply-adds to map one token into all target layers."""
        return self.parameters()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What has to be stored to use this mapper again, as (name, tensor)."""
        yield from ()

    def describe(self) -> dict[str, Any]:
        """What of the fit belongs in the manifest: source layers per target layer, R2, parameters."""
        return {}

    @classmethod
    def from_artifact(cls, manifest: Mapping[str, Any], store: TensorStore) -> Self:
        """Read back what `tensors` and `describe` wrote."""
        raise BadInputError(f"{cls.__name__} cannot be stored; it is rebuilt by name")


class TensorStore(Protocol):
    """Named tensors on disk or in memory, read one at a time."""

    def get(self, name: str) -> Tensor:
        """The tensor called `name`."""
        ...

    def names(self) -> list[str]:
        """All names."""
        ...


@dataclass(frozen=True)
class Recipe(ABC):
    """How to fit a mapper. The fields are the configuration; the repr is complete."""

    method: ClassVar[str]
    mapper_class: ClassVar[type[Mapper]]
    needs_models: ClassVar[bool] = False
    """Whether a fit runs both models again over the calibration tokens; others work from the moments alone."""

    @abstractmethod
    def fit(
        self,
        calibration: Calibration,
        *,
        models: tuple[LoadedModel, LoadedModel] | None = None,
        progress: Progress | None = None,
        checkpoint: Path | None = None,
    ) -> Mapper:
        """Fit on stored calibration.

        Args:
            calibration: moments and, for recipes with `needs_models`, the token sequences.
            models: source and target, if they are loaded already; recipes with `needs_models` load them otherwise.
            progress: told how far the fit is.
            checkpoint: directory where long fits keep what they have, and go on from if it exists.

        Raises:
            BadInputError: a field does not suit the pair (k above the layer count, a negative lambda, ...).
        """

    def configuration(self) -> dict[str, Any]:
        """Method and fields, as stored in a manifest and in recipe YAML files."""
        return {"method": self.method, **dataclasses.asdict(self)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Build from text or typed values.

        Raises:
            BadInputError: an unknown field, or a value of the wrong type.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values = {}
        for name, value in settings.items():
            if name not in fields:
                raise BadInputError(
                    f"recipe '{cls.method}' has no setting '{name}'; it has {', '.join(sorted(f.rstrip('_') for f in fields)) or 'none'}"
                )
            declared = fields[name].type
            # Without `from __future__ import annotations` in the recipe's module the annotation is a class, not text.
            annotation = declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))
            values[name] = _as_type(cls.method, name, value, annotation)
        return cls(**values)


def _as_type(method: str, name: str, value: Any, annotation: str) -> Any:
    """Convert command-line text to the field's annotated type."""
    options = [part.strip() for part in annotation.split("|")]
    if not isinstance(value, str):
        return _typed(method, name, value, options)
    if "None" in options and value.lower() in {"none", "null"}:
        return None
    if "bool" in options:
        if value.lower() in {"true", "yes", "1", "false", "no", "0"}:
            return value.lower() in {"true", "yes", "1"}
        raise BadInputError(f"recipe '{method}': {name} = '{value}' is not true or false")
    for kind, convert in (("int", int), ("float", float)):
        if kind in options:
            try:
                return convert(value)
            except ValueError:
                continue
    if "int" in options or "float" in options:
        if "str" in options or "Literal" in annotation:
            return value
        raise BadInputError(f"recipe '{method}': {name} = '{value}' is not a number")
    if annotation.startswith("tuple[int"):
        try:
            return tuple(int(part) for part in value.split(",") if part)
        except ValueError as error:
            raise BadInputError(f"recipe '{method}': {name} = '{value}' is not a comma-separated list of integers") from error
    return value


def _typed(method: str, name: str, value: Any, options: list[str]) -> Any:
    """A typed value, from YAML or Python, as the field's type; sequences of integers become tuples."""
    kinds: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
    known = [option for option in options if option in kinds]
    if any(option.startswith("tuple[int") for option in options) and isinstance(value, list | tuple) and all(type(v) is int for v in value):
        return tuple(value)
    # Types this knows nothing of (Literal, a plug-in's own) are the recipe's business.
    foreign = len(known) < len(options) and not any(option.startswith("tuple[int") for option in options)
    if foreign or any(isinstance(value, kinds[option]) and (option == "bool" or type(value) is not bool) for option in known):
        return value
    raise BadInputError(f"recipe '{method}': {name} = {value!r}, but it is of type {' or '.join(options)}")
