"""Pairs are handed out, begun again, and left alone once they are answered; workers are real processes, commands are made up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_commands import COMMANDS

from kvbench.errors import BadInputError
from kvbench.scale.driver import open_pairs, sweep_pairs
from kvbench.scale.engines import LocalEngine, RayEngine, make_engine
from kvbench.scale.pairs_file import PairTask, Stage
from kvbench.scale.work import LOG, PairRecord, read_record, work_on_pair


def _task(source: str, target: str = "t") -> PairTask:
    stages = (
        Stage(name="check", arguments=("check", source, target)),
        Stage(name="calibrate", arguments=("calibrate", source, target, "--out", "{pair}/moments"), result="moments/manifest.json"),
        Stage(name="evaluate", arguments=("evaluate", source, target), result="run/provenance.json"),
    )
    return PairTask(label=f"{source}--{target}", source=source, target=target, stages=stages)


def _sweep(tasks: list[PairTask], out: Path, engine: Any = None, retries: int = 1) -> tuple[list[PairRecord], list[PairRecord]]:
    told: list[PairRecord] = []
    records = sweep_pairs(tasks, out, engine or LocalEngine(), COMMANDS, workers=2, retries=retries, threads=1, told=told.append)
    return records, told


def test_every_outcome_is_recorded(tmp_path):
    tasks = [_task(name) for name in ("fine", "unfit", "bad", "flaky", "killed")]
    records, told = _sweep(tasks, tmp_path)
    by_name = {r.task.source: r for r in records}
    assert {name: r.state for name, r in by_name.items()} == {
        "fine": "finished",
        "unfit": "refused",
        "bad": "failed",
        "flaky": "finished",
        "killed": "finished",
    }
    assert {name: r.attempts for name, r in by_name.items()} == {"fine": 1, "unfit": 1, "bad": 1, "flaky": 2, "killed": 2}
    assert by_name["unfit"].reason == "because of what was printed"
    assert (by_name["bad"].reason, by_name["bad"].stage, by_name["bad"].permanent) == ("no such text", "calibrate", True)
    assert (by_name["fine"].verdict, by_name["fine"].headline) == ("supports deploying", "fine--t")
    again = {r.task.source: r.reason for r in told if r.state == "waiting"}
    assert again == {"flaky": "a crash", "killed": "the worker was killed by SIGKILL"}
    assert f"--out {tmp_path / 'fine--t'}/moments" in (tmp_path / "fine--t" / LOG).read_text()


def test_a_second_sweep_does_only_what_is_left(tmp_path):
    tasks = [_task("fine"), _task("unfit"), _task("flaky")]
    first, _ = _sweep(tasks, tmp_path, retries=0)
    assert [r.state for r in first] == ["finished", "refused", "failed"]
    logs = {t.label: (tmp_path / t.label / LOG).read_text() for t in tasks}
    assert [t.source for t in open_pairs(tmp_path, tasks)] == ["flaky"]
    second, told = _sweep(tasks, tmp_path)
    assert [r.state for r in second] == ["finished", "refused", "finished"]
    assert [r.task.source for r in told] == ["flaky"]
    assert all((tmp_path / label / LOG).read_text() == logs[label] for label in ("fine--t", "unfit--t"))
    # A stage whose result is there is not done again.
    assert second[2].attempts == 2
    done = work_on_pair(tasks[0], str(tmp_path / "fine--t"), COMMANDS, str(Path.cwd()), 1)
    assert done == "finished"
    assert (tmp_path / "fine--t" / LOG).read_text().count("calibrate") == 1


def test_a_pair_of_another_sweep_is_refused(tmp_path):
    _sweep([_task("fine")], tmp_path)
    other = _task("fine").model_copy(update={"stages": _task("fine").stages[:2]})
    with pytest.raises(BadInputError, match="was made by another sweep: stages: number of entries is 3 there and 2 now"):
        open_pairs(tmp_path, [other])


def test_engines_by_name():
    with pytest.raises(BadInputError, match="--engine dask is unknown; it is one of local, ray"):
        make_engine("dask", 2, address=None, gpus=0)
    with pytest.raises(BadInputError, match="--workers 0"):
        make_engine("local", 0, address=None, gpus=0)
    with pytest.raises(BadInputError, match="go with --engine ray"):
        make_engine("local", 2, address="auto", gpus=0)


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'kvbench\[ray\]'"):
        RayEngine(2)


@pytest.mark.filterwarnings("ignore")  # Ray's own: unclosed pipes and files of its daemons
def test_a_killed_ray_worker_costs_one_pair_and_no_result(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    path = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in path if p))
    tasks = [_task("slow"), _task("fine"), _task("other"), _task("unfit")]
    killed: list[int] = []

    def kill() -> None:
        """The worker of `slow`, once it is in the middle of its calibration."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not killed:
            if (tmp_path / "slow--t" / "tried").exists():
                record = read_record(tmp_path / "slow--t")
                assert record is not None
                assert record.pid is not None
                killed.append(record.pid)
                os.kill(record.pid, signal.SIGKILL)
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    records, told = _sweep(tasks, tmp_path, RayEngine(2))
    killer.join()
    assert killed
    assert [r.state for r in records] == ["finished", "finished", "finished", "refused"]
    assert [r.attempts for r in records] == [2, 1, 1, 1]
    assert [r.reason for r in told if r.state == "waiting"] == ["the Ray worker died"]
    assert all((tmp_path / f"{name}--t" / "run" / "provenance.json").exists() for name in ("slow", "fine", "other"))
