"""Files of earlier versions are read, and say what they said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.reporting import Comparison, Policy, compare
from kvbench.runs import load_runs

GOLDEN = Path(__file__).parents[2] / "golden"


def same(found: Any, golden: Any, where: str = "comparison") -> None:
    """Equal, numbers to nine digits (libraries may round the last ones differently)."""
    if isinstance(golden, dict):
        assert found.keys() == golden.keys(), where
        for name, value in golden.items():
            same(found[name], value, f"{where}.{name}")
    elif isinstance(golden, list):
        assert len(found) == len(golden), where
        for index, value in enumerate(golden):
            same(found[index], value, f"{where}[{index}]")
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=1e-9, abs=1e-12), where
    else:
        assert found == golden, where


def test_a_run_of_version_1_gives_its_stored_comparison() -> None:
    # Read as any reader of today does: fields that came later have their defaults.
    golden = Comparison.model_validate_json((GOLDEN / "comparison_v1.json").read_text()).model_dump(mode="json")
    found = compare(load_runs(GOLDEN / "run_v1"), Policy(resamples=1_000)).comparison.model_dump(mode="json")
    for arm in found["arms"]:
        arm["run"] = "run"
    found["runs"] = []
    same(found, golden)


def test_a_stored_comparison_of_version_1_is_read() -> None:
    assert Comparison.model_validate_json((GOLDEN / "comparison_v1.json").read_text()).version == 1


def test_real_lm_eval_folders_agree_with_lm_evals_own_figures() -> None:
    runs = [run for arm in ("target", "source") for run in load_runs(GOLDEN / "lm_eval_0_4_13" / arm)]
    comparison = compare(runs, Policy(resamples=1_000)).comparison
    assert [arm.name for arm in comparison.arms] == ["target", "source"]
    seen = 0
    for arm in ("target", "source"):
        (file,) = (GOLDEN / "lm_eval_0_4_13" / arm).rglob("results_*.json")
        for task, figures in json.loads(file.read_text())["results"].items():
            for key, value in figures.items():
                metric, _, filter_name = key.partition(",")
                if filter_name and not metric.endswith("_stderr"):
                    assert comparison.score(f"{task}|{filter_name}|{metric}", arm).score.value == pytest.approx(value)
                    seen += 1
    assert seen == 8
    assert {task.task: (task.kind, task.chance, task.cluster) for task in comparison.tasks} == {
        "tiny_choice": ("accuracy", 0.25, None),
        "tiny_sums": ("accuracy", 0.0, None),
        "tiny_prefix": ("nll", None, None),
        "tiny_turns": ("accuracy", 0.25, "conversation"),
    }
    pair = comparison.pair("tiny_choice|none|acc", "source", "target")
    assert pair is not None
    # The target answers all 40 items rightly, so the source can only lose those that it answers wrongly.
    accuracy = comparison.score("tiny_choice|none|acc", "source").score.value
    assert accuracy is not None
    assert comparison.score("tiny_choice|none|acc", "target").score.value == 1.0
    assert (pair.won, pair.lost, pair.disposition) == (0, round(40 * (1 - accuracy)), "degraded")
