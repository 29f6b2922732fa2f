"""Streaming centred second moments of (source, target) content: all that a closed-form fit needs.

Products are taken in float32 over data shifted by the first chunk's mean, then added in float64, so that neither a large
mean nor many rows cost digits. Two halves merge into exactly the moments of one pass, up to float64 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import ArtifactError, BadInputError
from kvbench.ranks import Ranks

# Column blocks of X'X: only those on and above the block diagonal are computed, the rest is mirrored at the end.
BLOCK_COLUMNS = 512


@dataclass
class CrossMoments:
    """Moments of one kind (keys or values) of one part (fit or held-out).

    Attributes:
        rows: rows seen.
        mean_x: `[px]` mean of the source features.
        mean_y: `[py]` mean of the target features.
        xx: `[px, px]` centred, un-normalised X'X.
        xy: `[px, py]` centred, un-normalised X'Y.
        yy: `[py]` centred, un-normalised diagonal of Y'Y.
    """

    rows: int
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def merge(self, other: CrossMoments) -> CrossMoments:
        """Moments of both sets of rows together (Chan, Golub, LeVeque 1979)."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        rows = self.rows + other.rows
        weight = self.rows * other.rows / rows
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share = other.rows / rows
        return CrossMoments(
            rows,
            self.mean_x + share * dx,
            self.mean_y + share * dy,
            self.xx + other.xx + weight * torch.outer(dx, dx),
            self.xy + other.xy + weight * torch.outer(dx, dy),
            self.yy + other.yy + weight * dy.square(),
        )


@dataclass
class MomentAccumulator:
    """Builds `CrossMoments` chunk by chunk.

    Args:
        px: source features.
        py: target features.
    """

    px: int
    py: int
    rows: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, shift_x: Tensor, shift_y: Tensor) -> None:
        """Start from zero with given shifts `[px]` and `[py]`; accumulators of equal shifts add up sum by sum."""
        zeros = {"xx": (self.px, self.px), "xy": (self.px, self.py), "yy": (self.py,), "sx": (self.px,), "sy": (self.py,)}
        self.state = {name: torch.zeros(shape, dtype=torch.float64, device=shift_x.device) for name, shape in zeros.items()}
        self.state["shift_x"], self.state["shift_y"] = shift_x, shift_y

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add rows: `x` `[n, px]`, `y` `[n, py]`."""
        x, y = x.float(), y.float()
        if not self.state:
            self.begin(x.mean(0), y.mean(0))
        x, y = x - self.state["shift_x"], y - self.state["shift_y"]
        s = self.state
        for start in range(0, self.px, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, self.px)
            s["xx"][:stop, start:stop] += x[:, :stop].T @ x[:, start:stop]
        s["xy"] += x.T @ y
        s["yy"] += y.square().sum(0, dtype=torch.float64)
        s["sx"] += x.sum(0, dtype=torch.float64)
        s["sy"] += y.sum(0, dtype=torch.float64)
        self.rows += x.shape[0]

    def result(self) -> CrossMoments:
        """The moments so far."""
        if not self.rows:
            raise BadInputError("no calibration rows were seen; give more sequences or a smaller stride")
        s, n = self.state, self.rows
        mx, my = s["sx"] / n, s["sy"] / n
        # One pass each: these matrices are hundreds of megabytes, or gigabytes.
        xx = torch.addr(s["xx"], mx, mx, alpha=-n)
        for start in range(0, self.px, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, self.px)
            square = xx[start:stop, start:stop]
            square.copy_(square.triu() + square.triu(1).T)
            xx[stop:, start:stop] = xx[start:stop, stop:].T
        return CrossMoments(
            n,
            s["shift_x"].double() + mx,
            s["shift_y"].double() + my,
            xx,
            torch.addr(s["xy"], mx, my, alpha=-n),
            s["yy"] - n * my.square(),
        )

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums by those over all processes, whose shifts are equal; exact up to float64 rounding."""
        for name in ("xx", "xy", "yy", "sx", "sy"):
            ranks.add(self.state[name])
        self.rows = sum(ranks.gather(self.rows))

    def snapshot(self) -> dict[str, Tensor]:
        """Everything needed to go on later."""
        return {**self.state, "rows": torch.tensor(self.rows)} if self.state else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `snapshot`."""
        self.rows = int(tensors["rows"])
        self.state = {name: tensor for name, tensor in tensors.items() if name != "rows"}


def moment_files(path: Path) -> list[Path]:
    """The files of a calibration that hold its moments.

    Raises:
        ArtifactError: there are none.
    """
    files = sorted(path.glob("moments*.safetensors"))
    if not files:
        raise ArtifactError(f"'{path}' holds no moments; calibrate again")
    return files


class Calibration:
    """Stored moments of a pair, read lazily.

    Args:
        path: directory that `kvbench calibrate` wrote.

    Attributes:
        manifest: what was calibrated: pins of both models, data, layers, rows.
        source_layers: indices of the candidate source layers, in feature order.

    Raises:
        ArtifactError: not a calibration directory, damaged, or newer than this kvbench.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        from kvbench.storage import read_manifest, verify_sums

        self.path = path
        self.manifest: dict[str, Any] = read_manifest(path, "moments")
        verify_sums(path, only=("manifest.json",))
        # One file per part and kind; calibrations of before had a single one.
        try:
            self._files: list[Any] = [safe_open(str(file), framework="pt") for file in moment_files(path)]
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"the moments in '{path}' are damaged ({error}); calibrate again") from error
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a dict)
        self.source_layers: tuple[int, ...] = tuple(self.manifest["source_layers"])
        source, target = self.manifest["source"]["geometry"], self.manifest["target"]["geometry"]
        self.source_width = source["kv_heads"] * source["head_dim"]
        self.target_width = target["kv_heads"] * target["head_dim"]
        self.kv_heads, self.head_dim, self.target_layers = target["kv_heads"], target["head_dim"], target["layers"]
        self.source_kv_heads, self.source_head_dim = source["kv_heads"], source["head_dim"]
        self._kept: dict[tuple[str, str], CrossMoments] = {}

    def kinds(self) -> tuple[str, ...]:
        """Kinds stored: `k`, `v` and, where asked for, `k_rotated`."""
        return tuple(self.manifest["kinds"])

    def moments(self, part: str, kind: str) -> CrossMoments:
        """Moments of `part` (`fit` or `heldout`) and `kind` (`k`, `v`, `k_rotated`)."""
        if kind not in self.kinds():
            raise ArtifactError(f"{self.path} holds no moments of kind '{kind}' (it holds {', '.join(self.kinds())}); calibrate again with --rotated")
        if (part, kind) not in self._kept:
            prefix = f"{part}.{kind}."

            def get(name: str) -> Tensor:
                tensor: Tensor = self._where[name].get_tensor(name)
                return tensor

            tensors = [get(prefix + name) for name in ("mean_x", "mean_y", "xx", "xy", "yy")]
            self._kept[part, kind] = CrossMoments(int(get(prefix + "rows")), *tensors)
        return self._kept[part, kind]

    def columns(self, layers: Sequence[int]) -> Tensor:
        """Feature indices of the given source layers (model indices), in that order."""
        width = self.source_width
        where = {layer: i for i, layer in enumerate(self.source_layers)}
        missing = [layer for layer in layers if layer not in where]
        if missing:
            raise BadInputError(f"source layer {missing[0]} is not among the calibrated candidates {list(self.source_layers)}")
        return torch.cat([torch.arange(where[layer] * width, (where[layer] + 1) * width) for layer in layers])
