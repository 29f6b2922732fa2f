from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest import mock

import pytest
from lm_eval_samples import choice_samples, prefix_samples
from pydantic import ValidationError

from kvbench.errors import ArtifactError, BadInputError, KVBenchError
from kvbench.runs import ArmSpec, Provenance, RunSpec, RunStore, SampleRow, TaskResult, TaskSpec, load_frame, rows_from_lm_eval
from kvbench.runs.provenance import collect

SPEC = RunSpec(
    arms=(ArmSpec(name="target", role="target"), ArmSpec(name="ridge k=8", role="mapper", mapper="out/ridge")),
    tasks=(TaskSpec(name="arc/easy", num_fewshot=0), TaskSpec(name="wiki", num_fewshot=0)),
    dtype="float32",
)


def rows(task: str, arm: str) -> list[SampleRow]:
    made = prefix_samples(task, 5, 2.0, arm) if task == "wiki" else choice_samples(task, 5, 0.5, arm)
    return rows_from_lm_eval(made, task, arm)


def filled(path: Path) -> RunStore:
    store = RunStore.create(path, SPEC)
    for task in SPEC.tasks:
        for arm in SPEC.arms:
            store.write_samples(task.name, arm.name, rows(task.name, arm.name))
    return store


def test_a_run_round_trips(tmp_path: Path) -> None:
    store = filled(tmp_path / "run")
    store.write_results(
        [TaskResult(task="wiki", arm="target", n=5, metrics={"token_perplexity,none": 7.4}, higher_is_better={"token_perplexity": False})]
    )
    store.finish(Provenance(python="3.11", notes=("two contexts were too short",)))
    again = RunStore.open(tmp_path / "run")
    assert again.spec == SPEC
    assert again.results() == store.results()
    assert again.provenance() == Provenance(python="3.11", notes=("two contexts were too short",))
    frame = load_frame(tmp_path / "run")
    assert len(frame) == 20
    assert set(frame["arm"]) == {"target", "ridge k=8"}
    for (_, stored), row in zip(frame[(frame["task"] == "wiki") & (frame["arm"] == "target")].iterrows(), rows("wiki", "target"), strict=True):
        assert stored["metric.token_perplexity"] == row.metrics["token_perplexity"]
        assert stored["size.token_perplexity"] == row.sizes["token_perplexity"]


def test_has_tells_what_a_resumed_run_can_skip(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", SPEC)
    store.write_samples("wiki", "target", rows("wiki", "target"))
    resumed = RunStore.create(tmp_path / "run", SPEC)
    assert resumed.has("wiki", "target")
    assert not resumed.has("wiki", "ridge k=8")
    assert resumed.missing() == [("arc/easy", "target"), ("arc/easy", "ridge k=8"), ("wiki", "ridge k=8")]
    with pytest.raises(BadInputError, match=r"not finished: no samples of arc/easy \(target\)"):
        resumed.finish(Provenance())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype = 'float32', but this command asks for 'bfloat16'"),
        ({"limit": 10.0}, "limit = nothing, but this command asks for 10.0"),
        ({"tasks": (TaskSpec(name="arc/easy", num_fewshot=5), SPEC.tasks[1])}, r"tasks\[arc/easy\].num_fewshot = 0, but this command asks for 5"),
        ({"tasks": SPEC.tasks[:1]}, "tasks: number of entries = 2, but this command asks for 1"),
        ({"arms": (SPEC.arms[0], ArmSpec(name="ridge k=8", role="mapper", mapper="other"))}, r"arms\[ridge k=8\].mapper = 'out/ridge'"),
        ({"seeds": {"fewshot": 1}}, "seeds.fewshot = nothing, but this command asks for 1"),
    ],
)
def test_another_spec_is_refused_and_the_difference_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    RunStore.create(tmp_path / "run", SPEC)
    with pytest.raises(BadInputError, match=named):
        RunStore.create(tmp_path / "run", SPEC.model_copy(update=change))


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInputError, match="is not a kvbench run"):
        RunStore.create(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mappers": ["residual"]}, r"mappers = ridge k=8, but this command asks for residual"),
        ({"mappers": []}, "asks for none"),
        ({"target": "other"}, "target = none, but this command asks for other"),
    ],
)
def test_another_run_is_refused_from_names_alone(tmp_path: Path, change: dict[str, object], named: str) -> None:
    RunStore.create(tmp_path / "run", SPEC)
    same: dict[str, object] = {"source": "none", "target": "none", "mappers": ["ridge k=8"]}
    RunStore.refuse_other(tmp_path / "run", **same)
    RunStore.refuse_other(tmp_path / "new", **same)
    with pytest.raises(BadInputError, match=named):
        RunStore.refuse_other(tmp_path / "run", **{**same, **change})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInputError, match="is not a kvbench run"):
        RunStore.refuse_other(tmp_path, **same)


