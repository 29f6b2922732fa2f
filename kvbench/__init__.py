"""kvbench: is it safe to start a large model from a small model's mapped KV cache?

Public names load on first use, so that `import kvbench` costs nothing and needs no torch.
"""

from __future__ import annotations

# Every interpreter start imports this file (kvbench.pth), so it imports nothing that costs: not even typing.
from kvbench._version import __version__
from kvbench.errors import KVBenchError

_LAZY = {
    "Arm": "kvbench.scoring.arms",
    "Calibration": "kvbench.calibration.moments",
    "ContentKV": "kvbench.kv.content",
    "Harvest": "kvbench.calibration.harvest",
    "KVTransferLM": "kvbench.scoring.lm",
    "Mapper": "kvbench.mappers.base",
    "Recipe": "kvbench.mappers.base",
    "SharedScorer": "kvbench.scoring.scorer",
    "TransferEngine": "kvbench.scoring.engine",
    "check_pair": "kvbench.pairs.check",
    "evaluate_arms": "kvbench.scoring.evaluate",
    "load_mapper": "kvbench.mappers.artifact",
    "load_model": "kvbench.pairs.models",
    "run_gates": "kvbench.pairs.gates",
    "save_mapper": "kvbench.mappers.artifact",
}

__all__ = ["KVBenchError", "__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from importlib import import_module

        found: object = getattr(import_module(_LAZY[name]), name)
        return found
    raise AttributeError(f"module 'kvbench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
