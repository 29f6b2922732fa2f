"""Calibrations with a known answer: rows drawn from a planted relation, turned into moments the way a harvest does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.calibration.moments import Calibration, MomentAccumulator
from kvbench.storage import FORMAT_VERSION, atomic_directory, dump_json


@dataclass(frozen=True)
class Rows:
    """Source `[n, source layers * heads * dim]` and target `[n, target layers * heads * dim]` of one part and kind."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Planted:
    """A calibration and the rows behind it, by (part, kind)."""

    calibration: Calibration
    rows: dict[tuple[str, str], Rows]


def plant(
    folder: Path,
    relation: Callable[[Tensor, str], Tensor],
    *,
    source_layers: int = 4,
    target_layers: int = 3,
    heads: int = 2,
    dim: int = 4,
    fit_rows: int = 400,
    heldout_rows: int = 200,
    seed: int = 0,
    mean: float = 3.0,
    target_heads: int | None = None,
    source: Callable[[Tensor], Tensor] = lambda x: x,
) -> Planted:
    """Draw source rows, apply `relation(x, kind)`, and store the moments."""
    generator = torch.Generator().manual_seed(seed)
    rows, tensors = {}, {}
    for part, count in (("fit", fit_rows), ("heldout", heldout_rows)):
        for kind in ("k", "v"):
            x = source(torch.randn(count, source_layers * heads * dim, generator=generator, dtype=torch.float64) + mean)
            y = relation(x, kind)
            rows[part, kind] = Rows(x, y)
            accumulator = MomentAccumulator(x.shape[1], y.shape[1])
            for chunk in range(0, count, 128):
                accumulator.update(x[chunk : chunk + 128], y[chunk : chunk + 128])
            m = accumulator.result()
            for name in ("mean_x", "mean_y", "xx", "xy", "yy"):
                tensors[f"{part}.{kind}.{name}"] = getattr(m, name).contiguous()
            tensors[f"{part}.{kind}.rows"] = torch.tensor(m.rows)
    pins = [
        {"name": name, "geometry": {"layers": layers, "kv_heads": kv, "head_dim": dim, "query_heads": kv}}
        for name, layers, kv in (("planted-source", source_layers, heads), ("planted-target", target_layers, target_heads or heads))
    ]
    manifest = {
        "format": "kvbench-moments",
        "format_version": FORMAT_VERSION,
        "source": pins[0],
        "target": pins[1],
        "source_layers": list(range(source_layers)),
        "kinds": ["k", "v"],
        "data": {"name": "planted", "fingerprint": "0" * 64, "sequences": 1, "stride": 1},
    }
    with atomic_directory(folder) as directory:
        save_file(tensors, str(directory / "moments.safetensors"))
        (directory / "manifest.json").write_text(dump_json(json.loads(json.dumps(manifest))), encoding="utf-8")
    return Planted(Calibration(folder), rows)


def noise(like: Tensor, scale: float, seed: int = 7) -> Tensor:
    """Gaussian noise that does not depend on the global generator."""
    generator = torch.Generator().manual_seed(seed + like.shape[0])
    return scale * torch.randn(like.shape, generator=generator, dtype=like.dtype)


def dense_r2(y: Tensor, predicted: Tensor) -> float:
    """1 - RSS / TSS per coordinate from the rows themselves, mean over coordinates."""
    return float((1 - (y - predicted).square().sum(0) / (y - y.mean(0)).square().sum(0)).mean())
