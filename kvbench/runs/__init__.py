"""Runs: what is stored, how it is joined, where it came from. No torch.

A writer needs `RunStore`, `RunSpec` and `rows_from_lm_eval`; a reader needs `load_frame` (one data frame) or `load_runs` and `pair`.
"""

from kvbench.runs.convert import rows_from_lm_eval
from kvbench.runs.measured import Diagnostics, Extras, Handoff, Latency, Sweep
from kvbench.runs.pairing import PairedItems, pair
from kvbench.runs.schema import ArmSpec, ModelSpec, Provenance, Role, RunResults, RunSpec, SampleRow, TaskResult, TaskSpec
from kvbench.runs.sources import ComparableRun, load_frame, load_runs
from kvbench.runs.store import RunStore

__all__ = [
    "ArmSpec",
    "ComparableRun",
    "Diagnostics",
    "Extras",
    "Handoff",
    "Latency",
    "ModelSpec",
    "PairedItems",
    "Provenance",
    "Role",
    "RunResults",
    "RunSpec",
    "RunStore",
    "SampleRow",
    "Sweep",
    "TaskResult",
    "TaskSpec",
    "load_frame",
    "load_runs",
    "pair",
    "rows_from_lm_eval",
]
