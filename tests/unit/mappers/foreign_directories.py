"""Mapper directories as the other tools write them, with random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HEADS, DIM, SOURCE_LAYERS = 2, 3, 4
CHOSEN = [[2, 0], [3, 1], [1, 3]]
"""Not in ascending order: the order of rows is part of a map."""
VALUES = [[0], [3], [2]]


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def veloxquant(path: Path, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    path.mkdir()
    tensors = {}
    for i, layers in enumerate(CHOSEN):
        for j, kind in enumerate("kv"):
            tensors[f"{i}.w_{kind}"] = _random(HEADS, len(layers) * HEADS * DIM, DIM, seed=10 * i + j, dtype=dtype)
            tensors[f"{i}.b_{kind}"] = _random(HEADS, DIM, seed=10 * i + j + 5, dtype=dtype)
    spec = {
        "n_kv_heads": HEADS,
        "head_dim": DIM,
        "rope_theta": 10000.0,
        "rope_traditional": False,
        "rope_scaling": None,
        "model_type": "qwen3",
    }
    config = {
        "k": 2,
        "ridge_lambda": 0.01,
        "n_calib_sequences": 500,
        "calib_seq_len": 1024,
        "stride": 4,
        "content_space": True,
        "dtype": "float16",
    }
    manifest = {
        "format_version": 1,
        "source": {"n_layers": SOURCE_LAYERS, **spec},
        "target": {"n_layers": len(CHOSEN), **spec, "rope_theta": 1000000.0},
        "config": config,
        "layers": [{"target_layer": i, "source_layers": layers, "r2_k": 0.5 + i / 10, "r2_v": float("nan")} for i, layers in enumerate(CHOSEN)],
    }
    save_file(tensors, str(path / "mapper.safetensors"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    return tensors


def router(path: Path) -> dict[str, torch.Tensor]:
    path.mkdir()
    tensors = {}
    for i, layers in enumerate(CHOSEN):
        for j, kind in enumerate("kv"):
            tensors[f"target.{i}.{kind}.W"] = _random(len(layers) * HEADS * DIM, HEADS * DIM, seed=10 * i + j)
            tensors[f"target.{i}.{kind}.b"] = _random(HEADS * DIM, seed=10 * i + j + 5)
    layers = {str(i): chosen for i, chosen in enumerate(CHOSEN)}
    manifest = {
        "mapper_id": "small-large-full_head-bf16-tp1-h2-sabc-tdef-b1",
        "compatibility": {
            "source_model": "some/small",
            "source_revision": "a" * 40,
            "target_model": "some/large",
            "target_revision": "b" * 40,
            "variant": "full_head",
            "precision": "bf16",
            "source_tp": 1,
            "target_tp": 1,
            "head_order": "contiguous",
            "num_kv_heads": HEADS,
            "head_dim": DIM,
        },
        "topk": 2,
        "ridge_alpha": 0.01,
        "centered_inputs": True,
        "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": layers, "v": layers},
        "calibration": {"dataset": "some/text", "token_sha256": "c" * 64, "num_sequences": 500, "seq_len": 1024, "fitting_token_step": 4, "seed": 7},
        "evaluation_report": None,
        "schema_version": 1,
    }
    save_file(tensors, str(path / "weights.safetensors"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    seal(path)
    return tensors


def seal(path: Path) -> None:
    """Checksums as the router writes them."""
    names = ("manifest.json", "weights.safetensors")
    (path / "SHA256SUMS").write_text("".join(f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}\n" for n in names))


def kvxfer(path: Path, shapes: tuple[tuple[int, int], tuple[int, int]], target_layers: int, *, rank: int = 2) -> dict[str, dict[int, dict[str, Any]]]:
    """Variants `ridge` (whole) and `rank2_iso` (factors), for models of these (KV heads, head width); values read one source layer, keys two."""
    path.mkdir()
    rows, width = shapes[0][0] * shapes[0][1], shapes[1][0] * shapes[1][1]
    stored = {}
    for variant in ("ridge", "rank2_iso"):
        for word, k in (("keys", 2), ("values", 1)):
            states = {}
            for i in range(target_layers):
                layers = (CHOSEN if word == "keys" else VALUES)[i % 3]
                factors = [_random(k * rows, rank, seed=i), _random(rank, width, seed=i + 50)] if variant != "ridge" else None
                states[i] = {
                    "weight": _random(k * rows, width, seed=i + 7 * k) if factors is None else None,
                    "bias": _random(width, seed=i + 99),
                    "source_layers": layers,
                    "target_layer": i,
                    "r2": 0.5,
                    "rank": None if factors is None else rank,
                    "factors": factors,
                }
            torch.save(states, path / f"{variant}__{word}.pt")
            stored[f"{variant}__{word}"] = states
    diagnosed = {word: {str(i): {"held_out_r2": 0.25, "in_sample_r2": 0.75} for i in range(target_layers)} for word in ("keys", "values")}
    manifest = {
        "source": "some/small",
        "target": "some/large",
        "settings": {"k": 2, "lam": 0.001},
        "n_fit_tokens": 1234,
        "diagnostics": {"ridge": {**diagnosed, "lambda": {"keys": 0.01, "values": 0.1}}},
        "variants": ["rank2_iso", "ridge"],
    }
    (path / "maps.json").write_text(json.dumps(manifest))
    return stored