def test_rows_are_checked_before_they_are_stored(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", SPEC)
    good = rows("wiki", "target")
    with pytest.raises(BadInputError, match="comes twice"):
        store.write_samples("wiki", "target", [*good, good[0]])
    with pytest.raises(BadInputError, match="was given for task 'wiki', arm 'ridge k=8'"):
        store.write_samples("wiki", "ridge k=8", good)
    with pytest.raises(BadInputError, match="gave no samples"):
        store.write_samples("wiki", "target", [])
    with pytest.raises(BadInputError, match="arm 'other' is not in the spec"):
        store.write_samples("wiki", "other", good)
    assert not store.has("wiki", "target")


def test_a_full_disk_is_said_and_leaves_the_rest_intact(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", SPEC)
    store.write_samples("wiki", "target", rows("wiki", "target"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("kvbench.runs.table.pq.write_table", side_effect=full), pytest.raises(KVBenchError, match=r"the disk is full.*free some space"):
        store.write_samples("wiki", "ridge k=8", rows("wiki", "ridge k=8"))
    with mock.patch("os.fsync", side_effect=full), pytest.raises(KVBenchError, match="the disk is full"):
        store.write_results([])
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    store.write_samples("wiki", "ridge k=8", rows("wiki", "ridge k=8"))
    assert store.has("wiki", "ridge k=8")


def test_a_killed_write_leaves_no_half_file(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", SPEC)
    with mock.patch("kvbench.runs.table.pq.write_table", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.write_samples("wiki", "target", rows("wiki", "target"))
    assert not store.has("wiki", "target")
    assert [p.name for p in (tmp_path / "run" / "samples").iterdir()] == []


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path / "run")
    file = tmp_path / "run" / "samples" / "wiki@target.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArtifactError, match=r"wiki@target.parquet' cannot be read.*repeat the run"):
        store.samples()
    spec = json.loads((tmp_path / "run" / "spec.json").read_text())
    (tmp_path / "run" / "spec.json").write_text(json.dumps(spec | {"version": 2}))
    with pytest.raises(ArtifactError, match=r"schema version 2.*upgrade kvbench"):
        RunStore.open(tmp_path / "run")
    (tmp_path / "run" / "spec.json").write_text(json.dumps(spec | {"colour": "blue"}))
    with pytest.raises(ArtifactError, match="colour: Extra inputs are not permitted"):
        RunStore.open(tmp_path / "run")
    with pytest.raises(BadInputError, match="there is no run at"):
        RunStore.open(tmp_path / "none")


def test_nan_never_reaches_a_record() -> None:
    with pytest.raises(ValidationError):
        TaskResult(task="t", arm="a", metrics={"acc,none": float("nan")})
    with pytest.raises(ValidationError):
        rows("wiki", "target")[0].model_validate(rows("wiki", "target")[0].model_dump() | {"metrics": {"acc": float("inf")}})


def test_two_runs_of_one_spec_have_the_same_bytes(tmp_path: Path) -> None:
    first, second = filled(tmp_path / "a"), filled(tmp_path / "b")
    names = sorted(p.relative_to(first.path) for p in first.path.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second.path) for p in second.path.rglob("*") if p.is_file())
    for name in names:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_provenance_names_versions_machine_and_command() -> None:
    found = collect(command="kvbench evaluate a b", notes=["short contexts: 3"], cost={"map_seconds": 1.5})
    assert found.versions["numpy"]
    assert found.versions["kvbench"]
    assert found.machine["processor"]
    assert found.command == "kvbench evaluate a b"
    assert found.finished_utc is not None
    assert found.finished_utc.endswith("+00:00")
    assert Provenance.model_validate_json(found.model_dump_json()) == found
