"""`kvbench sweep-pairs` with real commands on this machine: one pair answered, one refused, nothing done twice."""

from __future__ import annotations

import json
import shutil

import yaml

from kvbench.embedded import member_path
from kvbench.runs import RunStore


def test_pairs_are_answered_or_refused_and_left_alone_afterwards(run_cli, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(member_path("target"), odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    file = {
        "models": ["embedded:source", "embedded:target", {"model": str(odd), "name": "odd"}],
        "pairs": [["embedded:source", "embedded:target"], ["odd", "embedded:target"]],
        "data": "embedded:world",
        "recipes": [{"recipe": "ridge", "set": {"k": "all"}}],
        "controls": ["zero"],
        "tasks": "tiny_choice",
        "limit": 12,
        "calibrate": {"sequences": 16, "heldout": 4, "seq_len": 96, "stride": 1, "gates": False},
        "evaluate": {"gates": False},
    }
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(file))
    command = ("sweep-pairs", tmp_path / "pairs.yaml", "--out", tmp_path / "out", "--workers", 2)
    done = run_cli(*command, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["state"], first["attempts"], first["reason"]) == ("finished", 1, None)
    assert "ridge keeps" in first["headline"]
    assert second["state"] == "refused"
    assert second["reason"].startswith("kv heads 1 and 2 (")
    assert second["run"] is None
    store = RunStore.open(first["run"])
    assert store.provenance() is not None
    assert [arm.name for arm in store.spec.arms] == ["target", "source", "ridge", "zero"]
    written = (tmp_path / "out" / "embedded-source--embedded-target" / "log.txt").read_text()
    assert written.count("$ kvbench calibrate") == 1
    again = run_cli(*command)
    assert again.returncode == 0
    assert "2 pairs, 2 of them answered already" in again.stderr
    assert "refused" in again.stdout
    plan = run_cli(*command, "--plan")
    assert plan.stdout.count("kvbench check") == 2
    file["calibrate"] = {"sequence": 3}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(file))
    wrong = run_cli(*command)
    assert wrong.returncode == 2
    assert "calibrate.sequence is no option" in wrong.stderr
