"""How much a screen measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import BadInputError

EMBEDDED = "embedded:"


@dataclass(frozen=True)
class Budget:
    """Sizes of one budget.

    Attributes:
        name: quick, standard or full.
        sequences: calibration sequences of the fit.
        heldout: held-out sequences; one half chooses the recipe, the other is reported.
        seq_len: tokens per sequence.
        stride: every stride-th token is a row.
        candidates: (method, k); k = 0 stands for all layers.
        limit: items per task; None for all.
        canary_limit: items of the canary; None for all.
        text_limit: documents of tasks that score text; None for all.
        text_prefix: their prefix, tokens; as many are scored behind it.
        greedy_sequences: continued greedily.
        warmups: of the timing.
        repeats: of the timing.
    """

    name: str
    sequences: int
    heldout: int
    seq_len: int
    stride: int
    candidates: tuple[tuple[str, int], ...]
    limit: int | None
    canary_limit: int | None
    text_limit: int | None
    text_prefix: int
    greedy_sequences: int
    warmups: int
    repeats: int


BUDGETS = {
    "quick": Budget("quick", 50, 24, 512, 2, (("ridge", 8), ("head_local", 8)), 100, 50, 50, 512, 6, 2, 10),
    "standard": Budget("standard", 200, 48, 1024, 4, (("ridge", 4), ("ridge", 8), ("ridge", 12), ("head_local", 8), ("attn_repair", 8)), 400, 200, 100, 1024, 16, 5, 20),
    "full": Budget(
        "full", 500, 96, 1024, 4,
        (("ridge", 4), ("ridge", 8), ("ridge", 12), ("ridge", 20), ("ridge", 0), ("head_local", 8), ("head_local", 12), ("attn_repair", 8)),
        None, None, None, 1024, 32, 10, 50,
    ),
}  # fmt: skip
"""By name."""


def budget(name: str) -> Budget:
    """A budget by name.

    Raises:
        BadInputError: unknown.
    """
    if name not in BUDGETS:
        raise BadInputError(f"--budget '{name}' is unknown; use {', '.join(BUDGETS)}")
    return BUDGETS[name]


def candidate_recipes(chosen: Budget, source_layers: int, *, equal_heads: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """(directory, method, settings) of the candidates that this pair can have, each once.

    Args:
        chosen: the budget.
        source_layers: of the source.
        equal_heads: whether head-wise mappers are possible.
    """
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for method, k in chosen.candidates:
        if method in ("head_local", "attn_repair") and not equal_heads:
            continue
        layers = source_layers if k == 0 else min(k, source_layers)
        name = f"{method}-k{layers}"
        found.setdefault(name, (name, method, {"k": layers}))
    return list(found.values())


def default_tasks(source: str, target: str) -> list[str]:
    """Tasks that fail in different ways, for a pair: the tiny ones for the embedded family, else the screening group."""
    if source.startswith(EMBEDDED) and target.startswith(EMBEDDED):
        return ["tiny_choice", "tiny_fewshot", "tiny_sums", "tiny_turns", "tiny_prefix"]
    return ["kvxfer_screen"]
