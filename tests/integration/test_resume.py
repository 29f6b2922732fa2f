"""Evaluations that are killed, edited, or run out of disk."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.errors import KVBenchError
from kvbench.runs import load_frame
from kvbench.scoring.arms import mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.generation import GenerationSettings
from kvbench.scoring.journal import Journal
from kvbench.scoring.scorer import SharedScorer

COMMAND = (
    "evaluate",
    "embedded:source",
    "embedded:target",
    "--mapper",
    "ridge=embedded:ridge",
    "--tasks",
    "tiny_choice,tiny_sums",
    "--limit",
    "48",
    "--batch-size",
    "2",
)


def _scores(run: Path) -> pd.DataFrame:
    frame = load_frame(run)
    columns = [c for c in ("task", "filter", "doc_id", "arm", "loglikelihoods", "text") if c in frame.columns]
    return frame[columns].astype(str).sort_values(columns[:4]).reset_index(drop=True)


@pytest.fixture(scope="module")
def straight(run_cli, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("straight") / "run"
    done = run_cli(*COMMAND, "--out", out)
    assert done.returncode == 0, done.stderr
    return _scores(out)


@pytest.mark.parametrize("answers", [4, 60, 200])
def test_killed_at_some_moment_and_repeated_gives_the_same_scores(run_cli, straight, tmp_path, answers):
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "kvbench", *COMMAND, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = out / "answers.sqlite"
    deadline = time.monotonic() + 240
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and _count(journal) >= answers:
                break
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    kept = _count(journal) if journal.exists() else None
    assert not (out / "provenance.json").exists() or kept is None
    done = run_cli(*COMMAND, "--out", out)
    assert done.returncode == 0, done.stderr
    if kept:
        assert "going on with the unfinished run" in done.stderr
    pd.testing.assert_frame_equal(_scores(out), straight)


def _count(journal: Path) -> int:
    try:
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def test_an_edited_spec_is_refused_and_the_difference_named(run_cli, tmp_path):
    out = tmp_path / "run"
    assert run_cli(*COMMAND[:-3], "2", "--batch-size", "2", "--out", out).returncode == 0
    done = run_cli(*COMMAND[:-3], "2", "--batch-size", "2", "--hold-back", "2", "--out", out)
    assert done.returncode == 2
    assert "hold_back = 1, but this command asks for 2" in done.stderr


def _scorer(tiny: Any, journal: Journal | None) -> SharedScorer:
    source, target = tiny(layers=2, seed=1), tiny(layers=3, seed=2)
    arms = [own_prefill("target", target), mapper_arm("raw", source, target)]
    return SharedScorer(TransferEngine(source, target, arms), batch_size=2, max_length=512, journal=journal)


def test_answers_in_the_journal_are_not_computed_again(tiny, tmp_path):
    requests = [((5, 9, 13, 17, i), (21, 22)) for i in range(6)]
    settings = GenerationSettings(4, ("x",))
    first = _scorer(tiny, Journal(tmp_path / "j"))
    scores, texts = first.loglikelihoods("raw", requests), first.generations("raw", [(c, settings) for c, _ in requests])
    second = _scorer(tiny, Journal(tmp_path / "j"))
    assert second.loglikelihoods("raw", requests) == scores
    assert second.generations("raw", [(c, settings) for c, _ in requests]) == texts
    assert second.engine.costs.prefilled == {"source": 0, "target": 0}


def test_a_full_disk_keeps_what_was_finished(tmp_path):
    """SQLite's own size limit stands for a full disk: it fails with the same error class, at the same place."""
    journal = Journal(tmp_path / "j")
    journal.put([(Journal.key("score", i), [0.5, True]) for i in range(10)])
    journal._connection.execute("PRAGMA max_page_count = 3")
    with pytest.raises(KVBenchError, match=r"cannot be written.*everything finished so far is kept"):
        journal.put([(Journal.key("score", i), "x" * 500) for i in range(10, 200)])
    again = Journal(tmp_path / "j")
    assert all(again.get(Journal.key("score", i)) == [0.5, True] for i in range(10))
    assert again.get(Journal.key("score", 11)) is None


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/bin/mount").exists(), reason="mounting a small tmpfs needs root")
def test_a_really_full_disk_ends_in_one_message(run_cli, straight, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        done = run_cli(*COMMAND, "--out", disk / "run")
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "kvbench:" in done.stderr
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        done = run_cli(*COMMAND, "--out", disk / "run")
        assert done.returncode == 0, done.stderr
        pd.testing.assert_frame_equal(_scores(disk / "run"), straight)
    finally:
        subprocess.run(["umount", str(disk)], check=False)
