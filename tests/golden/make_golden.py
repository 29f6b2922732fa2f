"""Write the golden run and its comparison: `PYTHONPATH=. python tests/golden/make_golden.py`, once per schema version, never to make a test pass.

lm_eval_0_4_13/ holds what `lm_eval --model hf --log_samples --limit 40` of lm-eval 0.4.13 wrote for the embedded models and four tiny tasks,
with the description of the machine emptied.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "unit" / "runs"), str(HERE.parent / "unit" / "reporting")]

from lm_eval_samples import choice_samples, f1_samples, prefix_samples  # noqa: E402
from made_runs import make_run  # noqa: E402

from kvbench.reporting import Policy, compare  # noqa: E402
from kvbench.runs import load_runs  # noqa: E402
from kvbench.runs.schema import SCHEMA_VERSION  # noqa: E402
from kvbench.storage import dump_json  # noqa: E402

POLICY = Policy(resamples=1_000)
ARMS = {"target": (0.7, 2.0), "source": (0.5, 2.2), "ridge": (0.65, 2.03), "zero": (0.26, 2.6)}


def main() -> None:
    """Write run_v1/ and comparison_v1.json beside this file."""
    run = HERE / f"run_v{SCHEMA_VERSION}"
    shutil.rmtree(run, ignore_errors=True)
    samples = {
        arm: {
            "choice": choice_samples("choice", 40, accuracy, arm),
            "text": prefix_samples("text", 32, nats, arm),
            "turns": f1_samples("turns", 12, 3, accuracy, arm),
        }
        for arm, (accuracy, nats) in ARMS.items()
    }
    make_run(run, arms=tuple(ARMS), samples=samples)
    comparison = compare(load_runs(run), POLICY).comparison
    named = comparison.model_copy(update={"runs": (), "arms": tuple(arm.model_copy(update={"run": "run"}) for arm in comparison.arms)})
    (HERE / f"comparison_v{SCHEMA_VERSION}.json").write_text(dump_json(named.model_dump(mode="json")), encoding="utf-8")


if __name__ == "__main__":
    main()
