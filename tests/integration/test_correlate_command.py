"""From an evaluation and its diagnostics to correlations, on the embedded pair."""

from __future__ import annotations

import json

import pytest

PAIR = ("embedded:source", "embedded:target")
MAPPERS = [part for name in ("ridge", "head_local", "low_rank", "mean") for part in ("--mapper", f"{name}=embedded:{name}")]


def test_a_run_and_its_diagnostics_give_points_and_figures(run_cli, tmp_path):
    run, out = tmp_path / "run", tmp_path / "correlation"
    done = run_cli("evaluate", *PAIR, *MAPPERS, "--control", "zero", "--tasks", "tiny_choice", "--limit", 40, "--no-gates", "--out", run)
    assert done.returncode == 0, done.stderr
    missing = run_cli("correlate", run)
    assert missing.returncode == 2
    assert "kvbench diagnose embedded:source embedded:target --mapper ridge=embedded:ridge" in missing.stderr
    text = ("--data", "embedded:world", "--prefix", 48, "--suffix", 32, "--sequences", 4, "--greedy-tokens", 0)
    done = run_cli("diagnose", *PAIR, *MAPPERS, "--control", "zero", *text, "--no-gates", "--out", run)
    assert done.returncode == 0, done.stderr
    done = run_cli("correlate", run, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    points = {p["arm"]: p for p in found["points"]}
    assert set(points) == {"ridge", "head_local", "low_rank", "mean", "zero"}
    assert points["zero"]["role"] == "control"
    # The fit's held-out R2 comes from the artifacts, which controls do not have.
    assert "calibration_r2" in points["ridge"]["figures"]
    assert "calibration_r2" not in points["zero"]["figures"]
    scores = {r["arm"]: r["metrics"]["acc,none"] for r in json.loads((run / "results.json").read_text())["results"]}
    for arm, point in points.items():
        assert point["outcomes"]["tiny_choice"] == pytest.approx(scores[arm] / scores["target"])
    assert (out / "scatter_attention_cosine_native.png").exists()
