"""One line about memory before a stage begins, from what is loaded already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.calibration.planning import available_bytes

if TYPE_CHECKING:
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.base import Recipe
    from kvbench.pairs.models import LoadedModel


def latency_line(models: tuple[LoadedModel, LoadedModel], tokens: int) -> str:
    """Weights, and both caches of so many tokens (rows times length)."""
    source, target = (tokens * _cache_bytes(model) for model in models)
    return (
        f"memory plan: weights {_weights(models) / 1e9:.2f} GB, source cache {source / 1e9:.3f} GB and target cache {target / 1e9:.3f} GB at "
        f"{tokens:,} tokens; {available_bytes() / 1e9:.1f} GB available"
    )


def evaluation_line(models: tuple[LoadedModel, LoadedModel], answering: list[LoadedModel]) -> str:
    """Weights, and the caches of one context of 1,024 tokens: both models' own and one per arm."""
    caches = 1024 * (sum(_cache_bytes(model) for model in models) + sum(_cache_bytes(model) for model in answering))
    return (
        f"memory plan: weights {_weights(models) / 1e9:.2f} GB, caches of {len(answering)} arms {caches / 1e9:.3f} GB per context of 1,024 tokens; "
        f"{available_bytes() / 1e9:.1f} GB available"
    )


def fit_line(calibration: Calibration, recipe: Recipe) -> str:
    """Moments, which are mapped from disk and not loaded, and the factor of one set of source layers."""
    from kvbench.calibration.moments import moment_files

    moments = sum(file.stat().st_size for file in moment_files(calibration.path))
    k = getattr(recipe, "k", None)
    features = (k if isinstance(k, int) else len(calibration.source_layers)) * calibration.source_width
    return (
        f"memory plan: moments {moments / 1e9:.2f} GB, mapped from disk; factor of {features:,} features {16 * features**2 / 1e9:.2f} GB; "
        f"{available_bytes() / 1e9:.1f} GB available"
    )


def _weights(models: tuple[LoadedModel, LoadedModel]) -> int:
    # A pair of one model with itself has one set of weights.
    return sum(p.numel() * p.element_size() for m in {id(m.model): m.model for m in models}.values() for p in m.parameters())


def _cache_bytes(model: LoadedModel) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * model.dtype.itemsize
