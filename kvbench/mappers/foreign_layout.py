"""What the importers share: what a foreign directory says, reading it, and refusing it with one message."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PRECISIONS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Short names of dtypes in other formats."""


@dataclass(frozen=True)
class Side:
    """What a foreign format says of one model; None where it says nothing.

    Attributes:
        name: hub id or whatever the format calls the model.
        revision: weights revision.
        layers: layers of the model.
        kv_heads: KV heads of every layer.
        head_dim: width of one head.
        rope_theta: base of the rotary frequencies.
        dtype: the model's computing dtype.
    """

    name: str | None = None
    revision: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    dtype: str | None = None

    def heads(self) -> tuple[int, int]:
        """KV heads and head width.

        Raises:
            ArtifactError: not known.
        """
        if self.kv_heads is None or self.head_dim is None:
            raise ArtifactError(f"the KV heads and head width of '{self.name}' are not known")
        return self.kv_heads, self.head_dim


@dataclass(frozen=True)
class ForeignMap:
    """A linear map in kvbench's layout, with what its own format tells of it.

    Attributes:
        source: the model that prefills.
        target: the model that answers.
        key_layers: source layers of the keys, per target layer, in row order.
        value_layers: the same of the values; most formats have one list for both.
        tensors: `target.{layer}.{k|v}.{W|b}`, or `A`, `B`, `b` for a map kept as two factors.
        rotated: fitted on rotated keys.
        settings: k, lambda and the like, for the recipe.
        calibration: what is known of the calibration data.
        figures: R2 per target layer, under kvbench's names.
        statements: what else the foreign manifest says, kept for the record.
        notes: what a reader must bear in mind.
    """

    source: Side
    target: Side
    key_layers: list[list[int]]
    value_layers: list[list[int]]
    tensors: Mapping[str, Tensor]
    rotated: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, list[float]] = field(default_factory=dict)
    statements: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


class TensorFile:
    """A safetensors file whose shapes are known before anything is read.

    Raises:
        BadInputError: there is no such file.
        ArtifactError: it is not safetensors.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise BadInputError(f"'{path.parent}' has no {path.name}; give the directory that holds it")
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            names = list(self._file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"'{path}' cannot be read as safetensors: {error}; copy it again") from error
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(self._file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
            for name in names
        }

    def get(self, name: str) -> Tensor:
        """The tensor called `name`."""
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def check(self, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Compare all names and shapes with what the manifest makes of them.

        Args:
            expected: name -> (shape, why it must be so).

        Raises:
            ArtifactError: naming the first tensor that is missing, of another shape, or not accounted for.
        """
        for name, (shape, why) in expected.items():
            check_shape(str(self.path), name, self.shapes.get(name), shape, why)
        if extra := sorted(set(self.shapes) - set(expected)):
            raise ArtifactError(f"'{self.path}' holds {len(extra)} tensors that the manifest does not account for, first '{extra[0]}'")


def check_shape(where: str, name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...], why: str) -> None:
    """One tensor.

    Raises:
        ArtifactError: it is missing or of another shape.
    """
    if found is None:
        raise ArtifactError(f"'{where}' lacks tensor '{name}', expected as {list(wanted)} ({why})")
    if found != wanted:
        raise ArtifactError(f"'{where}': tensor '{name}' is {list(found)}, but {why} makes it {list(wanted)}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadInputError: there is no such file.
        ArtifactError: it is not a JSON object.
    """
    if not path.is_file():
        raise BadInputError(f"'{path.parent}' has no {path.name}; give the directory that holds it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"'{path}' is damaged: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"'{path}' holds a {type(value).__name__}, not a JSON object")
    return value


def part(manifest: Mapping[str, Any], path: Path, *keys: str, kind: type | tuple[type, ...]) -> Any:
    """A nested entry of a foreign manifest.

    Raises:
        ArtifactError: absent, or of another type.
    """
    value: Any = manifest
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise ArtifactError(f"'{path}' lacks '{'.'.join(keys)}'; it is not a complete manifest of this format")
        value = value[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ArtifactError(f"'{path}': '{'.'.join(keys)}' is {value!r}, which is of the wrong type")
    return value


def size(manifest: Mapping[str, Any], path: Path, *keys: str) -> int:
    """A nested entry that counts something.

    Raises:
        ArtifactError: absent, or not a whole number above 0.
    """
    value: int = part(manifest, path, *keys, kind=int)
    if value < 1:
        raise ArtifactError(f"'{path}': '{'.'.join(keys)}' is {value}; it counts something and must be at least 1")
    return value


def check_source_layers(path: Path, target_layer: int, layers: object, available: int | None) -> list[int]:
    """The source layers of one target layer.

    Raises:
        ArtifactError: not a list of distinct layers that exist.
    """
    if not isinstance(layers, list | tuple) or not layers or not all(type(layer) is int for layer in layers):
        raise ArtifactError(f"'{path}': the source layers of target layer {target_layer} are {layers!r}, not a list of layer numbers")
    if len(set(layers)) != len(layers):
        raise ArtifactError(f"'{path}': target layer {target_layer} names a source layer twice: {list(layers)}")
    wrong = [layer for layer in layers if layer < 0 or (available is not None and layer >= available)]
    if wrong:
        last = f"the source has layers 0 to {available - 1}" if available is not None else "layers count from 0"
        raise ArtifactError(f"'{path}': target layer {target_layer} reads source layer {wrong[0]}, but {last}")
    return list(layers)


def check_complete(path: Path, found: Iterable[int], what: str, layers: int | None = None) -> int:
    """Refuse gaps in the target layers, and return how many there are.

    Raises:
        ArtifactError: a layer is missing, or one is beyond the model.
    """
    present = set(found)
    count = layers if layers is not None else (max(present) + 1 if present else 0)
    missing, beyond = sorted(set(range(count)) - present), sorted(present - set(range(count)))
    if missing or not count:
        raise ArtifactError(f"'{path}' has no {what} for target layer {missing[0] if missing else 0}; a map needs every target layer")
    if beyond:
        raise ArtifactError(f"'{path}' has a {what} for target layer {beyond[0]}, but the target has layers 0 to {count - 1}")
    return count


def finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor, refused if an entry is not finite.

    Raises:
        ArtifactError: NaN or infinite entries.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"'{path}': tensor '{name}' holds entries that are not finite; the fit it comes from failed")
    return tensor


def all_finite(values: Sequence[object]) -> list[float] | None:
    """Figures of all layers, or None if one of them is unknown."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    return numbers if values and len(numbers) == len(values) else None


def plain(value: object) -> Any:
    """A statement as JSON takes it: figures that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


Reader = Callable[[Path, Mapping[str, Side], "str | None"], ForeignMap]
"""Called with the directory, what the user said of `source` and `target` (if anything), and the variant to take."""
