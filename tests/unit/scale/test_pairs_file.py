"""From a file to the commands of every pair."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.sweep_pairs import known_options
from kvbench.errors import BadInputError
from kvbench.scale.pairs_file import pair_tasks, read_pairs_file

FILE: dict[str, Any] = {
    "models": ["a/small", "a/large", {"model": "/models/odd", "name": "odd one", "revision": "r1"}],
    "data": "text.jsonl",
    "recipes": ["ridge", {"recipe": "head_local", "name": "hl", "set": {"k": 8, "centred": True}}],
    "tasks": "arc_easy, piqa",
    "limit": 40,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def known() -> Any:
    return known_options()


def _written(tmp_path: Path, **changes: Any) -> Path:
    content = {k: v for k, v in {**FILE, **changes}.items() if v is not ...}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path / "pairs.yaml"


def _tasks(tmp_path: Path, known: Any, **changes: Any) -> list[Any]:
    return pair_tasks(read_pairs_file(_written(tmp_path, **changes)), known)


def test_every_ordered_pair_comes_once(tmp_path, known):
    tasks = _tasks(tmp_path, known)
    assert len(tasks) == 3 * 2
    assert {(t.source, t.target) for t in tasks} >= {("a/small", "a/large"), ("a/large", "a/small")}
    assert tasks[0].label == "a-small--a-large"
    assert [s.name for s in tasks[0].stages] == ["check", "calibrate", "fit", "fit", "evaluate"]


def test_listed_pairs_and_revisions(tmp_path, known):
    (task,) = _tasks(tmp_path, known, pairs=[["odd one", "a/large"]])
    assert (task.source, task.target, task.label) == ("/models/odd", "a/large", "odd-one--a-large")
    for stage in task.stages:
        assert ("--source-revision" in stage.arguments) == (stage.name != "fit")
        assert "--target-revision" not in stage.arguments


def test_options_become_flags(tmp_path, known):
    changes = {
        "calibrate": {"seq_len": 128, "gates": False, "separate-passes": True},
        "evaluate": {"metadata": ["a=1", "b=2"]},
        "diagnose": {"prefix": "64,128"},
    }
    task = _tasks(tmp_path, known, **changes)[0]
    words = {stage.name: " ".join(stage.arguments) for stage in task.stages}
    assert "--seq-len 128 --no-gates --separate-passes" in words["calibrate"]
    assert "--metadata a=1 --metadata b=2" in words["evaluate"]
    assert "--limit 40" in words["evaluate"]
    assert "--tasks arc_easy,piqa" in words["evaluate"]
    assert words["diagnose"].endswith("--prefix 64,128")
    assert "--set k=8 --set centred=true" in words["fit"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ["x"]}, "it knows models, pairs, data"),
        ({"data": ...}, "data: Field required"),
        ({"models": ["a/b", "a-b"]}, "two models are called 'a-b'"),
        ({"models": ["a/b"]}, "name at least two models"),
        ({"recipes": ["ridge", "ridge"]}, "two recipes are called 'ridge'"),
        ({"pairs": [["a/small", "a/huge"]]}, "'a/huge' is none of the models"),
        ({"tasks": ...}, "nothing to find out"),
        ({"tasks": ..., "diagnose": True}, "name tasks too"),
        ({"calibrate": {"sequence": 3}}, "calibrate.sequence is no option of 'kvbench calibrate'"),
        ({"calibrate": {"gates": 3}}, "it is true or false"),
        ({"evaluate": {"out": "x"}}, "evaluate.out follows from the rest of the file"),
        ({"limit": "many"}, "limit: Input should be a valid number"),
    ],
)
def test_mistakes_are_one_message(tmp_path, known, changes, message):
    with pytest.raises(BadInputError, match=re.escape(message)):
        _tasks(tmp_path, known, **changes)


@pytest.mark.parametrize(("text", "message"), [("[1, 2]", "a list, not a mapping"), ("a: [", "cannot be read as YAML")])
def test_files_that_are_no_file(tmp_path, text, message):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(BadInputError, match=message):
        read_pairs_file(tmp_path / "p.yaml")
    with pytest.raises(BadInputError, match="there is no file"):
        read_pairs_file(tmp_path / "q.yaml")
