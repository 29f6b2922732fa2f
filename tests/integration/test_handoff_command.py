"""`kvbench handoff` as a user runs it, on the embedded family."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from kvbench.cli.handoff import handoff
from kvbench.errors import BadInputError
from kvbench.runs.measured import read_extras


@pytest.fixture(scope="module")
def ways(run_cli, tmp_path_factory):
    """Mappers from source to target and back."""
    folder = tmp_path_factory.mktemp("ways")
    for name, models in (("there", ("embedded:source", "embedded:target")), ("back", ("embedded:target", "embedded:source"))):
        sizes = ("--sequences", 40, "--heldout", 8, "--seq-len", 128, "--stride", 1, "--no-gates")
        done = run_cli("calibrate", *models, "--data", "embedded:world", "--out", folder / f"{name}-moments", *sizes)
        assert done.returncode == 0, done.stderr
        done = run_cli("fit", folder / f"{name}-moments", "--out", folder / name, "--set", "k=4")
        assert done.returncode == 0, done.stderr
    return folder


def test_three_protocols_and_a_resume(run_cli, ways, tmp_path):
    command = ["handoff", "embedded:source", "embedded:target", "--mapper", f"ridge={ways / 'there'}", "--mapper", "zero"]
    command += ["--back-mapper", ways / "back", "--protocol", "per_turn", "--protocol", "once", "--protocol", "alternate", "--data", "embedded:turns"]
    command += ["--conversations", 12, "--max-turns", 3, "--max-new-tokens", 6, "--batch-size", 5, "--dtype", "float32", "--out", tmp_path / "run"]
    done = run_cli(*command, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    arms = {(a["protocol"], a["arm"]): a for a in found["arms"]}
    assert set(arms) == {
        ("target", "target"),
        ("source", "source"),
        *((protocol, arm) for protocol in ("per_turn", "once", "alternate") for arm in ("ridge", "zero")),
        ("alternate", "own prefill"),
    }
    # The family is made so that ridge keeps the target's knowledge, the small model lacks some of it, and nothing answers without a cache.
    assert arms["target", "target"]["f1"] > 0.95
    assert arms["per_turn", "ridge"]["f1"] > 0.9 > arms["source", "source"]["f1"]
    assert arms["per_turn", "zero"]["f1"] < 0.2
    assert {a["answers"] for a in found["arms"]} == {36}

    # The report reads it, and the tables say the same.
    stored = read_extras(tmp_path / "run").handoff
    assert stored is not None
    assert {t.n for t in stored.turns} == {12}
    folder = tmp_path / "run" / "handoff"
    table = pd.read_csv(folder / "turns.csv")
    assert len(table) == len(stored.turns) == 27
    for name in ("handoff_f1", "handoff_drift"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{name}.svg").read_text()
        assert len(pd.read_csv(folder / f"{name}.csv")) == len(stored.turns)

    # A batch is lost (the run was killed): the same command makes exactly it again, and says the same.
    kept = folder / "answers" / "batch-00000.jsonl"
    before, untouched = (folder / "answers" / "batch-00002.jsonl").read_text(), kept.stat().st_mtime_ns
    (folder / "answers" / "batch-00002.jsonl").unlink()
    again = run_cli(*command, "--json")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert (folder / "answers" / "batch-00002.jsonl").read_text() == before
    assert kept.stat().st_mtime_ns == untouched

    other = run_cli(*command, "--history", "generated")
    assert other.returncode == 2
    assert "history = 'gold', but this command asks for 'generated'" in other.stderr
    assert "Traceback" not in other.stderr


def test_tables_and_what_did_not_fit(run_cli, ways, tmp_path):
    done = run_cli(
        *("handoff", "embedded:source", "embedded:target", "--mapper", ways / "there", "--data", "embedded:turns", "--conversations", 3),
        *("--max-new-tokens", 4, "--max-length", 90, "--no-gates", "--history", "generated", "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "there, per_turn" in done.stdout
    assert "3 clusters; a cluster bootstrap interval needs at least 10" in done.stdout
    assert "stories were cut on the left" in done.stderr
    provenance = json.loads((tmp_path / "run" / "handoff" / "provenance.json").read_text())
    assert any("cut on the left" in note for note in provenance["notes"])


def test_a_mistake_is_one_message(run_cli, tmp_path):
    done = run_cli("handoff", "embedded:source", "embedded:target", "--data", "embedded:turns", "--mapper", "oracle", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith("kvbench: control 'oracle' is not an arm of a handoff")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocol": ["twice"]}, "unknown protocol 'twice'"),
        ({"history": "none"}, "use gold or generated"),
        ({"mapper": ["zero", "zero"]}, "two arms would be called 'zero'"),
        ({"mapper": ["nowhere"], "protocol": ["alternate"]}, "needs a mapper from target to source for 'nowhere'"),
        ({"back_mapper": ["zero"]}, "add --protocol alternate"),
        ({"mapper": ["a", "b", "c"], "back_mapper": ["d", "e"], "protocol": ["alternate"]}, "2 --back-mapper for 3 fitted --mapper"),
        ({"handoff_turn": 9}, "the longest conversation has 8 turns"),
        ({"batch_size": 0}, "--batch-size 0; it must be at least 1"),
        ({"conversations": 0}, "--conversations 0; it must be at least 1"),
        ({"data": "coqa", "data_dir": Path("/nowhere")}, "no CoQA rows"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded_or_written(tmp_path, given, message):
    arguments = {"mapper": ["zero"], "data": "embedded:turns", "out": tmp_path / "run", **given}
    with pytest.raises(BadInputError, match=message):
        handoff("embedded:source", "embedded:target", **arguments)
    assert not (tmp_path / "run").exists()
