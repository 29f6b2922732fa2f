"""`kvbench sweep` on the embedded pair: from moments to a recipe that `kvbench fit` reads."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from kvbench.cli.sweep import sweep
from kvbench.errors import BadInputError
from kvbench.runs.measured import read_extras

PAIR = ("embedded:source", "embedded:target")


@pytest.fixture(scope="module")
def moments(run_cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "moments"
    small = ("--data", "embedded:world", "--sequences", 12, "--heldout", 4, "--seq-len", 96, "--stride", 1, "--rotated")
    done = run_cli("calibrate", *PAIR, *small, "--no-gates", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_from_moments_to_a_fitted_choice(run_cli, moments, tmp_path):
    out = tmp_path / "sweep"
    command = ("sweep", moments, "--grid", "k=1,2,all", "--grid", "lambda=0.01,1", "--grid", "content_space=true,false", "--out", out)
    done = run_cli(*command, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["settings"]) == 12
    # No model was loaded.
    assert "loading" not in done.stderr.lower()
    assert {p.name for p in out.iterdir()} == {"sweep.csv", "sweep.json", "sweep.png", "sweep.svg", "recipe.yaml"}
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    stored = read_extras(out).sweep
    assert stored is not None
    assert len(stored.points) == 12
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    best = max(rows, key=lambda row: float(row["held-out R2"]))
    assert float(best["held-out R2"]) == next(p.score for p in stored.points if p.chosen)
    fitted = run_cli("fit", moments, "--recipe", out / "recipe.yaml", "--out", tmp_path / "artifact", "--json")
    assert fitted.returncode == 0, fitted.stderr
    figures = json.loads(fitted.stdout)
    assert figures["recipe"] == found["chosen"]
    assert (figures["r2_k_heldout"] + figures["r2_v_heldout"]) / 2 == pytest.approx(float(best["held-out R2"]))
    again = run_cli(*command)
    assert again.returncode == 2
    assert "holds a sweep already" in again.stderr


def test_sizes_and_attention(run_cli, moments, tmp_path):
    options = ("--sequences", "2,12", "--grid", "k=1,all", "--criterion", "attention_cosine", "--heldout-sequences", 2, "--x", "rows")
    done = run_cli("sweep", moments, *options, "--out", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    stored = read_extras(tmp_path / "s").sweep
    assert stored is not None
    assert stored.figure == "native attention cosine"
    assert {p.value for p in stored.points} == {192.0, 1152.0}
    assert {p.recipe for p in stored.points} == {"k=1", "k=all"}


def test_tasks_decide_and_others_are_kept_out(run_cli, moments, tmp_path):
    options = ("--grid", "k=1,4", "--criterion", "tasks", "--tasks", "tiny_choice,tiny_sums", "--hold-out-tasks", "tiny_fewshot", "--limit", 6)
    done = run_cli("sweep", moments, *options, "--out", tmp_path / "s", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for point in found["settings"]:
        scores = point["scores"]
        assert scores["mean accuracy of the choosing tasks"] == pytest.approx((scores["tiny_choice"] + scores["tiny_sums"]) / 2)
        assert "tiny_fewshot" not in scores
    assert {f["task"] for f in found["leave_one_out"]} == {"tiny_choice", "tiny_sums"}
    assert list(found["held_out_tasks"]) == ["tiny_fewshot"]
    assert (tmp_path / "s" / "leave_one_out.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to sweep"),
        ({"grid": ["k"]}, "not of the form"),
        ({"grid": ["kk=1"]}, "has no setting 'kk'"),
        ({"grid": ["k=9"]}, "use 1 to 4, or 'all'"),
        ({"grid": ["k=1"], "criterion": "accuracy"}, "it is one of heldout_r2, agreement, attention_cosine, tasks"),
        ({"grid": ["k=1"], "criterion": "tasks"}, "belong together"),
        ({"grid": ["k=1"], "x": "selection"}, "it is one of k, parameters"),
        ({"grid": ["k=1"], "sequences": "13"}, "holds 12 fit sequences"),
        ({"grid": ["k=1"], "sequences": "2,x"}, "not a comma-separated list of sizes"),
    ],
)
def test_mistakes_are_one_message(moments, tmp_path, monkeypatch, options, message):
    # In this process, which must keep its warnings and its logging.
    monkeypatch.setattr("kvbench.cli.options.quiet_libraries", lambda: None)
    with pytest.raises(BadInputError, match=re.escape(message)):
        sweep([moments], tmp_path / "out", **options)
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_the_command_says_it_without_a_traceback(run_cli, moments, tmp_path):
    done = run_cli("sweep", moments, "--grid", "k=1", "--criterion", "tasks", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "belong together" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fit_that_trains_goes_on_and_leaves_no_state_behind(run_cli, moments, tmp_path):
    options = ("--recipe", "mlp", "--set", "widths=4", "--set", "epochs=1", "--set", "k=1")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = run_cli("fit", moments, *options, "--out", whole)
    assert done.returncode == 0, done.stderr
    assert "training layers 12/12" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    # A fit that was killed at once: its directory holds nothing but the mark of what it was.
    other = run_cli("fit", moments, *options, "--set", "seed=1", "--out", resumed)
    assert other.returncode == 0, other.stderr
    (tmp_path / "third.partial").mkdir()
    again = run_cli("fit", moments, *options, "--out", tmp_path / "third")
    assert "going on with the unfinished fit" in again.stderr
    assert (tmp_path / "third" / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    assert (resumed / "weights.safetensors").read_bytes() != (whole / "weights.safetensors").read_bytes()
    assert not (tmp_path / "third.partial").exists()
