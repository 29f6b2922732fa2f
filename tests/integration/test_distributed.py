"""Two processes, started by torchrun with Gloo, do what one process does: moments, scores, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from kvbench.calibration.moments import Calibration
from kvbench.runs import load_frame

PAIR = ("embedded:source", "embedded:target")
CALIBRATE = ("calibrate", *PAIR, "--data", "embedded:world", "--sequences", "44", "--heldout", "8", "--seq-len", "96", "--stride", "1", "--no-gates")
TASKS = ("--tasks", "tiny_choice,tiny_sums,tiny_prefix", "--limit", "11", "--batch-size", "2")
EVALUATE = ("evaluate", *PAIR, "--mapper", "ridge=embedded:ridge", "--control", "shuffled", *TASKS, "--no-gates")
SCRIPT = Path(__file__).with_name("shared_work.py")
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(launcher: tuple[str, ...], commands: list[list[str]], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*launcher, str(SCRIPT), json.dumps(commands)], capture_output=True, text=True, timeout=240, env=env, check=False)


def _work(out: Path) -> list[list[str]]:
    return [[*CALIBRATE, "--out", str(out / "moments")], [*EVALUATE, "--out", str(out / "run"), "--json"]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    done = _run((sys.executable,), _work(out))
    assert done.returncode == 0, done.stderr
    (out / "printed").write_text(done.stdout.replace(str(out), "OUT"))
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    done = _run(TWO, _work(out))
    assert done.returncode == 0, done.stderr
    (out / "printed").write_text(done.stdout.replace(str(out), "OUT"))
    return out


def test_moments_are_those_of_one_process(one, two):
    _assert_same_moments(one / "moments", two / "moments")
    assert Calibration(two / "moments").manifest["processes"] == 2


def _assert_same_moments(first: Path, second: Path) -> None:
    """The same float32 products of the same chunks, added in another order in float64."""
    single, double = Calibration(first), Calibration(second)
    for part in ("fit", "heldout"):
        for kind in ("k", "v"):
            a, b = single.moments(part, kind), double.moments(part, kind)
            assert a.rows == b.rows
            for name in ("mean_x", "mean_y", "xx", "xy", "yy"):
                x, y = getattr(a, name), getattr(b, name)
                assert torch.allclose(x, y, rtol=0, atol=1e-13 * float(x.abs().max())), f"{part} {kind} {name}: {float((x - y).abs().max())}"


def test_every_answer_is_that_of_one_process(one, two):
    a, b = load_frame(one / "run"), load_frame(two / "run")
    # Same rows in the same order, same log-likelihoods to the last bit: the batches are the same.
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert set(a["task"]) == {"tiny_choice", "tiny_sums", "tiny_prefix"}
    assert (one / "printed").read_text() == (two / "printed").read_text()
    first, second = (json.loads((out / "run" / "spec.json").read_text()) for out in (one, two))
    assert first == second
    costs = [json.loads((out / "run" / "provenance.json").read_text())["cost"] for out in (one, two)]
    for name in ("mapped", "answered", "generated", "contexts", "too_short", "truncated"):
        assert costs[0][name] == costs[1][name], name


def test_a_calibration_goes_on_where_one_of_two_processes_died(two, tmp_path):
    command = [[*CALIBRATE, "--out", str(tmp_path / "moments"), "--checkpoint-seconds", "0"]]
    # Chunks are one batch here: process 1 has stored one checkpoint when it dies in its second batch, process 0 one or two.
    died = _run(TWO, command, FAIL_AT="2")
    assert died.returncode != 0
    assert not (tmp_path / "moments").exists()
    assert [p.name for p in (tmp_path / "moments.partial").glob("fit.k-v.rank1.checkpoint")]
    done = _run(TWO, command)
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint" in done.stderr
    _assert_same_moments(two / "moments", tmp_path / "moments")


def test_commands_that_cannot_be_shared_say_so():
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-m", "kvbench", "tasks", "ls"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert "'kvbench tasks' runs in one process, but 2 were started; only calibrate and evaluate can be shared" in done.stderr
