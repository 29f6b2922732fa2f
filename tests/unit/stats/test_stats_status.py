"""Results as plain JSON, and an evidence wing without torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from kvbench.stats import Interval, Undefined, as_json, decide, paired_proportions, paired_retention


def test_results_become_json(rng: np.random.Generator) -> None:
    result = paired_retention([1.0, 0.0] * 10, [1.0, 1.0] * 10, rng=rng, higher_is_better=True)
    decision = decide(Interval(0.0, 1.0, 0.95, "given"), null=0, margin=0.1, n=50)
    text = json.dumps(as_json({"r": result, "d": [decision], "p": paired_proportions([1, 0], [0, 0])}), allow_nan=False, sort_keys=True)
    back = json.loads(text)
    assert back["r"]["interval"] == {"undefined": "n = 20 items; a bootstrap interval needs at least 30"}
    assert back["r"]["clusters"] is None
    assert back["d"][0]["disposition"] == "no material loss"
    assert back["p"]["interval"]["method"] == "Tango score (1998)"


def test_json_of_what_no_result_holds() -> None:
    assert as_json(Undefined("why")) == {"undefined": "why"}
    with pytest.raises(ValueError, match="not finite"):
        as_json({"x": math.nan})
    with pytest.raises(TypeError, match="ndarray"):
        as_json(np.zeros(2))


def test_statistics_import_no_torch() -> None:
    code = "import sys, kvbench.stats; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
