"""Mean accuracies of stored runs, by arm and hold_back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import BadInputError
from kvbench.runs import RunStore

ACCURACIES = ("acc", "acc_norm", "exact_match")


def accuracies_of(runs: Sequence[Path]) -> dict[tuple[str, int | None], float]:
    """Mean over tasks of each arm's accuracy (acc before acc_norm before exact_match); `target` and `source` have hold_back None.

    Args:
        runs: directories of `kvbench evaluate`, each with a hold_back of its own.

    Raises:
        BadInputError: a run without accuracies.
        ArtifactError: no run.
    """
    found: dict[tuple[str, int | None], float] = {}
    for path in runs:
        store = RunStore.open(path)
        scores: dict[str, list[float]] = {}
        for result in store.results().results:
            accuracy = next((v for name, v in sorted(result.metrics.items()) if name.split(",")[0] in ACCURACIES), None)
            if accuracy is not None:
                scores.setdefault(result.arm, []).append(accuracy)
        if not scores:
            raise BadInputError(f"run '{path}' has no accuracies; give a run with right-or-wrong tasks, or drop it")
        for arm, values in scores.items():
            key = (arm, None) if arm in ("target", "source") else (arm, store.spec.hold_back)
            found[key] = sum(values) / len(values)
    return found
